"""`outrider traces`: hits of drafters recorded on prompts of one's own, and every policy replayed on every link.

record     the command that writes a recording
probes     what it measures on the way
recording  traces and costs of one file, checked
replay     the command that replays a recording
sweep      links, windows and drafters, each with each
pool       selectors of all drafters as one pool, and (pool_results) what came of them
stages     where they are played: both session machines on a link
tables     results for a terminal
plots      and as plots
"""
