"""Measure the system: ways of decoding, drafters, policies, selectors.

Commands, none of which imports another
benchmark        ways of decoding side by side, over emulated links
comparison       block efficiency of drafters on the same texts
traces           hits of drafters recorded, and replayed over any link
length_training  length rules trained on recorded hits

What they share
simulator, replay     sessions on a virtual clock, and recorded hits in them
links, drafters       what the options name
environment           on what and by which command something was measured
metrics, statistics   what many texts came to, and how sure that is
record, table, plot   results as JSON, for a terminal, and as pictures
outputs               where they go, checked before the work
"""
