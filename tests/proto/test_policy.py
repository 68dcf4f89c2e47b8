"""Policies: what they measure, and what they make of it; verified against brute force where there is one."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.proto.policy import Line, Measurements, Smoothed, Window, measurements
from outrider.proto.policy.measurements import DRAFT_BYTES, Acceptance, Calibration, Pace, TextCalibration
from outrider.proto.policy.patience import (
    Prospect,
    StepCost,
    VerifierView,
    batching_delay_s,
    best_block,
    overtakes,
    plan_for,
)
from outrider.proto.policy.window import due_to_flush
from outrider.proto.types import Goal, Patience

# === measures ===================================================================================================


def patience_for(view: VerifierView) -> Patience:
    return plan_for(view).patience


def test_the_first_value_is_taken_whole_and_later_ones_pull() -> None:
    mean = Smoothed()
    mean.add(5.0)
    assert mean.value == 5.0
    mean.add(10.0)
    assert 5.0 < mean.value < 10.0
    for _ in range(100):
        mean.add(10.0)
    assert mean.value == pytest.approx(10.0)


def test_a_line_finds_base_and_slope_and_follows_when_they_change() -> None:
    line = Line()
    assert (line.base, line.slope, line.mean) == (0.0, 0.0, 0.0)
    line.add(1, 0.021)
    assert (line.base, line.slope) == (pytest.approx(0.021), 0.0)
    for x in (1, 5, 9, 17, 3) * 20:
        line.add(x, 0.02 + 0.001 * x)
    assert line.base == pytest.approx(0.02, rel=0.02)
    assert line.slope == pytest.approx(0.001, rel=0.02)
    assert 0.021 < line.mean < 0.037
    for x in (1, 5, 9, 17, 3) * 100:  # the machine has become slower
        line.add(x, 0.05 + 0.002 * x)
    assert line.base == pytest.approx(0.05, rel=0.01)
    assert line.slope == pytest.approx(0.002, rel=0.01)


def test_a_line_is_fitted_once_more_after_each_point() -> None:
    rng = random.Random(4)
    line = Line()
    for _ in range(50):
        line.add(rng.randrange(1, 9), rng.uniform(0.01, 0.05))
        fresh = Line(line.weight, line.x, line.y, line.xx, line.xy)
        assert (line.base, line.slope, line.fit()) == (fresh.base, fresh.slope, fresh.fit())
        copied = replace(line)
        copied.add(3, 1.0)
        assert copied.fit() != line.fit() == fresh.fit()


def test_a_line_that_fades_faster_forgets_faster() -> None:
    slow, fast = Line(fade=0.99), Line(fade=0.8)
    for line in (slow, fast):
        for _ in range(30):
            line.add(1, 1.0)
        for _ in range(10):
            line.add(1, 2.0)
    assert slow.base < 1.5 < fast.base < 2.0


def test_a_line_never_falls_and_its_base_stays_above_nothing() -> None:
    falling, steep = Line(), Line()
    for x in range(1, 20):
        falling.add(x, 1 / x)
        steep.add(x, 0.01 * x**2)
    assert falling.slope == 0.0
    assert falling.base == pytest.approx(falling.mean)
    assert steep.base > 0, "noise must not make a step free"


@pytest.mark.parametrize(("x", "count"), [(9.0, 1), (9.0, 100)])
def test_points_of_one_x_tell_no_slope(x: float, count: int) -> None:
    line = Line()
    for _ in range(count):
        line.add(x, 0.3)
    assert (line.slope, line.base) == (0.0, pytest.approx(0.3))


def test_acceptance_follows_the_hits_and_stays_away_from_certainty() -> None:
    always, never, half = Acceptance(), Acceptance(), Acceptance()
    for i in range(500):
        always.add(True)
        never.add(False)
        half.add(i % 2 == 0)
    assert 0 < never.rate < 0.1 < half.rate < 0.9 < always.rate < 1
    assert half.rate == pytest.approx(0.5, abs=0.02)
    for _ in range(200):
        always.add(False)
    assert always.rate < 0.1, "a change of subject is noticed"


def test_what_another_has_seen_is_believed_only_before_own_trials() -> None:
    believing = Acceptance()
    believing.believe(0.2)
    assert believing.rate == pytest.approx(0.2)
    for _ in range(40):
        believing.add(True)
    assert believing.rate > 0.7, "own trials outvote it"
    before = believing.rate
    believing.believe(0.1)
    assert believing.rate == before
    once = Acceptance()
    once.add(False)
    before = once.rate
    once.believe(0.95)
    assert once.rate == before


def test_calibration_learns_what_each_confidence_is_worth() -> None:
    calibration, rng = Calibration(), random.Random(1)
    worth = {0.05: 0.2, 0.45: 0.6, 0.98: 0.3}  # sure of itself, and wrong
    for _ in range(3000):
        confidence = rng.choice([*worth])
        calibration.add(confidence, rng.random() < worth[confidence])
    for confidence, rate in worth.items():
        assert calibration.chance(confidence) == pytest.approx(rate, abs=0.2)
    assert calibration.chance(0.45) > calibration.chance(0.05)
    assert calibration.chance(0.45) > calibration.chance(0.98)


def test_a_text_on_another_subject_soon_goes_by_its_own_drafts_and_tells_the_others() -> None:
    common = Calibration()
    for _ in range(300):
        common.add(0.35, False)
    text, other = TextCalibration(common), TextCalibration(common)
    assert text.chance(0.35) == pytest.approx(common.chance(0.35), abs=0.02), "nothing of its own yet"
    for _ in range(15):
        text.add(0.35, True)
    assert text.chance(0.35) > 0.7
    assert common.chance(0.35) < 0.35
    assert other.chance(0.35) == pytest.approx(common.chance(0.35)), "what it saw counts little elsewhere"
    before = text.chance(0.95)
    for _ in range(50):
        other.add(0.95, False)
    assert text.chance(0.95) < before, "but it counts"
    assert text.chance(math.nan) == common.acceptance.rate


def test_a_kept_chance_is_that_of_the_counts_though_another_text_shares_them() -> None:
    rng = np.random.default_rng(5)
    common = Calibration()
    texts = [TextCalibration(common), TextCalibration(common)]
    for _ in range(400):
        text = texts[rng.integers(2)]
        text.add(float(rng.random()), bool(rng.random() < 0.6))
        for one in texts:
            for confidence in (0.05, 0.35, 0.65, 0.985):
                index = measurements._bin(confidence)
                hits, trials = one.bins[index]
                common_hits, common_trials = common.bins[index]
                before = min(0.995, max(0.02, common_hits / common_trials))
                assert one.chance(confidence) == min(0.995, max(0.02, (hits + 5 * before) / (trials + 5)))
    other = Calibration()
    other.add(0.35, False)
    before = texts[0].chance(0.35)
    texts[0].common = other
    assert texts[0].chance(0.35) != before, "the common counts are others now"


def test_before_any_trial_more_confidence_promises_more() -> None:
    chances = [Calibration().chance(confidence) for confidence in (0.0, 0.15, 0.35, 0.55, 0.75, 0.95, 1.0)]
    assert chances == sorted(chances)
    assert 0 < chances[0] < chances[-1] < 1


def test_a_draft_without_confidence_is_worth_the_average() -> None:
    calibration = Calibration()
    for i in range(300):
        calibration.add(math.nan, i % 4 == 0)
    assert calibration.chance(math.nan) == calibration.acceptance.rate
    assert calibration.chance(math.nan) == pytest.approx(0.25, abs=0.05)
    assert calibration.chance(0.99) == Calibration().chance(0.99), "it says nothing about any confidence"


# === window =====================================================================================================


@dataclass(frozen=True)
class View:
    """The numbers by which a window decides."""

    in_flight: int
    survival: float
    acceptance: float
    drafting_s: float
    step_s: float
    row_s: float
    round_trip_s: float
    byte_s: float
    token_s: float
    goal: Goal
    covered: int = 0


def more(window: Window, view: View, most: int = 1000) -> int:
    """Return the tokens to draft of `most`, at the price of the view."""
    measured = Measurements(
        step=Line(_fit=(view.step_s, view.row_s)),
        round_trip=Line(_fit=(view.round_trip_s - DRAFT_BYTES * view.byte_s, view.byte_s)),
        pace=Pace(view.token_s, 1.0, 1.0),
    )
    state = {name: getattr(view, name) for name in ("in_flight", "survival", "acceptance", "drafting_s", "covered")}
    return window.more(measured, view.goal, most, **state)


USUAL = View(
    in_flight=0,
    survival=1.0,
    acceptance=0.8,
    drafting_s=0.002,
    step_s=0.03,
    row_s=0.0,
    round_trip_s=0.03,
    byte_s=0.0,
    token_s=0.0,
    goal=Goal.LATENCY,
)


def defined(rule: Window, view: View) -> int:
    """Count one draft after the other, each by its own worth, as the docstring of the rule says."""
    if not view.step_s:
        return max(0, min(8, rule.max_tokens) - view.in_flight)
    saved_s = view.step_s
    if view.goal is Goal.EFFICIENCY:
        saved_s = view.step_s + view.round_trip_s
    elif view.token_s and view.round_trip_s < view.step_s:
        saved_s = min(view.step_s, view.token_s)
    hidden = min(1.0, view.step_s / view.round_trip_s) if view.round_trip_s else 1.0
    price_s = hidden * (view.drafting_s + rule.min_share * saved_s) + view.row_s + 2 * view.byte_s
    chance, count, gain_s = view.survival, 0, 0.0
    while view.in_flight + count < rule.max_tokens:
        chance *= view.acceptance
        covered = view.in_flight + count < view.covered
        if not covered and chance * saved_s <= price_s and view.in_flight + count > 0:
            break
        gain_s += (0.0 if covered else chance * saved_s) - price_s
        count += 1
    return count if gain_s > 0 or view.in_flight >= view.covered else 0


def test_the_window_decides_as_it_is_defined() -> None:
    rng, seen = random.Random(8), Counter[tuple[str, str]]()
    for _ in range(20_000):
        in_flight = rng.choice([0, 0, 1, 3, 12, 70])
        rule = Window(max_tokens=rng.choice([0, 1, 5, 64]), min_share=rng.choice([0.0, 0.015]))
        view = View(
            in_flight=in_flight,
            survival=rng.uniform(0.0, 1.0) if in_flight else 1.0,
            acceptance=rng.uniform(0.02, 0.98),
            drafting_s=rng.choice([0.0, 2e-4, 5e-3]) * rng.uniform(0.5, 2),
            step_s=rng.choice([0.0, 0.005, 0.03]),
            row_s=rng.choice([0.0, 5e-4]),
            round_trip_s=rng.choice([0.0, 0.01, 0.2]),
            byte_s=rng.choice([0.0, 1e-4]),
            token_s=rng.choice([0.0, 0.004, 0.05]),
            goal=rng.choice(list(Goal)),
            covered=rng.choice([0, 0, 4, 30, 255]),
        )
        count, most = more(rule, view), rng.randint(1, 20)
        assert count == defined(rule, view), view
        assert more(rule, view, most) == min(most, count), (view, most)
        seen["some" if count else "none", "covered" if view.covered > in_flight else ""] += 1
    assert len(seen) == 4
    assert min(seen.values()) > 500


def test_where_drafting_and_verifying_alternate_the_window_is_the_fastest() -> None:
    """Against every fixed length: rounds of step + round trip + drafting, which give 1 + a + a^2 + … tokens."""
    for acceptance, drafting_s, round_trip_s in itertools.product((0.4, 0.6, 0.8, 0.9), (0.001, 0.003), (0.0, 0.01)):

        def token_s(drafts: int, a: float = acceptance, tau: float = drafting_s, trip: float = round_trip_s) -> float:
            return (USUAL.step_s + trip + tau * drafts) / ((1 - a ** (drafts + 1)) / (1 - a))

        best = min(map(token_s, range(64)))
        view = replace(USUAL, acceptance=acceptance, drafting_s=drafting_s, round_trip_s=round_trip_s, token_s=best)
        assert token_s(more(Window(min_share=0.0), view)) < 1.01 * best
        eager = token_s(more(Window(min_share=0.0), replace(view, token_s=USUAL.step_s)))
        assert eager >= token_s(more(Window(min_share=0.0), view))
    far = replace(USUAL, round_trip_s=0.2, token_s=0.001)
    assert more(Window(), far) == more(Window(), replace(far, token_s=0.0)), "it runs ahead there"


def test_the_pace_is_of_the_newest_commits() -> None:
    pace = Pace()
    assert pace.token_s == 0.0
    for _ in range(200):
        pace.add(0.03, 3)
    assert pace.token_s == pytest.approx(0.01)
    for _ in range(100):
        pace.add(0.04, 1)
    assert pace.token_s == pytest.approx(0.04, rel=0.05)


@pytest.mark.parametrize("acceptance", [0.5, 0.8, 0.95, 0.99])
def test_no_chain_ends_within_what_the_verifier_covers(acceptance: float) -> None:
    """All drafts up to the first uncovered one are made if they pay together, else none."""
    counts = []
    for covered in range(1, 64):
        view = replace(USUAL, round_trip_s=0.2, acceptance=acceptance, covered=covered)
        counts.append(more(Window(), view))
        assert counts[-1] == 0 or counts[-1] > covered
        begun = replace(view, in_flight=covered, survival=acceptance**covered)
        assert more(Window(), begun) > 0 or acceptance**covered < 0.1, "it goes on with a chain that is beyond"
    assert counts == [*itertools.takewhile(bool, counts), *[0] * counts.count(0)], "the more is covered the less pays"
    assert counts[-1] == 0 or acceptance == 0.99
    assert counts[0] > 0


# === flush ======================================================================================================


def steps_missed(sent_at: float, commit_at: float, round_trip_s: float, step_s: float) -> int:
    """Count the steps that a verifier that runs ahead has begun since the commit's, when a message arrives.

    Brute force: the step of the commit ended when its commit left, and the next began then.
    """
    arrives_at, begins_at, begun = sent_at + round_trip_s / 2, commit_at - round_trip_s / 2, 0
    while begins_at < arrives_at:
        begun += 1
        begins_at += step_s
    return begun


def test_what_is_held_goes_at_the_last_look_before_the_step_that_it_can_reach() -> None:
    rng = random.Random(3)
    for _ in range(3000):
        step_s, round_trip_s = rng.uniform(0.005, 0.1), rng.choice([0.0, 0.002, 0.03, 0.2]) * rng.uniform(0.5, 1.5)
        next_s, commit_at = rng.uniform(0.0005, 1.2) * step_s, rng.uniform(0, 100)
        look = first = commit_at + rng.uniform(0, 3 * step_s)
        link = {"commit_at": commit_at, "round_trip_s": round_trip_s, "step_s": step_s}
        looks = 0
        while not due_to_flush(look, next_s=next_s, **link):
            look += next_s
            looks += 1
            assert looks < 10_000, "it is never sent"
        within = 1e-9  # of a deadline, either answer is right
        assert steps_missed(look - within, **link) <= steps_missed(first + within, **link), "holding cost a step"
        assert steps_missed(look + next_s + within, **link) > steps_missed(first - within, **link), "it went early"


def test_nothing_is_held_while_the_step_is_not_known() -> None:
    for now in (5.0, 5.01, 7.3):
        assert due_to_flush(now, commit_at=5.0, round_trip_s=0.1, step_s=0.0, next_s=0.001)


def test_nothing_is_held_by_a_drafter_slower_than_the_steps() -> None:
    for i in range(100):
        assert due_to_flush(5.0 + i / 1000, commit_at=5.0, round_trip_s=0.1, step_s=0.03, next_s=0.031)


# === patience ===================================================================================================

STEP_S = 0.03
Plan = Callable[[VerifierView], Patience]


def seconds_per_token(plan: Plan, acceptance: float, round_trip_s: float, drafting_s: float, most: int = 16) -> float:
    """Expected, exactly, of the process that `plan_for` plans for, under any plan.

    Hits are independent; after a miss the k-th draft is here round_trip_s + k drafting_s later; a step commits the
    received drafts while they hit and one token of its own. From one miss to the next nothing else is left to chance,
    so there is one path, and every step of it counts by the chance that the text gets there.
    """
    committed, time_s, reached, seconds, tokens = 0, 0.0, 1.0, 0.0, 0.0
    while reached > 1e-7:
        here = math.floor(max(0.0, time_s - round_trip_s) / drafting_s + 1e-9)
        received = min(most, max(0, here - committed))
        view = VerifierView(
            acceptance, STEP_S, 0.0, drafting_s, round_trip_s, most, received, since_miss=committed, since_miss_s=time_s
        )
        patience = plan(view)
        if received < min(most, patience.drafts):
            enough_at = round_trip_s + (committed + min(most, patience.drafts)) * drafting_s
            waited_s = min(patience.seconds, max(0.0, enough_at - time_s))
            here = math.floor(max(0.0, time_s + waited_s - round_trip_s) / drafting_s + 1e-9)
            received = min(most, max(0, here - committed))
        else:
            waited_s = 0.0
        seconds += reached * (waited_s + STEP_S)
        tokens += reached * sum(acceptance**n for n in range(received + 1))
        reached *= acceptance ** (received + 1)
        committed += received + 1
        time_s += waited_s + STEP_S
    return seconds / tokens


def run_ahead(view: VerifierView) -> Patience:
    return Patience(0.0)


def best_always_waiting(acceptance: float, round_trip_s: float, drafting_s: float) -> float:
    return min(
        seconds_per_token(lambda view, n=drafts: Patience(math.inf, n), acceptance, round_trip_s, drafting_s)  # type: ignore[misc]
        for drafts in range(1, 17)
    )


ROUND_TRIPS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.045, 0.06, 0.1, 0.2)


@pytest.mark.parametrize("acceptance", [0.8, 0.9, 0.95])
def test_with_a_fast_drafter_the_plan_is_near_the_better_of_no_and_full_patience(acceptance: float) -> None:
    for round_trip_s in ROUND_TRIPS:
        planned = seconds_per_token(patience_for, acceptance, round_trip_s, 0.0005)
        never = seconds_per_token(run_ahead, acceptance, round_trip_s, 0.0005)
        always = best_always_waiting(acceptance, round_trip_s, 0.0005)
        assert planned < 1.035 * min(never, always), f"round trip {round_trip_s} s"


def test_around_one_step_of_round_trip_the_plan_beats_both_never_and_always_waiting() -> None:
    for acceptance in (0.8, 0.9):
        planned = seconds_per_token(patience_for, acceptance, 0.03, 0.0005)
        assert planned < 0.97 * seconds_per_token(run_ahead, acceptance, 0.03, 0.0005)
        assert planned < 0.97 * best_always_waiting(acceptance, 0.03, 0.0005)


def usual_verifier(**changes: object) -> VerifierView:
    view = VerifierView(0.8, step_s=STEP_S, row_s=0.0, drafting_s=0.001, round_trip_s=0.003, max_drafts=16)
    return replace(view, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("acceptance", [0.02, 0.5, 0.9, 0.98])
@pytest.mark.parametrize("since_miss", [0, 1, 10])
def test_it_never_waits_where_the_round_trip_is_many_steps(acceptance: float, since_miss: int) -> None:
    for received in (0, 5):
        view = usual_verifier(acceptance=acceptance, round_trip_s=0.4, since_miss=since_miss, received=received)
        assert patience_for(view) == Patience(0.0)


@pytest.mark.parametrize("goal", Goal)
@pytest.mark.parametrize("unknown", ["step_s", "drafting_s"])
def test_it_never_waits_for_what_was_not_measured(unknown: str, goal: Goal) -> None:
    assert patience_for(usual_verifier(goal=goal, **{unknown: 0.0})).seconds == 0.0


def test_it_does_not_wait_for_drafts_that_should_have_been_here() -> None:
    assert patience_for(usual_verifier(since_miss=0, since_miss_s=5.0, received=1)) == Patience(0.0)


@pytest.mark.parametrize("round_trip_s", [0.002, 0.03, 0.4])
@pytest.mark.parametrize("max_drafts", [1, 8, 16])
def test_efficiency_waits_for_a_whole_block_as_long_as_one_takes_but_not_for_ever(
    round_trip_s: float, max_drafts: int
) -> None:
    view = usual_verifier(goal=Goal.EFFICIENCY, round_trip_s=round_trip_s, max_drafts=max_drafts)
    patience = patience_for(view)
    assert patience.drafts == max_drafts
    block_s = round_trip_s + max_drafts * view.drafting_s
    assert block_s < patience.seconds < 2 * (block_s + STEP_S)


@pytest.mark.parametrize("drafting_s", [0.001, 0.002, 0.00215, 0.0024, 0.004, 0.05])
@pytest.mark.parametrize("acceptance", [0.6, 0.9, 0.98])
def test_a_plan_is_made_at_once_whatever_the_drafters_speed_beside_the_steps(
    acceptance: float, drafting_s: float
) -> None:
    for max_drafts in (1, 7, 13, 16, 64):
        for round_trip_s in (0.0, 0.001, 0.04, 1.0):
            view = usual_verifier(
                acceptance=acceptance, drafting_s=drafting_s, max_drafts=max_drafts, round_trip_s=round_trip_s
            )
            assert patience_for(view).seconds <= 4 * STEP_S + 2 * max_drafts * drafting_s


def test_measurements_that_waver_by_a_little_give_one_plan() -> None:
    rng = random.Random(0)
    plans = set()
    for _ in range(50):
        waver = {name: getattr(usual_verifier(), name) * rng.uniform(0.999, 1.001) for name in ("step_s", "drafting_s")}
        plans.add(patience_for(usual_verifier(**waver)).drafts)
    assert len(plans) == 1


def share_saved_by_running_ahead(view: VerifierView, misses: int = 4000) -> float:
    """Simulate the saved share of the target's time: one step a token until the drafts after the last miss arrive."""
    rng, spent_s, alone_s = random.Random(5), 0.0, 0.0
    for _ in range(misses):
        hits = 0
        while rng.random() < view.acceptance:
            hits += 1
        now_s, done = 0.0, 0
        while done <= hits:
            here = max(0, int((now_s - view.round_trip_s) / view.drafting_s) - done)
            done += min(view.max_drafts, here, hits - done) + 1
            now_s += view.step_s
        spent_s += now_s
        alone_s += (hits + 1) * view.step_s
    return 1 - spent_s / alone_s


