"""A link between an edge and a verifier, emulated in user space: delay, jitter, rates, stalls, cuts, replayed traces.

`shape` and `traces` say what a link is like, `pipe` is one direction of it without any I/O, `relay` is the shell that
moves the bytes of real TCP connections through two pipes, and `process` runs that relay in a process of its own. A
`radio` may sleep.
"""
