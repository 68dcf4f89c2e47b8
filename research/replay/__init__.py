"""Hit traces and their replay: any policy on any link, in the simulator.

With the shared noise, whether a drafter's proposal at a position would be accepted given the true prefix is a fixed
bit. Recorded once, those bits replace both models.
"""
