"""Measurements of the project, which are not installed: `python -m research` from a checkout.

commands              the command line, whose options are in research_settings
chaos                        random faults under both machines, on a virtual clock
probes                       texts of a stock vLLM server over links, plain and by ours
simulator                    sessions on a virtual clock
traces                       hits of drafters recorded, and replayed over any link
systems                      whole systems side by side
"""
