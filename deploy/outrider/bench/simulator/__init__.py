"""Both session machines and the engine's rules of a batch on a virtual clock, where waiting takes no time.

clock       the virtual clock, and the costs of a run's parts
simulation  an edge with its session machine and drafters
verifier    an engine without thread and model, and the streams to it
wire        a link of given rates and delays
faults      a link that delays, duplicates and reorders, and whose streams break
scripted    a target and drafters that are functions of a prefix
"""
