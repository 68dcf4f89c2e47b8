"""Rules by which goals of service hold a step, one by one; `research/test_service_crowd.py` has whole crowds."""

from __future__ import annotations

import math

import pytest
from test_batching import HASH, RULES, Slot, measured, slot_of

from outrider.cloud.serving.batching import MAX_WAIT_S, MIN_DELAY_S, MIN_PREFILL_ROWS, Batch, Batching, Share
from outrider.cloud.serving.service_goals import MARGIN, MAX_STEPS_OUT, StepGoals, least_gap_s
from outrider.proto.policy.patience import StepCost
from outrider.proto.session.verifier import Verified, VerifierSession
from outrider.proto.types import (
    CommittedToken,
    Draft,
    DraftToken,
    Open,
    Patience,
    Report,
    Sampling,
    ServiceGoal,
)

GAP, BATCH = ServiceGoal(gap_s=0.1), ServiceGoal(batch=True)
BASE_S, ROW_S, PROMPT_ROW_S = 0.03, 0.005, 0.0005


def batching() -> Batching:
    """Rules that know that a step takes 30 ms and 5 ms a row, 0.5 ms a row of a prompt."""
    rules = Batching()
    for rows in (1, 2, 4, 8, 16, 32, 64):
        for _ in range(20):
            slots = [slot_of() for _ in range(rows)]
            rules.measure(Batch([Share(slot, 1, ()) for slot in slots]), BASE_S + ROW_S * rows, 4)
    rules.prefill_row_s.add(PROMPT_ROW_S)
    return rules


def asking(service: ServiceGoal | None, since: float = 0.0, *, drafts: int = 0, hits: float = 0.8, **more) -> Slot:
    """A session that has been ready since a time, with drafts of an edge of this acceptance."""
    unread, patience = more.get("unread", 1), more.get("patience", Patience(0.0))
    frame = Open("m", HASH, (1, 2, 3), Sampling(max_tokens=100), "s", patience=patience, service=service)
    slot = Slot(VerifierSession(frame, RULES, since), unread, since)
    slot.session.on_report(Report(True, 0.001, 0.001, hits))
    if drafts:
        slot.session.on_draft(Draft(0, 3, tuple(map(DraftToken, range(4, 4 + drafts)))), since)
    return slot


def advance(slot: Slot, tokens: int, now: float) -> None:
    """Commit tokens to a session."""
    block = tuple(map(DraftToken, range(4, 3 + tokens)))
    committed = tuple(CommittedToken(token, -1.0) for token in range(4, 4 + tokens))
    slot.session.on_verified(Verified(block, committed), now)


def rows_of(batch: Batch) -> dict[Slot, int]:
    return {share.slot: share.num_rows for share in batch.shares}


def test_where_nobody_asks_for_a_service_no_goal_is_looked_at(monkeypatch) -> None:
    slots = [asking(None, drafts=4), asking(None), asking(None, unread=50)]
    as_ever = batching().plan(slots, 0.05)
    for name in ("begin_by", "slack_s", "taking_part", "rows_to_cut"):
        monkeypatch.delattr(StepGoals, name)
    assert batching().plan(slots, 0.05) == as_ever
    with pytest.raises(AttributeError):
        batching().plan([*slots, asking(GAP)], 0.05)


def test_a_goal_that_leaves_room_changes_nothing() -> None:
    slots = [asking(ServiceGoal(gap_s=10.0), drafts=4), asking(None, drafts=3), asking(BATCH)]
    before = [asking(None, drafts=4), asking(None, drafts=3), asking(None)]
    held, free = batching().plan(slots, 0.0), batching().plan(before, 0.0)
    assert [share.block for share in held.shares] == [share.block for share in free.shares]


