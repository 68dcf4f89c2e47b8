"""`outrider traces`: hits of drafters recorded on prompts of one's own, and every policy replayed on every link.

Recording

record         the command that writes a recording
drafters       whose hits are wanted, by the names that they are given
readers        their states behind the prompts
chances        what the target thought of what they propose
target_probe   what a step of the target takes
drafter_probe  what a drafter's token takes
costs          both, as they are kept beside the traces

Replaying
replay         the command that replays a recording
recording      traces and costs of one file, checked
windows        window policies by name
grid           links, windows and drafters, each with each
figures        what came of it, as JSON
table          the same for a terminal
progress       how far either command is
plots          and as pictures

Selectors, with all drafters as one pool
pool_replay    the command's other half
rows           which texts are met one after the other
stages         where they are played, and synchronous rounds
stream         the same on the session machine
aligned        a selector for many of its sessions
pool           rows, links and selectors, each with each
tally          runs, added up
pool_figures, pool_table, pool_plots
               what came of it, as JSON, for a terminal, and as pictures
"""
