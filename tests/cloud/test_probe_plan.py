"""When texts are probed: how drafts hold in runs, and when a text waits for the next."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.cloud.serving.probe_plan import ANSWER_S, Chain, ProbePlan, ServedText
from outrider.proto.types import Sampling


def after(*outcomes: bool) -> Chain:
    """A chain whose drafts were compared one by one."""
    chain = Chain()
    for hit in outcomes:
        chain.compare([7], [7 if hit else 8])
    return chain


def test_a_chain_begins_with_the_usual_chance() -> None:
    assert Chain().chances(0.6) == pytest.approx((0.6, 0.6))


def test_a_draft_after_a_miss_and_one_within_a_run_hold_with_chances_of_their_own() -> None:
    runs = after(*([False] * 3 + [True] * 12) * 4)
    first, later = after(*([False] * 3 + [True] * 12) * 4, False).chances(0.7)
    assert runs.chances(0.7) == pytest.approx((runs.chances(0.7)[1],) * 2), "a run goes on"
    assert first < 0.5
    assert later > 0.85


def test_misses_in_a_row_soon_make_a_first_draft_unlikely_and_hits_likely_again() -> None:
    assert after(*[False] * 4).chances(0.9)[0] < 0.25
    assert after(*[False] * 4, True, False, True, False).chances(0.9)[0] > 0.35


def test_drafts_behind_a_miss_are_not_compared() -> None:
    cut, whole = Chain(), Chain()
    cut.compare([1, 2, 3], [1, 9, 3])
    whole.compare([1, 2], [1, 9])
    assert (cut, cut.holds) == (whole, False)
    cut.compare([], [5, 6])
    assert cut == whole


@dataclass(eq=False)
class Due:
    """A slot, as far as a plan looks at it."""

    session: Any
    handle: ServedText


def slot_of(chain: Chain, *, round_trip_s: float, **session: Any) -> Any:
    """A text that is due since 1 s, and has no drafts."""
    state = {"transcript": [0] * 10, "acceptance": 0.9, "sampling": Sampling(), "credit": 64, "waits_for_drafts": True}
    report = SimpleNamespace(round_trip_s=round_trip_s, drafting_s=1e-4)
    asked = SimpleNamespace(**state | session, report=report, ready_since=1.0, drafts=list, ready_at=lambda *_: 1.0)
    return Due(asked, ServedText(chain=chain))


@pytest.mark.parametrize(
    ("chain", "settings", "waits_s"),
    [
        (after(True), {"round_trip_s": 2e-3}, 2e-3 + ANSWER_S),
        (after(True), {"round_trip_s": 0.2}, 0.0),  # longer than a token takes
        (after(True), {"round_trip_s": 0.0}, 0.0),  # unknown
        (after(*[False] * 8), {"round_trip_s": 2e-3, "acceptance": 0.5}, 0.0),  # they would hardly hold
        (after(True), {"round_trip_s": 2e-3, "credit": 0}, 0.0),
        (after(True), {"round_trip_s": 2e-3, "waits_for_drafts": False}, 0.0),
    ],
)
def test_a_text_waits_for_its_edges_next_drafts_where_these_come_at_once_and_pay(
    chain: Chain, settings: dict[str, Any], waits_s: float
) -> None:
    plan = ProbePlan()
    plan.time_token(0.05)
    plan.firsts.add(1, 0.06)
    for rows, seconds in ((1, 0.05), (9, 0.06), (17, 0.07)):
        plan.time_probe(rows, seconds)
    assert plan._ready_at(slot_of(chain, **settings)) == pytest.approx(1.0 + waits_s)