def test_drafts_of_batch_sessions_are_given_up_first_and_the_least_likely_of_them() -> None:
    figures, other, sure, unsure = (
        asking(GAP, drafts=2),
        asking(None, drafts=2),
        asking(BATCH, drafts=3, hits=0.95),
        asking(BATCH, drafts=3, hits=0.3),
    )
    rows = rows_of(batching().plan([figures, other, sure, unsure], 0.0))
    most = int((MARGIN * GAP.gap_s - BASE_S) / ROW_S + 1e-9)  # 12 of 14
    assert sum(rows.values()) == pytest.approx(most, abs=1)
    assert rows[figures] == rows[other] == 3
    assert rows[unsure] < rows[sure]


def test_a_session_that_gets_little_keeps_its_drafts_before_one_that_gets_much() -> None:
    slots = [asking(ServiceGoal(gap_s=0.073)), *(asking(BATCH) for _ in range(2))]  # 7 rows of 9
    poor, rich = slots[1:]
    for step in range(1, 9):
        for slot, tokens in ((slots[0], 1), (poor, 1), (rich, 4)):
            advance(slot, tokens, 0.05 * step)
    for slot in slots:
        start = len(slot.session.transcript)
        slot.session.on_report(Report(True, 0.001, 0.001, 0.8))
        slot.session.on_draft(Draft(99, start, tuple(map(DraftToken, range(4, 12)))), 0.4)
    rows = rows_of(batching().plan(slots, 0.4))
    assert rows[poor] > rows[rich], "proportional fairness"


def test_batch_sessions_rest_in_rotation_and_none_for_longer_than_it_may() -> None:
    figures = [asking(GAP) for _ in range(8)]
    batch = [asking(BATCH) for _ in range(8)]  # 8 + 2 rows must, 12 may
    slots, now, rested = [*figures, *batch], 0.0, dict.fromkeys(batch, 0)
    rules = batching()
    for _ in range(40):
        part = rows_of(rules.plan(slots, now))
        assert all(slot in part for slot in figures)
        assert len(part) < len(slots)
        now += BASE_S + ROW_S * len(part)
        for slot in part:
            advance(slot, 1, now)
        rested = {slot: 0 if slot in part else steps + 1 for slot, steps in rested.items()}
        assert max(rested.values()) < MAX_STEPS_OUT
    counts = [slot.session.generated for slot in batch]
    assert max(counts) - min(counts) <= 1


def test_a_session_below_half_of_its_classs_median_takes_part_whatever_is_asked_for() -> None:
    figures = [asking(GAP) for _ in range(8)]
    batch = [asking(BATCH) for _ in range(8)]
    for step in range(1, 9):
        for slot in figures:
            advance(slot, 1, 0.05 * step)
        for number, slot in enumerate(batch):
            advance(slot, 1 if number == 7 else 4, 0.05 * step + 1e-6 * number)  # the newest would rest first
    part = rows_of(batching().plan([*figures, *batch], 0.401))
    assert batch[7] in part
    assert len(part) < 16


def test_a_gap_that_even_such_a_step_cannot_keep_holds_nobody() -> None:
    slots = [asking(ServiceGoal(gap_s=0.04)), *(asking(BATCH, drafts=4) for _ in range(4))]
    before = [asking(None), *(asking(None, drafts=4) for _ in range(4))]
    held, free = (batching().plan(each, 0.0) for each in (slots, before))
    assert [share.num_rows for share in held.shares] == [share.num_rows for share in free.shares]


def test_the_delay_for_drafts_of_others_ends_in_time() -> None:
    def delays(service: ServiceGoal | None) -> Batch:
        planned = slot_of(patience=None)
        planned.session.on_report(Report(True, drafting_s=0.004, round_trip_s=0.01, acceptance=0.9))
        due = slot_of()
        due.session.service = service
        return measured().plan([due, planned], 0.0)

    free, held = delays(None), delays(ServiceGoal(gap_s=0.035))
    assert free.delayed
    latest = MARGIN * 0.035 - 0.03
    assert free.wake_at > latest + MIN_DELAY_S
    assert held.wake_at <= latest if held.delayed else held.shares
    assert not delays(ServiceGoal(gap_s=0.0334)).delayed


