"""Hit traces and their replay: any policy on any link, on the real session machine with a virtual clock.

With the shared noise, whether a drafter's proposal at a position would be accepted given the true prefix is a fixed
bit. Recorded once, those bits replace both models; what is left of a run is messages and waiting, which cost no time
on a virtual clock.

traces    the recorded bits, and how they are kept
record    making them with a drafter
wire      one direction of the link
replay    one text on one link
selection several drafters and their selector in synchronous rounds
costs     how long the parts of a real run take
optimum   the best policy in hindsight
"""
