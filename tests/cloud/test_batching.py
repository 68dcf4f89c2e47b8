"""The rules of a batch: who steps, who is co-scheduled, what is delayed, and how prompts share the rest."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest

from outrider.cloud.serving.batching import (
    FIRST_PREFILL_ROWS,
    MAX_WAIT_S,
    MIN_DELAY_S,
    MIN_PREFILL_ROWS,
    Batch,
    Batching,
    RowLimit,
    Share,
)
from outrider.cloud.verifier_config import MAX_PREFILL_ROWS
from outrider.proto.session.verifier import VerifierRules, VerifierSession
from outrider.proto.types import Draft, DraftToken, Open, Patience, Report, Sampling, token_ids

HASH = "0" * 64
RULES = VerifierRules("v", "m", HASH, 100, 4096, frozenset({0}))
CHUNK = 64
RUN_AHEAD, WAIT = Patience(0.0), Patience(1.0, 4)


@dataclass(eq=False)
class Slot:
    session: VerifierSession
    num_uncomputed_tokens: int = 1
    ready_since: float = 0.0


def slot_of(now: float = 0.0, patience: Patience | None = RUN_AHEAD, unread: int = 1, drafting: bool = True) -> Slot:
    frame = Open("m", HASH, (1, 2, 3), Sampling(max_tokens=100), "s", patience=patience, drafting=drafting)
    return Slot(VerifierSession(frame, RULES, now), unread)


def measured(step_s: float = 0.03, sessions: int = 1) -> Batching:
    """Rules that have seen steps of `step_s`, whatever their rows."""
    batching = Batching(prefill_chunk=CHUNK)
    for rows in (1, 5):
        slots = [slot_of() for _ in range(rows * sessions)]
        batching.measure(Batch([Share(slot, 1, ()) for slot in slots]), step_s, sessions)
    return batching


def test_nobody_there_sleeps_until_something_happens() -> None:
    assert Batching(prefill_chunk=CHUNK).plan([], 5.0) == Batch(wake_at=math.inf)


def test_who_waits_for_drafts_is_looked_at_when_the_first_patience_ends() -> None:
    slots = [slot_of(now, WAIT) for now in (3.0, 2.5, 2.8)]
    assert Batching(prefill_chunk=CHUNK).plan(slots, 3.0) == Batch(wake_at=3.5)
    batch = Batching(prefill_chunk=CHUNK).plan(slots, 3.5)
    assert [share.slot for share in batch.shares] == [slots[1]], "others with a patience of their own go on waiting"


def test_drafts_at_hand_are_verified_with_the_last_committed_token() -> None:
    slot = slot_of(patience=WAIT)
    slot.session.on_draft(Draft(0, 3, tuple(map(DraftToken, (7, 8)))), 0.1)
    assert not Batching(prefill_chunk=CHUNK).plan([slot], 0.1).shares
    slot.session.on_draft(Draft(0, 5, tuple(map(DraftToken, (9, 10)))), 0.2)
    [share] = Batching(prefill_chunk=CHUNK).plan([slot], 0.2).shares
    assert (share.num_tokens, token_ids(share.block), share.num_rows) == (1, (7, 8, 9, 10), 5)
    assert share.only_decodes


def test_a_session_that_may_join_any_step_is_co_scheduled_and_never_begins_one() -> None:
    planned, due = slot_of(patience=None), slot_of()
    planned.session.on_report(Report(True, drafting_s=0.004, round_trip_s=0.01, acceptance=0.9))
    batching = measured()
    alone = batching.plan([planned], 0.0)
    assert not alone.shares
    assert 0.0 < alone.wake_at < math.inf
    together = batching.plan([planned, due], 0.0)
    assert together.delayed
    later = batching.plan([planned, due], together.wake_at)
    assert later.delayed, "they are a little late, and still worth it"
    assert together.wake_at < later.wake_at < 2 * together.wake_at
    last = batching.plan([planned, due], later.wake_at)
    assert [share.slot for share in last.shares] == [due, planned]


def test_one_that_is_late_does_not_hold_up_a_crowd() -> None:
    late, crowd = slot_of(patience=None), [slot_of() for _ in range(15)]
    late.session.on_report(Report(True, drafting_s=0.004, round_trip_s=0.01, acceptance=0.9))
    for slot in crowd:
        slot.session.on_draft(Draft(0, 3, tuple(map(DraftToken, (7, 8, 9)))), 0.0)
        slot.session.on_report(Report(True, drafting_s=0.004, round_trip_s=0.01, acceptance=0.9))
    batching = measured()
    expected_s = late.session._planned(batching.base_s, batching.row_s).expected_s
    assert not batching.plan([late, *crowd], expected_s).delayed
    assert batching.plan([late, *crowd[:1]], expected_s).delayed, "negative control: for one it waits"


def test_a_step_is_delayed_only_for_drafts_that_are_worth_it() -> None:
    planned, due = slot_of(patience=None), slot_of()
    planned.session.on_report(Report(True, drafting_s=0.004, round_trip_s=0.01, acceptance=0.9))
    batch = measured().plan([due, planned], 0.0)
    assert batch.delayed
    assert not batch.shares
    assert MIN_DELAY_S < batch.wake_at < 0.05
    steady = slot_of(patience=None, drafting=False)
    assert [share.slot for share in measured().plan([due, steady], 0.0).shares] == [due, steady]


def test_a_step_that_reads_a_prompt_is_not_delayed() -> None:
    planned, due, reading = slot_of(patience=None), slot_of(), slot_of(unread=10)
    planned.session.on_report(Report(True, drafting_s=0.004, round_trip_s=0.01, acceptance=0.9))
    batch = measured().plan([reading, planned, due], 0.0)
    assert [share.slot for share in batch.shares] == [due, planned, reading]
    assert batch.only_verifies
    assert not batch.only_decodes


def test_prompts_share_a_chunk_beside_who_decodes_and_have_more_room_alone() -> None:
    first, second, third = (slot_of(unread=n) for n in (50, 300, 9))
    beside = Batching(prefill_chunk=CHUNK).plan([slot_of(), first, second, third], 0.0)
    assert [(share.num_tokens, share.block) for share in beside.shares] == [(1, ()), (9, ()), (50, ()), (5, None)]
    assert beside.num_rows == 65
    alone = Batching(prefill_chunk=CHUNK).plan([first, second, third], 0.0)
    assert [(share.num_tokens, share.block) for share in alone.shares] == [(9, ()), (50, ()), (300, ())]
    long = Batching(prefill_chunk=CHUNK).plan([slot_of(unread=2000), third], 0.0)
    assert [(share.num_tokens, share.block) for share in long.shares] == [(9, ()), (MAX_PREFILL_ROWS - 9, None)]
    assert not long.only_verifies


def read(slots: list[Slot], batch: Batch) -> None:
    """Let the shares of a step be computed."""
    for share in batch.shares:
        share.slot.num_uncomputed_tokens = max(1, share.slot.num_uncomputed_tokens - share.num_tokens)
        if share.block is not None and share.slot in slots:
            slots.remove(share.slot)


def test_a_short_prompt_does_not_wait_for_a_long_one_that_came_before() -> None:
    decoding, long, short = slot_of(), slot_of(unread=32000), slot_of(unread=10)
    for now in (0.0, 2 * MAX_WAIT_S):
        batch = replace(measured(), prefill_chunk=0).plan([decoding, long, short], now)
        assert {share.slot: share.block for share in batch.shares} == {decoding: (), short: (), long: None}


def test_a_long_prompt_is_read_however_many_short_ones_come() -> None:
    long, decoding, batching = slot_of(unread=3000), slot_of(), replace(measured(), prefill_chunk=0)
    slots, steps, late = [long], 0, 0
    while long in slots:
        now = 0.03 * steps
        slots += [slot_of(unread=100), slot_of(unread=100)]  # more than a step reads
        for slot in slots[-2:]:
            slot.ready_since = now
        before = long.num_uncomputed_tokens
        read(slots, batching.plan([decoding, *slots], now))
        late += now > MAX_WAIT_S and before - long.num_uncomputed_tokens < FIRST_PREFILL_ROWS // 2 and long in slots
        steps += 1
        assert steps < 200
    assert late == 0


@pytest.mark.parametrize(("step_s", "row_s"), [(0.15, 0.0), (0.0186, 0.0001)])
def test_a_crowd_at_a_verifier_that_has_measured_nothing_is_read_in_few_steps(step_s, row_s) -> None:
    """Its first steps would all have prompts, whose few rows would pass for the whole time of a step."""
    batching, slots, steps = Batching(), [slot_of(unread=20)], 0
    while any(slot.num_uncomputed_tokens > 1 for slot in slots):
        batch = batching.plan(slots, step_s * steps)
        for share in batch.shares:
            share.slot.num_uncomputed_tokens = max(1, share.slot.num_uncomputed_tokens - share.num_tokens)
        batching.measure(batch, step_s + row_s * batch.num_rows, len(slots))
        slots += [slot_of(unread=200) for _ in range(15 if steps == 0 else 0)]
        steps += 1
    assert steps <= 20, "3,000 tokens, and not 16 in each"


@pytest.mark.parametrize(
    ("step_s", "row_s", "rows"),
    [
        (0.01, 0.001, 40),
        (0.01, 0.0001, 400),
        (0.01, 0.00001, MAX_PREFILL_ROWS),
        (0.01, 0.01, MIN_PREFILL_ROWS),
        (0.1, 0.0002, 250),  # half of a step that is longer than the gap; else 4,000 tokens would take 250 of these
    ],
)
def test_prompts_get_as_many_rows_as_keep_the_gap_of_those_who_decode(step_s, row_s, rows) -> None:
    batching = replace(measured(step_s), max_gap_s=0.05, prefill_chunk=0)
    batch = Batch([Share(slot_of(), 1, ()), Share(slot_of(unread=999), 64, None)])
    batching.measure(batch, step_s + 64 * row_s, 2)
    plan = batching.plan([slot_of(), slot_of(unread=2000)], 0.0)
    assert plan.shares[-1].num_tokens == pytest.approx(rows, abs=1)
    assert batching.base_s == measured(step_s).base_s, "the cost of decoding is another"
    assert batching.plan([slot_of(unread=2000)], 0.0).shares[0].num_tokens == MAX_PREFILL_ROWS, "nobody waits"


def test_a_few_rows_of_a_prompt_say_nothing_about_their_cost() -> None:
    batching = replace(measured(0.01), prefill_chunk=0)
    batching.measure(Batch([Share(slot_of(unread=3), 3, ())]), 0.012, 1)
    assert batching.plan([slot_of(), slot_of(unread=2000)], 0.0).shares[-1].num_tokens == FIRST_PREFILL_ROWS


def test_the_last_chunk_of_a_prompt_takes_the_drafts_along() -> None:
    slot = slot_of(unread=3)
    slot.session.on_draft(Draft(0, 3, tuple(map(DraftToken, (7, 8)))), 0.0)
    [share] = Batching(prefill_chunk=CHUNK).plan([slot], 0.0).shares
    assert (share.num_tokens, token_ids(share.block), share.num_rows) == (3, (7, 8), 5)
    assert not share.only_decodes


def test_only_steps_that_decode_are_measured() -> None:
    batching = Batching(prefill_chunk=CHUNK)
    batching.measure(Batch([Share(slot_of(unread=10), 10, ())]), 0.5, 1)
    batching.measure(Batch([Share(slot_of(), 1, ()), Share(slot_of(unread=99), 64, None)]), 0.5, 2)
    assert (batching.base_s, batching.row_s) == (0.0, 0.0)
    batching.measure(Batch([Share(slot_of(), 1, ())]), 0.5, 1)
    assert batching.base_s == pytest.approx(0.5)


def test_each_session_reckons_with_the_rows_of_all() -> None:
    slot = slot_of()
    slot.session.on_draft(Draft(0, 3, tuple(map(DraftToken, tuple(range(1, 17))))), 0.0)
    blocks = []
    for sessions in (1, 16):
        batching = Batching(prefill_chunk=CHUNK)
        for rows in (1, 2, 5, 16, 40, 80):
            step = Batch([Share(slot_of(), 1, ()) for _ in range(rows)])
            batching.measure(step, 0.03 + 0.001 * rows, sessions)
        assert batching.row_s == pytest.approx(0.001 * sessions, rel=0.1)
        [share] = batching.plan([slot], 0.0).shares
        blocks.append(len(share.block))
    assert blocks[1] < blocks[0], "all of them wait for a row of one"


def test_the_rules_load_no_torch() -> None:
    program = "import sys, outrider.cloud.serving.batching; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "outrider.cloud.serving.batching" in loaded
    assert not {"torch", "transformers", "grpc"} & set(loaded)


# === the most rows of a step ======================================================================================


def held(limit: RowLimit) -> int:
    """Return the number of limited steps until the limit is raised."""
    before, steps = limit.rows, 0
    while limit.rows == before:
        limit.hold()
        steps += 1
    return steps


def test_a_limit_is_what_fitted_and_is_tried_anew_ever_more_seldom() -> None:
    limit = RowLimit()
    limit.fail(160, 80)
    assert limit.rows == 80
    first = held(limit)
    assert limit.rows == 160
    limit.fail(120, 60)
    assert limit.rows == 80, "what has been proven, not half of what was tried"
    assert held(limit) == 2 * first
    limit.fail(70, 35)
    assert limit.rows == 35, "less memory than before"


def test_a_limit_that_proves_too_low_is_soon_gone() -> None:
    limit = RowLimit()
    limit.fail(160, 80)
    steps = [held(limit) for _ in range(6)]
    assert limit.rows == 80 << 6
    assert len(set(steps)) == 1, "none of the trials failed"


@pytest.mark.parametrize("rows", range(1, 9))
def test_no_step_exceeds_the_limit_and_everybody_takes_part_in_turn(rows) -> None:
    batching = Batching(prefill_chunk=CHUNK)
    batching.limit.fail(100, rows)
    now, slots = 1.0, [slot_of() for _ in range(5)]
    for slot in slots[:3]:
        slot.session.on_draft(Draft(0, 3, tuple(map(DraftToken, (7, 8, 9)))), 0.0)
    readers = [slot_of(unread=30), slot_of(unread=50)]
    took_part = dict.fromkeys([*slots, *readers], 0)
    for _ in range(100):
        batch = batching.plan([*slots, *readers], now)
        assert 1 <= batch.num_rows <= rows
        for share in batch.shares:
            took_part[share.slot] += 1
            if share.block is None:
                share.slot.num_uncomputed_tokens -= share.num_tokens
            else:
                share.slot.num_uncomputed_tokens, share.slot.session.ready_since = 1, now
        now += 1.0
    assert min(took_part.values()) > 0
    decoding = [took_part[slot] for slot in slots]
    assert max(decoding) <= 2 * min(decoding), "who fills a step up is early, and nobody is left out of a round"
