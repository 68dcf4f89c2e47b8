"""Measure the system: ways of decoding, drafters, policies, selectors.

Commands, none of which imports another
benchmark        ways of decoding side by side, over emulated links
engine           steps of a target by part, in turn with those of other engines
comparison       block efficiency of drafters on the same texts
traces           hits of drafters recorded, and replayed over any link
length_training  length rules trained on recorded hits

What they share
simulator, replay     sessions on a virtual clock, and recorded hits in them
links, drafters       links and drafters that the options name
environment           machine, versions and command of a measurement
metrics               rates and latencies of many texts, and their intervals
record, table, plot   results as JSON, for a terminal, and as pictures
outputs               files of results, checked before the work
"""