def test_a_session_does_not_wait_for_its_own_drafts_longer_than_its_gap_allows() -> None:
    patient = {"patience": Patience(5.0, 8)}
    rules = batching()
    assert rules.plan([asking(None, **patient)], 0.0).wake_at == pytest.approx(5.0)
    waiting = rules.plan([asking(GAP, **patient)], 0.0)
    assert waiting.wake_at == pytest.approx(MARGIN * GAP.gap_s - BASE_S - ROW_S, abs=0.003)
    assert rules.plan([asking(GAP, **patient)], waiting.wake_at).shares


def test_a_session_with_a_gap_joins_a_step_that_begins_for_others() -> None:
    patient = asking(GAP, patience=Patience(5.0, 8))
    rules, due = batching(), asking(BATCH)
    plan = rules.plan([patient, due], 0.0)
    assert plan.delayed, "a little, for its drafts"
    assert set(rows_of(rules.plan([patient, due], 0.04))) == {patient, due}
    patient.session.service = None
    assert set(rows_of(rules.plan([patient, due], 0.04))) == {due}


@pytest.mark.parametrize(
    ("service", "since", "least"), [(BATCH, 0.0, 0), (None, 0.0, MIN_PREFILL_ROWS), (BATCH, -2.0, 8)]
)
def test_prompts_get_what_is_left_and_those_of_batch_sessions_their_floor(service, since, least) -> None:
    prompt = asking(service, since, unread=2000)
    decoding = [asking(GAP) for _ in range(12)]  # whose rows take all the time that there is
    rows = rows_of(batching().plan([*decoding, prompt], 0.0))
    assert MAX_WAIT_S < 2.0
    assert least <= rows.get(prompt, 0) <= 2 * MIN_PREFILL_ROWS
    assert (prompt in rows) == (least > 0)


def test_the_earliest_first_token_comes_first_and_batch_prompts_last() -> None:
    short, urgent, later, batch = (
        asking(None, unread=20),
        asking(ServiceGoal(first_token_s=0.2), unread=60),
        asking(ServiceGoal(first_token_s=0.4), unread=30),
        asking(BATCH, unread=10),
    )
    plan = Batching(prefill_chunk=64).plan([slot_of(), short, urgent, later, batch], 0.0)
    assert [share.slot for share in plan.shares[1:]] == [urgent, later]
    waited = Batching(prefill_chunk=64).plan([slot_of(), short, urgent, later, batch], MAX_WAIT_S + 0.1)
    assert sum(share.slot in (short, later, batch) for share in waited.shares) >= 1, "nobody waits for ever"


def test_a_cost_below_the_smallest_step_is_hoped_for_until_it_is_met() -> None:
    cost = StepCost()
    assert cost.hoped_seconds(4) == 0.0
    cost.add(64, 0.2)
    assert cost.hoped_seconds(16) == pytest.approx(0.05)
    assert cost.seconds(16) == pytest.approx(0.2)
    cost.add(16, 0.19)
    assert cost.hoped_seconds(16) == cost.seconds(16) > 0.15


def test_a_verifier_says_the_shortest_gap_that_it_can_keep_for_one_more() -> None:
    rules = batching()
    running = [*(asking(GAP) for _ in range(3)), *(asking(BATCH) for _ in range(4))]
    assert least_gap_s(running, rules.cost) == pytest.approx((BASE_S + 5 * ROW_S) / MARGIN, rel=0.1)
    assert least_gap_s(running, StepCost()) == 0.0


def test_rates_fade_and_count_the_present_wait() -> None:
    slot = asking(None)
    assert slot.session.rate(1.0) == 0.0
    for step in range(1, 30):
        advance(slot, 3, 0.1 * step)
    assert slot.session.rate(2.9) == pytest.approx(30.0)
    assert slot.session.rate(3.9) == pytest.approx(15.0, rel=0.1)
    assert math.isfinite(slot.session.rate(1e9))
