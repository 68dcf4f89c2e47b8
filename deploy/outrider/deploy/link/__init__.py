"""A link between an edge and a verifier, emulated in user space: delay, jitter, rates, stalls, cuts, replayed traces.

`shape` and `link_traces` say what a link is like, `pipe` is one direction of it without any I/O, `link_relay` is the
shell that moves the bytes of real TCP connections through two pipes, and `link_process` runs it in a process.
"""
