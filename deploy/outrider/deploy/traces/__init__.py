"""`outrider traces`: hits of drafters recorded on prompts of one's own, and every policy replayed on every link.

record         the command that writes a recording
drafters       whose hits are wanted, by the names that they are given
target_probe   what a step of the target takes
drafter_probe  what a drafter's token takes
costs          both, as they are kept beside the traces
replay         the command that replays a recording
recording      traces and costs of one file, checked
windows        window policies by name
grid           links, windows and drafters, each with each
figures        what came of it, as JSON
table          the same for a terminal
plots          and as pictures
outputs        where results go, looked at before the work
"""
