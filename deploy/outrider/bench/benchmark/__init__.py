"""`outrider bench`: ways of decoding the same prompts, measured side by side.

command   from options to record and report
verifier  the verifier in a process of its own
library   the baselines that transformers itself gives, in another
measure   decode a prompt, and observe what happens
runs      from what was observed to runs
record    runs as JSON
table     the same as tables
plots     the same as pictures
report    tables and pictures on one HTML page
"""
