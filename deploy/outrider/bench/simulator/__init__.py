"""Both session machines and the engine's rules of a batch on a virtual clock, where waiting takes no time.

clock       what happens next
simulation  an edge: its machine, its drafters and its streams
verifier    the engine without thread and model
costs       how long the parts of a real run take
wire        a link of given rates and delays
faults      a link that delays, duplicates and reorders, and whose streams break
scripted    a target and drafters that say a function of what came before
"""