@pytest.mark.parametrize("round_trip_s", [0.03, 0.12, 0.2, 0.3])
@pytest.mark.parametrize("acceptance", [0.3, 0.5, 0.7, 0.9])
def test_drafts_overtake_where_they_spare_a_target_over_a_hundredth_of_its_time(
    round_trip_s: float, acceptance: float
) -> None:
    view = VerifierView(acceptance, 0.03, 0.0, 0.001, round_trip_s, max_drafts=16)
    saved = share_saved_by_running_ahead(view)
    if abs(saved - 0.012) > 0.006:  # nearer than that the estimates may differ
        assert overtakes(view) == (saved > 0.012)


@pytest.mark.parametrize("times", [{"drafting_s": 1e-6}, {"drafting_s": 1e-9}, {"step_s": 5e-7}])
@pytest.mark.parametrize("round_trip_s", [0.0, 0.01, 4294.0])
def test_the_least_times_that_an_edge_can_report_have_a_plan(times: dict[str, float], round_trip_s: float) -> None:
    for received in (0, 3):
        view = usual_verifier(**times, round_trip_s=round_trip_s, received=received, since_miss=2, since_miss_s=0.5)
        assert 0 <= patience_for(view).seconds < math.inf
        assert overtakes(view) in (True, False)


def test_before_anything_is_measured_drafts_are_taken_to_overtake() -> None:
    view = VerifierView(0.1, 0.03, 0.0, 0.0, 1.0, max_drafts=16)
    assert overtakes(view)
    assert overtakes(replace(view, drafting_s=0.001, step_s=0.0))
    assert not overtakes(replace(view, drafting_s=0.001))


