"""Measure ways of decoding over emulated links, as a user would choose between them.

bench_command    `outrider bench`: from options to results
bench_settings   its options
bench_verifier   the verifier in a process of its own
bench_results    runs as JSON, as tables, and as a plot
links            the links that the options name
environment      machine, versions and command of a measurement
bench_metrics    rates of many texts together
record, table    results as JSON, and for a terminal
"""
