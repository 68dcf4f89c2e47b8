"""`outrider bench`: ways of decoding the same prompts, measured side by side.

command   from options to record and report
verifier  the verifier in a process of its own
measure   decode a prompt, and observe its session
runs      from observations to runs
record    runs as JSON
table     runs as tables
plots     runs as pictures
report    tables and pictures on one HTML page
"""