def test_no_more_drafts_are_judged_than_pay() -> None:
    free = VerifierView(0.7, step_s=0.02, row_s=0.0, drafting_s=0.001, round_trip_s=0.0, max_drafts=16)
    assert best_block(free) == 16
    dear = replace(free, row_s=0.002)
    assert 1 < best_block(dear) < 8
    assert best_block(replace(dear, acceptance=0.95)) > best_block(dear)
    assert best_block(replace(free, row_s=0.5, acceptance=0.02)) == 0
    assert best_block(replace(free, step_s=0.0, row_s=0.5)) == 16


def test_steps_measured_in_a_bad_moment_do_not_make_drafts_dear_for_good() -> None:
    cost = StepCost()
    for _ in range(20):  # a busy machine
        cost.add(1, 0.1)
        cost.add(5, 0.12)
    assert cost.line(1)[1] == pytest.approx(0.005, rel=0.1)
    for _ in range(60):  # it is quiet again, and only single rows are verified
        cost.add(1, 0.01)
    base_s, row_s = cost.line(1)
    assert row_s == pytest.approx(0.0005, rel=0.1)
    assert best_block(VerifierView(0.7, base_s, row_s, 0.001, 0.0, max_drafts=16)) > 1


@pytest.mark.parametrize("rows", [2, 5, 9])
def test_one_slow_step_of_a_seldom_number_of_rows_does_not_make_rows_dear(rows) -> None:
    cost = StepCost()
    for _ in range(60):
        cost.add(1, 0.03)
    cost.add(rows, 0.045)  # a hiccup
    dear = cost.line(1)[1]
    for usual in (1, 4, 1, 10) * 30:
        if usual.bit_length() != rows.bit_length():
            cost.add(usual, 0.03)
    assert dear > 0.0015, "at first it is all that is known"
    assert cost.line(1)[1] < 0.0005


