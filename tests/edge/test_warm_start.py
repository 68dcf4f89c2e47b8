"""Where a text's choice of drafter begins: this edge's own texts, and the fleet's."""

from __future__ import annotations

import pytest

from outrider.edge.warm_start import MIN_TRIALS, NOT_KNOWN, FleetPrior, OwnTexts, TextKind
from outrider.proto.session import DrafterCounts
from outrider.proto.types import DrafterPrior

CODE, PROSE = TextKind(3, True), TextKind(1, True)
FAMILY = [("general", "1"), ("code", "1"), ("new", "1")]


def counts(hits: int, compared: int) -> DrafterCounts:
    return DrafterCounts(hits=hits, compared=compared)


def test_nothing_is_known_before_the_first_text() -> None:
    assert OwnTexts().acceptances(CODE, FAMILY, NOT_KNOWN) == ()


def test_a_drafter_of_which_too_little_is_known_is_taken_for_as_good_as_the_others() -> None:
    own = OwnTexts()
    own.learn(CODE, {"general": counts(60, 100), "code": counts(80, 100), "new": counts(1, int(MIN_TRIALS) - 1)})
    assert own.acceptances(CODE, FAMILY, NOT_KNOWN) == pytest.approx((0.6, 0.8, 0.7))


def test_texts_of_one_kind_say_nothing_of_another() -> None:
    own = OwnTexts()
    own.learn(CODE, {"code": counts(80, 100)})
    assert own.acceptances(PROSE, FAMILY, NOT_KNOWN) == ()
    assert own.acceptances(TextKind(CODE.prompt_class, False), FAMILY, NOT_KNOWN) == (), "nor greedy ones of drawn ones"


def test_newer_texts_count_for_more_and_the_fleets_add_to_them() -> None:
    own = OwnTexts()
    for hits in (100, 0):
        own.learn(CODE, {"code": counts(hits, 100)})
    assert own.acceptances(CODE, FAMILY[1:2], NOT_KNOWN) == pytest.approx((95 / 195,))
    fleet = FleetPrior((DrafterPrior("code", "1", 0.9, 64.0), DrafterPrior("general", "1", 0.5, 64.0)))
    assert own.acceptances(CODE, FAMILY[:2], fleet) == pytest.approx((0.5, (95 + 0.9 * 64) / (195 + 64)))
    other_version = [("code", "2")]
    assert own.acceptances(CODE, other_version, fleet) == pytest.approx((95 / 195,)), (
        "of another version it says nothing"
    )
