"""Whether an edge steers its drafter: the values of the option, its sources, and its effect."""

from __future__ import annotations

import pytest

from outrider.edge import EdgeConfig
from outrider.proto.errors import ConfigError
from outrider.proto.policy import FixedSteering, PricedSteering
from outrider.proto.policy.steering_rate import ALL, FIRST

WHERE = {"verifier": "127.0.0.1:1", "model": "m"}


def test_vectors_are_requested_by_what_pays_or_all_or_none_and_no_other_way():
    assert EdgeConfig(**WHERE).steering == "auto"
    chosen = EdgeConfig(**WHERE).steering_policy(64, ((1, 0.1),))
    assert isinstance(chosen, PricedSteering)
    assert chosen.rate == FIRST
    fixed = EdgeConfig(**WHERE, steering="on").steering_policy(64, ())
    assert isinstance(fixed, FixedSteering)
    assert fixed.rate == ALL
    assert EdgeConfig(**WHERE, steering="off").steering_policy(64, ()) is None
    with pytest.raises(ConfigError, match="steering: 'maybe' is none of auto, on, off"):
        EdgeConfig(**WHERE, steering="maybe")