def test_the_cost_of_a_step_is_flat_and_then_rises_as_it_was_measured() -> None:
    cost = StepCost()
    assert cost.seconds(5) == 0.0
    cost.add(1, 0.03)
    assert cost.seconds(100) == 0.03, "nothing else is known"
    for rows in (1, 2, 5, 9, 17, 40, 80) * 30:
        cost.add(rows, max(0.03, 0.001 * rows))
    assert cost.seconds(9) == pytest.approx(0.03)
    assert cost.seconds(80) == pytest.approx(0.08, rel=0.01)
    assert cost.seconds(160) == pytest.approx(0.16, rel=0.1), "the last slope goes on"
    assert cost.line(1) == (pytest.approx(0.03), pytest.approx(0.0, abs=1e-4))
    base_s, row_s = cost.line(16)
    assert row_s == pytest.approx(16 * 0.001, rel=0.3), "of every session"
    assert base_s + 5 * row_s == pytest.approx(0.08, rel=0.1)


@pytest.mark.parametrize("slower", [1.0, 1.5])
def test_steps_of_more_rows_are_no_slower_machine(slower) -> None:
    """Rows that grow within an octave say nothing of other octaves, and a machine that slows down does."""
    cost = StepCost()
    for rows in (40, 90, 140) * 20:
        cost.add(rows, 0.0186 + 0.0001 * rows)
    for _ in range(60):
        cost.add(120, slower * (0.0186 + 0.0001 * 120))
    assert cost.seconds(140) == pytest.approx(slower * (0.0186 + 0.0001 * 140), rel=0.01)
    assert cost.line(91)[1] == pytest.approx(slower * 91 * 0.0001, rel=0.1)


