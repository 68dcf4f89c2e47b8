"""`outrider compare`: block efficiency of drafters, as SD² has it (arXiv 2511.09844), exactly and without a network.

command  from options to record
rounds   one drafter's way through one text
steps    what steering vectors cost a verifier
summary  from the rounds of many texts to results, ratios and their intervals
record   these as JSON
tables   the same for a terminal
plots    the same as a picture
"""
