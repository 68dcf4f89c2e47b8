"""Hit traces and their replay: any policy on any link, in the simulator.

With the shared noise, whether a drafter's proposal at a position would be accepted given the true prefix is a fixed
bit. Recorded once, those bits replace both models; what is left of a run is messages and waiting, which cost no time
on a virtual clock.

traces    the recorded bits, and how they are kept
record    making them with a drafter
traced    targets and drafters that say what traces say, and texts of theirs in the simulator
texts     texts with the traces of several drafters
optimum   the best policy in hindsight
"""
