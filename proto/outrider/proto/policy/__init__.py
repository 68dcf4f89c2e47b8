"""Policies of edge and verifier: pure functions of what each has measured, none of which can change a token.

measures     counts and means that fade with age
measurements what an edge has measured with them
window       how far ahead the edge drafts
flush        when the edge sends its drafts
steering     which steering vectors the edge requests
patience     how many drafts a step verifies, and how long the verifier waits for them
selection    which of several drafters is active

`outrider.edge.policies` has further length rules, and selectors that learn.
"""

from __future__ import annotations

from outrider.proto.policy.flush import due_to_flush, worth_a_message
from outrider.proto.policy.measurements import Downlink, DrafterMeasurements, Measurements, Pace
from outrider.proto.policy.measures import (
    Acceptance,
    Calibration,
    Line,
    Smoothed,
    StepCost,
    TextCalibration,
)
from outrider.proto.policy.patience import (
    Plan,
    Prospect,
    VerifierView,
    batching_delay_s,
    best_block,
    expected_tokens,
    overtakes,
    plan_for,
)
from outrider.proto.policy.steering import (
    FixedSteering,
    Gain,
    PricedSteering,
    SteeringPolicy,
    SteeringRate,
    SteeringView,
    choose,
    commit_bytes,
)
from outrider.proto.policy.window import TOKEN_BYTES, EdgeView, FixedWindow, LearningRule, SurvivalWindow, WindowPolicy

__all__ = [
    "TOKEN_BYTES",
    "Acceptance",
    "Calibration",
    "Downlink",
    "DrafterMeasurements",
    "EdgeView",
    "FixedSteering",
    "FixedWindow",
    "Gain",
    "LearningRule",
    "Line",
    "Measurements",
    "Pace",
    "Plan",
    "PricedSteering",
    "Prospect",
    "Smoothed",
    "SteeringPolicy",
    "SteeringRate",
    "SteeringView",
    "StepCost",
    "SurvivalWindow",
    "TextCalibration",
    "VerifierView",
    "WindowPolicy",
    "batching_delay_s",
    "best_block",
    "choose",
    "commit_bytes",
    "due_to_flush",
    "expected_tokens",
    "overtakes",
    "plan_for",
    "worth_a_message",
]
