"""`outrider traces`: recording of drafters' hits on one's own prompts, and replay of every policy on every link.

record     the command that writes a recording
recording  traces and costs of one file, checked
replay     the command that replays a recording
sweep      every drafter with every window over every link
pool       selectors of all drafters as one pool
stages     selectors on a link, in the simulator
tables     results for a terminal
plots      results as plots
"""
