"""Number of drafts that a step verifies, and the time that the verifier waits for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from outrider.proto.types import Goal, Patience

MIN_GAIN = 1.02  # below it drafts are not worth verifying, nor making
WORTH_THE_LINK = 1.012  # below it drafts come too late to be worth making and sending
LEANING = 1.05  # among equally good plans the one that waits takes fewer steps
LATE, MARGIN_S = 1.25, 0.002  # a wait ends when drafts exceed their expected time by this factor and margin
_GRAIN = 8  # resolution of times, in parts of a step
_TINY_S = 1e-6  # least time that is told from 0; an edge reports whole microseconds
_HORIZON = 48  # tokens after a miss that a plan looks ahead


@dataclass(frozen=True, slots=True)
class VerifierView:
    """Knowledge of the verifier about a session when it plans a step; times are 0 until they are measured.

    Attributes:
        acceptance: chance that a draft agrees, given that all before it did.
        step_s: time of a step beside its rows, in seconds.
        row_s: time of a row of every session in the step, in seconds.
        drafting_s: time to draft one token at the edge, in seconds.
        round_trip_s: time from the sending of a commit to the arrival of its answer, without drafting, in seconds.
        received: number of drafts that have come and follow the transcript.
        since_miss: tokens committed since a draft last missed (or the text began).
        since_miss_s: time since that commit was sent, in seconds.
    """

    acceptance: float
    step_s: float
    row_s: float
    drafting_s: float
    round_trip_s: float
    max_drafts: int
    received: int = 0
    since_miss: int = 0
    since_miss_s: float = 0.0
    goal: Goal = Goal.LATENCY


def expected_tokens(acceptance: float, drafts: int) -> float:
    """Return the expected tokens of a step that verifies `drafts` drafts (Leviathan et al. 2023, equation 1)."""
    return (1 - acceptance ** (drafts + 1)) / (1 - acceptance)


def best_block(view: VerifierView) -> int:
    """Return the number of drafts to verify in one step so that tokens come fastest.

    It is 0 where rows cost so much, on a crowded CPU for one, that no draft pays.
    """
    if not view.step_s:
        return view.max_drafts
    return _best_block(_rounded(view.acceptance, 0.01), _on_scale(view.row_s / view.step_s), view.max_drafts)


@lru_cache(maxsize=4096)
def _best_block(acceptance: float, row_share: float, max_drafts: int) -> int:
    """Return the best number of drafts; `row_share` is a row's time over that of a step beside its rows."""

    def rate(drafts: int) -> float:
        return expected_tokens(acceptance, drafts) / (1 + row_share * (drafts + 1))

    best = max(range(1, max_drafts + 1), key=rate)
    return best if rate(best) > MIN_GAIN * rate(0) else 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a session: the time to wait, and the drafts that should come meanwhile.

    Attributes:
        patience: wait from when the session became ready; 0 s: run ahead.
        expected_s: time from then until the drafts should be here, in seconds.
        drafts: drafts that should be here then.
    """

    patience: Patience
    expected_s: float = 0.0
    drafts: int = 0


_AT_ONCE = Plan(Patience(0.0))


@dataclass(frozen=True, slots=True)
class Prospect:
    """Expected tokens of a waiting session in a step: now, and after `wait_s` more seconds."""

    wait_s: float
    tokens_now: float
    tokens_then: float


def batching_delay_s(due: float, prospects: Sequence[Prospect], step_s: float) -> float:
    """Return how long a step that could begin should wait for sessions that will have drafts soon, in seconds.

    All sessions join the step, with drafts or without, so the objective is tokens a second of step and wait together:
    wait for the next session while that raises it.

    Args:
        due: expected tokens of the sessions that are ready.
        prospects: prospects of the others.
        step_s: duration of a step, in seconds.
    """
    waiting = sorted(prospects, key=lambda prospect: prospect.wait_s)
    tokens = due + sum(prospect.tokens_now for prospect in waiting)
    best_rate, best_s = tokens / step_s, 0.0
    for prospect in waiting:
        tokens += prospect.tokens_then - prospect.tokens_now
        rate = tokens / (step_s + prospect.wait_s)
        if rate > best_rate:
            best_rate, best_s = rate, prospect.wait_s
    return best_s


def plan_for(view: VerifierView) -> Plan:
    """Plan how long to wait before the next step, and for how many drafts.

    Between two misses only the end of the run is random, so the best plan minimises the expected time from one miss to
    the next (`_Outlook.to_next_miss`). If it waits, the edge says when its chain is complete, since it knows how sure
    its drafter is of this one. With goal efficiency it waits for a whole block, within reason.
    """
    if not (view.step_s and view.drafting_s):
        return _AT_ONCE
    outlook = _outlook_of(view)
    if view.goal is Goal.EFFICIENCY:
        wait_s = view.round_trip_s + view.max_drafts * view.drafting_s
        return Plan(Patience(LATE * wait_s + view.step_s, view.max_drafts), wait_s, view.max_drafts)
    # Tokens that the target took alone have not been compared yet: a draft that missed has ended the chain unseen, and
    # then a wait is lost.
    alive = 1.0 if view.received else outlook.acceptance ** max(0, view.since_miss)
    best_cost, best_drafts = LEANING * alive * outlook.cost(view.since_miss, view.since_miss_s, view.received, 0.0), 0
    best_wait_s = 0.0
    for drafts in range(view.received + 1, view.max_drafts + 1):
        wait_s = outlook.arrival_s(view.since_miss + drafts) - view.since_miss_s
        if wait_s > outlook.step_s:
            break
        if wait_s <= 0:
            continue  # overdue: the edge has stopped before it
        cost = alive * outlook.cost(view.since_miss, view.since_miss_s, drafts, wait_s) + (1 - alive) * wait_s
        if cost < best_cost:
            best_cost, best_drafts, best_wait_s = cost, drafts, wait_s
    if not best_drafts:
        return _AT_ONCE
    whole_block_s = outlook.arrival_s(view.since_miss + view.max_drafts) - view.since_miss_s
    return Plan(Patience(LATE * whole_block_s + MARGIN_S, view.max_drafts), best_wait_s, best_drafts)


def overtakes(view: VerifierView) -> bool:
    """Return whether drafts come in time to matter.

    A target that runs ahead is some round_trip_s / step_s tokens further when the first draft after a miss arrives,
    and all of those must have been hits for the rest to be of use. If tokens then come hardly faster than from the
    target alone, drafts waste the edge's time and the uplink's bytes.
    """
    if not (view.step_s and view.drafting_s):
        return True
    outlook = _outlook_of(view)
    return outlook.alone_to_next_miss > WORTH_THE_LINK * outlook.to_next_miss(0, 0.0)


class _Outlook:
    """The expected time until the next miss, under the best plan, for one set of measurements."""

    def __init__(
        self, acceptance: float, step_s: float, row_s: float, drafting_s: float, round_trip_s: float, max_drafts: int
    ) -> None:
        self.acceptance = acceptance
        self.step_s = step_s
        self._row_s = row_s
        self._drafting_s = drafting_s
        self._round_trip_s = round_trip_s
        self._best = min(
            range(max_drafts + 1), key=lambda drafts: self._duration(drafts) / (1 - acceptance ** (drafts + 1))
        )
        self._steady = self._duration(self._best) / (1 - acceptance ** (self._best + 1))
        self._known: dict[tuple[int, int], float] = {}
        self.alone_to_next_miss = self._duration(0) / (1 - acceptance)

    def arrival_s(self, token: int) -> float:
        """Return when the token-th draft after a miss arrives, in seconds after the commit that held the miss."""
        return self._round_trip_s + token * self._drafting_s

    def _duration(self, drafts: int) -> float:
        return self.step_s + self._row_s * (drafts + 1)

    def cost(self, committed: int, time_s: float, drafts: int, wait_s: float) -> float:
        """Return the expected seconds to the next miss when the next step begins after `wait_s` with `drafts`."""
        drafts = min(drafts, self._best)
        duration = wait_s + self._duration(drafts)
        survives = self.acceptance ** (drafts + 1)
        return duration + survives * self.to_next_miss(committed + drafts + 1, time_s + duration)

    def to_next_miss(self, committed: int, time_s: float) -> float:
        """Return the expected seconds to the next miss, `committed` tokens and `time_s` after the last."""
        if time_s >= self.arrival_s(committed + self._best) or committed > _HORIZON:
            return self._steady
        key = (committed, int(time_s / self.step_s * _GRAIN))
        if key not in self._known:
            arrived = int((time_s - self._round_trip_s) / self._drafting_s) - committed
            received = min(self._best, max(0, arrived))
            costs = [self.cost(committed, time_s, received, 0.0)]
            for drafts in (received + 1, received + 2, received + 4, self._best):
                wait_s = self.arrival_s(committed + drafts) - time_s
                if drafts <= self._best and 0 < wait_s <= self.step_s:
                    costs.append(self.cost(committed, time_s, drafts, wait_s))
            self._known[key] = min(costs)
        return self._known[key]


def _outlook_of(view: VerifierView) -> _Outlook:
    return _outlook(
        _rounded(view.acceptance, 0.02),
        _on_scale(max(view.step_s, _TINY_S)),  # neither is 0 here
        _on_scale(view.row_s),
        _on_scale(max(view.drafting_s, _TINY_S)),
        _on_scale(view.round_trip_s),
        view.max_drafts,
    )


@lru_cache(maxsize=512)
def _outlook(
    acceptance: float, step_s: float, row_s: float, drafting_s: float, round_trip_s: float, max_drafts: int
) -> _Outlook:
    return _Outlook(acceptance, step_s, row_s, drafting_s, round_trip_s, max_drafts)


def _rounded(value: float, grain: float) -> float:
    return round(value / grain) * grain


def _on_scale(seconds: float) -> float:
    """Round to the nearest twentieth of an octave, so that wavering measurements give one plan."""
    return 2 ** (round(math.log2(seconds) * 20) / 20) if seconds >= _TINY_S else 0.0
