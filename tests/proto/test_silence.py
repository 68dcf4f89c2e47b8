"""Silence of a stream: suspect when an answer is due for longer than its own answers allow, and at no other time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from outrider.proto.policy.suspicion import AnswerTimes, ReopenBudget, SilenceRules, SilenceWatch, Silent
from outrider.proto.types import Commit, CommittedToken, Opened, Ping, Pong

RULES = SilenceRules()
OPENED = Opened(0, 64, 40, "v", 512)
COMMIT = Commit(3, (CommittedToken(1),), 0, 64)


def watch(times: AnswerTimes | None = None, *, opened: bool = True) -> SilenceWatch:
    """A watch whose Open was sent at 0 and, if `opened`, answered at once."""
    watching = SilenceWatch(times or AnswerTimes(), RULES, 0.0)
    if opened:
        watching.hear(OPENED, 0.0)
    return watching


def until(watching: SilenceWatch, end: float, usual_s: float = 0.05) -> list[tuple[float, Ping | Silent]]:
    """Return what the watch says at each of its looks up to `end`."""
    said = []
    while watching.next_look <= end:
        now = watching.next_look
        if (word := watching.look(now, usual_s)) is not None:
            said.append((now, word))
        assert watching.next_look > now
    return said


# === the distribution ===========================================================================================


def test_each_decimal_of_suspicion_takes_as_long_a_gap_as_the_one_before() -> None:
    times = AnswerTimes()
    for seconds in (0.1, 0.12, 0.3, 0.1):
        times.add(seconds)
    none, one, eight = (times.bound_s(phi, 0.1) for phi in (0.0, 1.0, 8.0))
    assert 0.1 < none < one, "an answer of the mean time is not suspect"
    assert eight - none == pytest.approx(8 * (one - none))


def test_the_law_follows_what_is_measured() -> None:
    times = AnswerTimes()
    near, far = times.bound_s(8.0, 0.02), times.bound_s(8.0, 0.6)
    assert near < 0.3
    assert far > 3.0, "a satellite's usual round trip is no silence"
    times.add(1.5)
    assert times.bound_s(8.0, 0.02) > 4 * 1.5, "one late answer raises the bound at once"
    for _ in range(32):
        times.add(0.02)
    assert times.bound_s(8.0, 0.02) == pytest.approx(near, rel=1.0), "and is forgotten"


GAPS: dict[str, Callable[[random.Random], float]] = {
    "constant": lambda rng: 0.05,
    "uniform": lambda rng: rng.uniform(0.02, 0.4),
    "exponential": lambda rng: 0.02 + rng.expovariate(1 / 0.05),
    "lognormal": lambda rng: 0.05 * rng.lognormvariate(0.0, 0.8),
    "bimodal": lambda rng: 0.05 + (rng.random() < 0.05) * rng.uniform(0.2, 0.6),
    "pareto": lambda rng: 0.05 * rng.paretovariate(3.0),
}
MOST_AN_HOUR = {"lognormal": 1.0, "pareto": 1.0}  # of heavy tails no estimate is sure


@pytest.mark.parametrize("name", GAPS)
def test_false_alarms_are_rare_under_any_law_of_answers(name: str) -> None:
    rng, times = random.Random(7), AnswerTimes()
    answers = 20_000
    alarms, seconds = 0, 0.0
    for _ in range(answers):
        took_s = GAPS[name](rng)
        alarms += took_s > max(RULES.min_s, times.bound_s(RULES.phi, 0.05))
        seconds += RULES.quiet_s + took_s
        times.add(took_s)
    assert alarms / (seconds / 3600) <= MOST_AN_HOUR.get(name, 0.0)


@pytest.mark.parametrize("name", GAPS)
def test_a_verifier_that_stops_is_suspect_soon_under_any_of_them(name: str) -> None:
    rng, times = random.Random(7), AnswerTimes()
    bounds = []
    for _ in range(2_000):
        times.add(GAPS[name](rng))
        bounds.append(max(RULES.min_s, times.bound_s(RULES.phi, 0.05)))
    assert sorted(bounds)[len(bounds) // 2] < 6.0


# === the watch ==================================================================================================


def test_nothing_is_asked_while_frames_come() -> None:
    watching = watch()
    for step in range(1, 200):
        assert until(watching, step * 0.1) == []
        watching.hear(COMMIT, step * 0.1)


def test_a_quiet_verifier_that_answers_is_never_suspect() -> None:
    watching = watch()
    pings, answers = 0, list[tuple[float, Pong]]()
    while pings < 200:  # it reads a long prompt, or waits for drafts that no credit allows
        now = watching.next_look
        if answers and answers[0][0] <= now:
            at, pong = answers.pop()
            watching.hear(pong, at)
        word = watching.look(now, 0.05)
        assert not isinstance(word, Silent)
        if word is not None:
            pings += 1
            answers.append((now + 0.3, Pong(word.number)))


def test_silence_is_suspect_after_its_bound_and_only_once_an_answer_is_due() -> None:
    watching = watch()
    (asked_at, ping), (suspect_at, silent), *_ = until(watching, 10.0)
    assert (asked_at, ping) == (pytest.approx(RULES.quiet_s), Ping(1))
    assert isinstance(silent, Silent)
    assert suspect_at == pytest.approx(asked_at + RULES.min_s, abs=0.15)
    assert silent.silence_s >= silent.bound_s


def test_any_frame_ends_the_silence() -> None:
    watching = watch()
    until(watching, 1.2)
    watching.hear(COMMIT, 1.3)
    assert not watching.silent
    assert until(watching, 1.3 + RULES.quiet_s - 0.01) == []
    assert until(watching, 1.3 + RULES.quiet_s + 0.01)[0][1] == Ping(2)


def test_a_stream_that_is_being_opened_has_time_to_shake_hands() -> None:
    watching = watch(opened=False)
    (at, word), *_ = until(watching, 30.0)
    assert isinstance(word, Silent), "no Ping goes before the Open is answered"
    assert at == pytest.approx(RULES.opening_s, abs=0.15)
    (at, _), *_ = until(watch(opened=False), 30.0, usual_s=0.6)
    assert at > 12.0, "four round trips of a satellite, with their answers"


def test_a_watcher_that_stood_still_suspects_nobody() -> None:
    watching = watch()
    until(watching, 0.7)
    assert watching.silent
    assert watching.look(60.0, 0.05) is None, "this machine slept for a minute; the answer may lie unread"
    assert until(watching, 60.5) == []
    ((_, word), *_) = until(watching, 62.0)
    assert isinstance(word, Silent), "but it has had its time now"


def test_a_busy_edge_whose_looks_are_late_counts_only_what_it_looked_at_in_time() -> None:
    watching = watch()
    now = 0.0
    for _ in range(8):
        now = watching.next_look + 1.0
        assert not isinstance(watching.look(now, 0.05), Silent)


def test_a_silence_with_nowhere_to_go_is_raised_ever_less_often() -> None:
    watching = watch()
    raised = []
    while len(raised) < 7:
        now = watching.next_look
        word = watching.look(now, 0.05)
        if isinstance(word, Silent):
            raised.append(now)
            assert word.again is (len(raised) > 1)
            watching.postpone(now)
    waits = [later - earlier for earlier, later in itertools.pairwise(raised)]
    assert [round(wait) for wait in waits] == [1, 2, 4, 8, 8, 8]


def test_a_kept_session_that_was_idle_begins_with_a_question_and_no_suspicion() -> None:
    watching = watch()
    watching.resume(500.0)
    ((at, word),) = until(watching, 501.0)
    assert (at, word) == (500.5, Ping(1))


# === the budget =================================================================================================


def test_all_streams_of_a_stopped_verifier_may_leave_it_together() -> None:
    budget = ReopenBudget(events=1.0)
    for stream in range(200):
        assert budget.allows("a", -1.0, stream * 0.01)
        budget.take("a", -1.0, stream * 0.01)
    assert not budget.allows("b", -1.0, 3.0)
    assert not budget.allows("a", 2.5, 3.0), "it was opened there since, and is another event"
    assert not budget.allows("a", -1.0, 20.0), "so is what happens later"
    assert budget.allows("a", -1.0, 61.0)


def test_under_overload_streams_are_left_a_bounded_number_of_times() -> None:
    """Ten minutes in which every verifier is silent whenever anybody looks, and every other answers."""
    budget, left, verifiers = ReopenBudget(), [0] * 50, ["a", "b", "c"]
    at, opened_at = ["a"] * 50, [-1.0] * 50
    unbounded = 0
    for look in range(600):
        now = float(look)
        for text in range(50):
            unbounded += 1
            if budget.allows(at[text], opened_at[text], now):
                budget.take(at[text], opened_at[text], now)
                opened_at[text] = now + 0.5
                at[text] = verifiers[(verifiers.index(at[text]) + 1) % 3]
                left[text] += 1
    assert unbounded == 600 * 50
    assert 0 < max(left) <= 3 + 600 / 60, max(left)
