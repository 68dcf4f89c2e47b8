"""`outrider compare`: the block efficiency of drafters (SD², arXiv 2511.09844), exactly and without a network.

command  from options to record
rounds   one drafter in one text
steps    cost of steering vectors to a verifier
summary  from the rounds of many texts to results, ratios and their intervals
record   these as JSON
tables   the same for a terminal
plots    the same as a picture
"""
