"""Confidence routing: its mean by hand, and whom it takes."""

from __future__ import annotations

import math

import pytest

from outrider.edge.policies.selection.base import MIN_CONFIDENCE, Routing
from outrider.proto.errors import InvalidArgument
from outrider.proto.policy.selection import RoundOutcome, SelectionView

UNKNOWN = math.nan


def view_of(arms: int, current: int | None = None) -> SelectionView:
    return SelectionView(4, (0.1,) * arms, (0.0,) * arms, current=current)


def learn(routing: Routing, *confidence: tuple[float, ...]) -> None:
    routing.learn(RoundOutcome(view_of(routing.arms), 0, 1, 1, 0, UNKNOWN, 0.1, confidence=confidence))


def test_it_takes_the_highest_mean_log_probability_of_the_newest_tokens() -> None:
    routing = Routing(arms=2, window=3)
    learn(routing, (0.9, 0.5), (0.6, 0.6))
    assert [sum(log_q) for log_q in routing.newest] == pytest.approx([math.log(0.9 * 0.5), 2 * math.log(0.6)])
    assert routing.choose(view_of(2, current=1)) == 0, "0.67 against 0.6, as geometric means"
    learn(routing, (0.2,), (0.6,))
    assert routing.choose(view_of(2, current=0)) == 1, "0.45"
    learn(routing, (0.9, 0.9, 0.9), ())
    assert list(routing.newest[0]) == pytest.approx([math.log(0.9)] * 3), "three count"
    assert routing.choose(view_of(2, current=1)) == 0


def test_silence_counts_as_little_and_what_nobody_knows_not_at_all() -> None:
    routing = Routing(arms=2)
    learn(routing, (0.99, 0.0), (UNKNOWN, 0.1, UNKNOWN))
    assert list(routing.newest[0]) == pytest.approx([math.log(0.99), math.log(MIN_CONFIDENCE)])
    assert list(routing.newest[1]) == pytest.approx([math.log(0.1)])
    assert routing.choose(view_of(2)) == 1


def test_equal_and_unknown_arms_cost_no_switch() -> None:
    routing = Routing(arms=3)
    assert routing.choose(view_of(3)) == 0
    assert routing.choose(view_of(3, current=2)) == 2
    learn(routing, (), (0.5,), (0.5,))
    assert routing.choose(view_of(3, current=2)) == 2
    assert routing.choose(view_of(3, current=0)) == 1


def test_every_idle_arm_with_uncomputed_tokens_catches_up() -> None:
    assert Routing(arms=4).score(view_of(4), 0, (9, 2, 0, 5)) == (3, 1)


def test_what_cannot_be_is_refused_with_its_field() -> None:
    with pytest.raises(InvalidArgument, match=r"routing\.window"):
        Routing(arms=2, window=0)
    with pytest.raises(InvalidArgument, match=r"selector\.arms"):
        Routing(arms=0)
