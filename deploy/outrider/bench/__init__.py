"""Measure ways of decoding over emulated links, as a user would choose between them.

benchmark            `outrider bench`
bench_settings       its options
links                the links that the options name
environment          machine, versions and command of a measurement
bench_metrics        rates and latencies of many texts
record, table, plot  results as JSON, for a terminal, and as pictures
"""
