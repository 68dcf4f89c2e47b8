"""`outrider bench`: ways of decoding the same prompts, measured side by side.

command   from options to record and report
verifier  the verifier in a process of its own
library   the baselines of transformers, in another
measure   decode a prompt, and observe its session
runs      from observations to runs
replays   modes that are replayed, and the lengths that replays choose
ends      the modes replayed on a recording, with emulated times of a drafted token
record    runs as JSON
table     runs as tables
plots     runs as pictures
costs     the cloud's work, summed up
report    tables and pictures on one HTML page
"""