# === lingering ==================================================================================================


def brute_force_linger(due, prospects, step_s):
    def rate(wait_s):
        tokens = due + sum(p.tokens_then if p.wait_s <= wait_s else p.tokens_now for p in prospects)
        return tokens / (step_s + wait_s)

    return max([0.0, *sorted(p.wait_s for p in prospects)], key=rate)


prospects = st.builds(
    lambda wait_s, now, more: Prospect(wait_s, now, now + more),
    st.floats(0.0005, 0.05),
    st.floats(1.0, 3.0),
    st.floats(0.0, 4.0),
)


@given(st.floats(0.0, 8.0), st.lists(prospects, max_size=6), st.sampled_from([0.005, 0.03]))
def test_a_step_lingers_as_long_as_makes_tokens_come_fastest(due, waiting, step_s):
    def rate(wait_s):
        tokens = due + sum(p.tokens_then if p.wait_s <= wait_s else p.tokens_now for p in waiting)
        return tokens / (step_s + wait_s)

    chosen, best = batching_delay_s(due, waiting, step_s), brute_force_linger(due, waiting, step_s)
    assert rate(chosen) == pytest.approx(rate(best))


# === measurements =================================================================================================


def test_an_open_is_a_measure_of_the_round_trip_only_until_a_draft_message_is_one() -> None:
    measurements = Measurements()
    measurements.time_open(0.4)  # a handshake, a long prompt
    assert measurements.round_trip.base == pytest.approx(0.4)
    for size in (34, 36, 32):
        measurements.time_draft(size, 0.12)
    measurements.time_open(0.4)
    assert measurements.round_trip.base == pytest.approx(0.12)
    assert measurements.round_trip.slope == pytest.approx(0.0, abs=1e-9), "no price on bytes that nobody has seen"


def test_a_link_that_changes_is_measured_anew_and_puts_no_price_on_bytes() -> None:
    measurements = Measurements()
    for size, seconds in [(32, 0.2), (48, 0.21), (40, 0.19), (50, 0.2), (32, 0.01), (34, 0.011), (30, 0.01)]:
        measurements.time_draft(size, seconds)
    assert measurements.round_trip.base < 0.02
    assert measurements.round_trip.slope < 1e-3
    for size, seconds in [(34, 0.2), (32, 0.2)]:
        measurements.time_draft(size, seconds)
    assert measurements.round_trip.base == pytest.approx(0.2)


def test_one_late_message_does_not_make_another_link() -> None:
    measurements = Measurements()
    for seconds in (0.02, 0.021, 0.3, 0.02, 0.019):
        measurements.time_draft(34, seconds)
    assert measurements.round_trip.base == pytest.approx(0.02, rel=0.05)
