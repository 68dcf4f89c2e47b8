"""Policies of edge and verifier: pure functions of what each has measured, none of which can change a token.

`outrider.edge.policies` has selectors that learn.
"""

from __future__ import annotations

from outrider.proto.policy.measurements import Line, Measurements, Smoothed
from outrider.proto.policy.steering_rate import FixedSteering, PricedSteering, SteeringPolicy
from outrider.proto.policy.window import Window

__all__ = [
    "FixedSteering",
    "Line",
    "Measurements",
    "PricedSteering",
    "Smoothed",
    "SteeringPolicy",
    "Window",
]
