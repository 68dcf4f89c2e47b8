"""Whether a verifier's step waits for drafts, for how many, and which end makes them.

With shared noise either end proposes the same tokens, so the question is who drafts. After a miss the edge's next
drafts arrive a round trip later, at no cost to the cloud; a drafter beside the target has its own at once, on cores
that others may need. Between two misses only the end of the run is random: a step with d drafts is survived with
probability a^(d+1). So the best plan minimises the expected time from one miss to the next.

`plan_for` does so where only the edge drafts. Where the verifier drafts too, `division_of` minimises

    seconds a token + price * seconds of drafting here a token.

Unless it is set, the price is the highest of `_PRICES` at which a token takes no more of its time than with a drafter
beside the target alone, which waits for its drafts before every step and rests during it; where the edge takes no part,
at most `ALONE` of that time. It is 0 where none is so high. All sessions wait for what one of them takes of a step or a
thread, so each divides as if all did as it does. With goal efficiency waiting is free, and the seconds of target steps
and of drafting here are minimised.

A division is found by following runs (`_run`): tokens committed, the edge's arrivals, the drafts that are left. Where a
branch of the edge follows the miss, the next run begins with its drafts; so runs are of two kinds, and the costs are
theirs in the stationary shares.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache

from outrider.proto.policy.measurements import Smoothed
from outrider.proto.types import Goal, Patience

MIN_GAIN = 1.02  # below it drafts are not worth verifying, nor making
WORTH_THE_LINK = 1.012  # below it drafts come too late to be worth making and sending
LEANING = 1.05  # among equally good plans the one that waits takes fewer steps
LATE, MARGIN_S = 1.25, 0.002  # a wait ends when drafts exceed their expected time by this factor and margin
_GRAIN = 8  # resolution of times, in parts of a step
_TINY_S = 1e-6  # least time that is told from 0; an edge may report anything above 0
_HORIZON = 48  # tokens after a miss that a plan looks ahead
_PER_OCTAVE, _DIVIDED_PER_OCTAVE = 20, 6  # resolution of times: they waver, and plans must not, divisions least

ALONE = 0.97  # replayed: 3 % faster on links beyond a step, for a tenth more drafting here
_PRICES = (0.0, 0.2, 0.5, 1.0, 1.5, 2.5, 4.0, 7.0, math.inf)
_LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
_DEAREST = 1e3  # stands for an infinite price
_AHEAD_S = 0.0013  # of a step beside which the verifier drafts: target and drafter share one interpreter
_EDGE_WINDOW = 64  # drafts that an edge has in flight at most
_MAX_STEPS = 32  # of a run that is followed
_BRANCHES = 2  # drafted before the one that is taken
_SURELY_OVER = 1e-3
_LIKE, _LIKE_ACCEPTANCE, _LIKE_BRANCHED, _LIKE_S = 0.15, 0.04, 0.08, 2e-5  # differences that change no division


@dataclass(frozen=True, slots=True)
class VerifierView:
    """Knowledge of the verifier about a session when it plans a step; times in seconds, 0 until they are measured.

    Attributes:
        acceptance: chance that a draft agrees, given that all before it did.
        step_s: time of a step beside its rows.
        row_s: time of a row of every session in the step.
        drafting_s: time to draft one token at the edge; infinite: it drafts nothing.
        round_trip_s: time from the sending of a commit to the arrival of its answer, without drafting.
        received: drafts that have come and follow the transcript.
        since_miss: tokens committed since a draft last missed (or the text began), `since_miss_s` ago.
        here_s: time of a drafted token beside the target.
        sharing: sessions at a thread of such drafting at once; each waits for the drafts of those before it, too.
        branched: share of misses whose branch the edge has sent in time, where its chain had come in time.
        branch_drafts: drafts of such a branch.
        price: seconds of waiting that a second of drafting here is worth; None: as the module says.
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
    here_s: float = 0.0
    sharing: float = 1.0
    branched: float = 0.0
    branch_drafts: int = 0
    price: float | None = None

    def is_like(self, other: VerifierView) -> bool:
        """Return whether no measurement differs so much that another division could be better."""
        mine, theirs = (
            (view.step_s, view.row_s, view.drafting_s, view.round_trip_s, view.here_s, view.here_s * view.sharing)
            for view in (self, other)
        )
        close = all(map(_is_close, mine, theirs)) and abs(self.acceptance - other.acceptance) < _LIKE_ACCEPTANCE
        close = close and abs(self.branched - other.branched) < _LIKE_BRANCHED
        same = (self.max_drafts, self.branch_drafts, self.price, self.goal)
        return close and same == (other.max_drafts, other.branch_drafts, other.price, other.goal)

    def edge_wait_s(self, drafts: int) -> float:
        """Return the time until the edge should have `drafts` drafts after the transcript; below 0: since then."""
        return _edge_wait_s(self, self.since_miss + drafts, self.since_miss_s)


def _edge_wait_s(view: VerifierView, drafts: int, since_miss_s: float) -> float:
    """Return the time until the edge's first `drafts` drafts since the last miss are here; below 0: since then."""
    return view.round_trip_s + drafts * view.drafting_s - since_miss_s


def expected_tokens(acceptance: float, drafts: int) -> float:
    """Return the expected tokens of a step that verifies `drafts` drafts (Leviathan et al. 2023, equation 1)."""
    return (1 - acceptance ** (drafts + 1)) / (1 - acceptance)


def best_block(view: VerifierView) -> int:
    """Return the drafts to verify in one step so that tokens come fastest; 0: rows cost so much that no draft pays."""
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


# --- how long a step waits ---


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a session: to wait for `patience` from when it became ready, for `drafts` expected after `expected_s`."""

    patience: Patience
    expected_s: float = 0.0
    drafts: int = 0

    @classmethod
    def waiting(cls, drafts: int, expected_s: float, most: int, most_s: float) -> Plan:
        """Return the plan to wait for `drafts`; `most` may be better and come in `most_s`, or their end be said."""
        return cls(Patience(LATE * most_s + MARGIN_S, most), expected_s, drafts)


AT_ONCE = Plan(Patience(0.0))


@dataclass(frozen=True, slots=True)
class Prospect:
    """Expected tokens of a waiting session in a step: now, and after `wait_s` more seconds."""

    wait_s: float
    tokens_now: float
    tokens_then: float


def batching_delay_s(due: float, prospects: Sequence[Prospect], step_s: float) -> float:
    """Return how long a step that could begin should wait for sessions that will have drafts soon, in seconds.

    All sessions join the step, with drafts or without, so the objective is tokens a second of step and wait together.

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
    """Plan how long to wait before the next step for drafts of an edge that drafts alone, and for how many.

    If it waits, the edge says when its chain is complete, since it knows how sure its drafter is of this one. With goal
    efficiency it waits for a whole block, within reason.
    """
    if not (view.step_s and view.drafting_s):
        return AT_ONCE
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
        return AT_ONCE
    whole_block_s = outlook.arrival_s(view.since_miss + view.max_drafts) - view.since_miss_s
    return Plan.waiting(best_drafts, best_wait_s, view.max_drafts, whole_block_s)


def overtakes(view: VerifierView) -> bool:
    """Return whether drafts come in time to matter.

    A target that runs ahead is some round_trip_s / step_s tokens further when the first draft after a miss arrives. If
    tokens then come hardly faster than from the target alone, drafts waste the edge's time and the uplink's bytes.
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


_outlook = lru_cache(maxsize=512)(_Outlook)


def _outlook_of(view: VerifierView) -> _Outlook:
    return _outlook(
        _rounded(view.acceptance, 0.02),
        _on_scale(max(view.step_s, _TINY_S)),  # neither is 0 here
        _on_scale(view.row_s),
        _on_scale(max(view.drafting_s, _TINY_S)),
        _on_scale(view.round_trip_s),
        view.max_drafts,
    )


# --- which end drafts ---


@dataclass(frozen=True, slots=True)
class Division:
    """A division of drafting between the two ends, and the seconds a token that it should take.

    Attributes:
        drafts: drafts that a step waits for.
        ahead: whether the verifier drafts while its target steps.
        edge_pays: whether the edge's drafts are worth making and sending.
        price: seconds of waiting that a second of drafting here is worth.
        token_s: seconds a token in all, `step_s` of them in target steps, and `here_s` in drafting beside the target.
    """

    drafts: int
    ahead: bool
    edge_pays: bool
    price: float
    token_s: float = 0.0
    step_s: float = 0.0
    here_s: float = 0.0

    @property
    def priced_s(self) -> float:
        return self.token_s + min(self.price, _DEAREST) * self.here_s

    def waits_for_edge(self, lacking: int, committed: int, since_miss_s: float, view: VerifierView) -> bool:
        """Return whether it is cheaper to wait for the edge's drafts than to make the `lacking` ones here.

        The last miss was `committed` tokens ago, and its commit was sent `since_miss_s` seconds ago.
        """
        if not self.edge_pays:
            return False
        wait_s = _edge_wait_s(view, committed + self.drafts, since_miss_s)
        return 0 < wait_s < (view.sharing + self.price) * lacking * view.here_s


def division_of(view: VerifierView) -> Division:
    """Return the division between the two ends, as the module says."""
    return _division_of(
        replace(
            view,
            acceptance=round(view.acceptance * 25) / 25,
            step_s=_on_scale(view.step_s, _DIVIDED_PER_OCTAVE),
            row_s=_on_scale(view.row_s, _DIVIDED_PER_OCTAVE),
            drafting_s=max(_TINY_S, _on_scale(view.drafting_s, _DIVIDED_PER_OCTAVE)),
            round_trip_s=_on_scale(view.round_trip_s, _DIVIDED_PER_OCTAVE),
            received=0,
            since_miss=0,
            since_miss_s=0.0,
            here_s=max(_TINY_S, _on_scale(view.here_s, _DIVIDED_PER_OCTAVE)),
            sharing=_on_scale(view.sharing, _DIVIDED_PER_OCTAVE),
            branched=round(view.branched * 10) / 10,
        )
    )


@lru_cache(maxsize=1024)
def _division_of(view: VerifierView) -> Division:
    alone = _divisions(view, 0.0, edge_pays=False)
    if view.goal is Goal.EFFICIENCY:
        divisions = [*alone, *_divisions(view, math.inf, edge_pays=True)]
        return min(divisions, key=lambda division: division.step_s + division.here_s)

    @cache
    def cheapest(price: float) -> Division:
        """Return the division of the lowest priced time; the edge takes part only where that makes a difference."""
        without = min((replace(each, price=price) for each in alone), key=lambda each: each.priced_s)
        edge = min(_divisions(view, price, edge_pays=True), key=lambda each: each.priced_s, default=without)
        return edge if without.priced_s > WORTH_THE_LINK * edge.priced_s else without

    if view.price is not None:
        return cheapest(view.price)
    beside_s = min(division.token_s for division in alone if not division.ahead)

    def highest(most: float) -> Division:
        """Return the division at the highest price at which a token takes `most` times `beside_s` or less."""
        slower = bisect.bisect_left(_PRICES, True, key=lambda price: cheapest(price).token_s > most * beside_s)
        return cheapest(_PRICES[max(0, slower - 1)])

    together = highest(1.0)
    return together if together.edge_pays else highest(ALONE)


def _divisions(view: VerifierView, price: float, *, edge_pays: bool) -> list[Division]:
    """Return all divisions with the edge or without it, and their costs; none with an edge that drafts nothing."""
    if edge_pays and view.drafting_s == math.inf:
        return []
    kinds = itertools.product([drafts for drafts in _LENGTHS if drafts <= view.max_drafts], (False, True))
    return [_with_costs(view, Division(drafts, ahead, edge_pays, price)) for drafts, ahead in kinds]


def _with_costs(view: VerifierView, division: Division) -> Division:
    """Return the division with its costs, by following runs that begin with a branch and runs that do not."""
    branched, *run = _run(view, division, 0)
    if branched and view.branch_drafts:
        warm_branched, *warm = _run(view, division, view.branch_drafts)
        share = branched / (1 - warm_branched + branched)  # of the runs that begin with a branch
        run = [cold + share * (warm - cold) for cold, warm in zip(run, warm, strict=True)]
    tokens, seconds, steps_s, here_s = run
    return replace(division, token_s=seconds / tokens, step_s=steps_s / tokens, here_s=here_s / tokens)


def _run(view: VerifierView, division: Division, head: int) -> tuple[float, ...]:
    """Follow a run from a miss to the next, which begins with the `head` drafts of a branch.

    Returns:
        Chance that a branch follows the miss at its end; expected tokens; seconds in all, of steps, of drafting here.
    """
    drafts, edge = division.drafts, division.edge_pays
    most = max(drafts, best_block(view))  # of what an edge has sent no more is verified
    branch_s = _BRANCHES * view.branch_drafts * view.drafting_s if edge else 0.0
    committed, now, left, survival = 0, 0.0, head, 1.0
    seconds = steps_s = here_s = branched = 0.0
    for _ in range(_MAX_STEPS):
        beyond = committed - head  # of the branch, which the edge need not draft any more
        here = max(_arrived(view, now, beyond) if edge else 0, left)
        wait_s = made_s = 0.0
        if here < drafts:
            lacking = drafts - here
            if division.waits_for_edge(lacking, beyond, now, view):
                wait_s = _edge_wait_s(view, beyond + drafts, now)
            else:
                made_s = lacking * view.here_s
                wait_s = view.sharing * made_s
            here = drafts
        block = min(here, most)
        step_s = view.step_s + (block + 1) * view.row_s + _AHEAD_S * division.ahead
        now += wait_s + step_s
        left = max(0, here - block - 1)
        missed = survival * (1 - view.acceptance ** (block + 1))
        if edge and block and view.branched:
            branched += missed * view.branched * min(1.0, _arrived(view, now - branch_s, beyond) / block)
        committed += block + 1
        if division.ahead and not (edge and _arrived(view, now, committed - head) >= drafts):
            made = max(0, min(drafts + 1, int(step_s / (view.sharing * view.here_s))) - left)
            made_s += made * view.here_s
            left += max(0, made - 1)
        seconds += survival * (wait_s + step_s)
        steps_s += survival * step_s
        here_s += survival * made_s
        survival -= missed
        if survival < _SURELY_OVER:
            break
    tokens = (1 - survival) / (1 - view.acceptance)  # of the run, as far as it was followed
    return branched, tokens, seconds, steps_s, here_s


def _arrived(view: VerifierView, now: float, committed: int) -> int:
    """Return how many drafts beyond `committed` have come from an edge whose chain lives since the last miss."""
    if now <= view.round_trip_s:
        return 0
    return max(0, min(_EDGE_WINDOW, int((now - view.round_trip_s) / view.drafting_s) - committed))


def _is_close(one: float, other: float) -> bool:
    return one == other or math.isclose(one, other, rel_tol=_LIKE, abs_tol=_LIKE_S)


def _rounded(value: float, grain: float) -> float:
    return round(value / grain) * grain


def _on_scale(seconds: float, per_octave: int = _PER_OCTAVE) -> float:
    """Round to the nearest part of an octave, so that wavering measurements give one plan."""
    if not _TINY_S <= seconds < math.inf:
        return seconds if seconds == math.inf else 0.0
    return math.exp2(round(math.log2(seconds) * per_octave) / per_octave)


# --- what a step takes ---

_OCTAVES = 10  # rows in a step: 1, 2 to 3, 4 to 7, … 512 and more
_DOUBT, _LEAST_WEIGHT = 0.1, 1e-3  # weights of steps: one counts half after 114 others, where it is above the curve
_STEP_FADE = 0.98  # at every step


@dataclass(slots=True)
class StepCost:
    """Seconds of a target step against its rows: a smoothed mean for each octave of rows, straight lines between.

    On a GPU the curve is flat up to hundreds of rows and then rises; on a CPU in float32 a few rows can cost as much as
    the first. The curve never falls: where a larger step was faster, both get their weighted mean (the pool of adjacent
    violators, Barlow et al. 1972). What lies above the curve counts the less, the longer it was not met, so that one
    slow step of a seldom number of rows does not make rows dear.
    """

    # Rows, seconds and weight by octave.

    rows: list[Smoothed] = field(default_factory=lambda: [Smoothed() for _ in range(_OCTAVES)])
    seconds_of: list[Smoothed] = field(default_factory=lambda: [Smoothed() for _ in range(_OCTAVES)])
    weights: list[float] = field(default_factory=lambda: [0.0] * _OCTAVES)

    def add(self, rows: int, seconds: float) -> None:
        """Count a step of `rows` rows that took `seconds`."""
        octave = min(_OCTAVES - 1, rows.bit_length() - 1)
        measured, of_rows = self.seconds_of[octave], self.rows[octave]
        curve, mean_rows, before = self._curve(), of_rows.value, measured.value
        of_rows.add(rows)
        measured.add(seconds)
        self.weights = [weight * _STEP_FADE for weight in self.weights]
        self.weights[octave] += 1
        # A machine gets faster or slower for all octaves: one that is not met any more must not keep the price of a bad
        # moment, which would keep it from ever being met again. That more rows take longer is no such change.
        if before > 0:
            before *= _along(curve, of_rows.value) / _along(curve, mean_rows)
            for other in self.seconds_of:
                if other is not measured:
                    other.value *= measured.value / before

    def seconds(self, rows: float) -> float:
        """Return the seconds of a step of `rows` rows; 0 before the first, along the last slope beyond the largest."""
        return _along(self._curve(), rows)

    def hoped_seconds(self, rows: float) -> float:
        """Return `seconds` of a step, but in proportion to its rows below the smallest that was met.

        Whoever hopes for such a step makes one, and knows then.
        """
        curve = self._curve()
        if curve and rows < curve[0][0]:
            return curve[0][1] * rows / curve[0][0]
        return _along(curve, rows)

    def _curve(self) -> list[tuple[float, float]]:
        """Return (rows, seconds) of each octave with measurements, fitted so that more rows never take less time."""
        pools: list[tuple[float, float, list[float]]] = []  # seconds, weight, and rows of its octaves
        for x, y, weight in zip(self.rows, self.seconds_of, self.weights, strict=True):
            if not x.seen:
                continue
            seconds, weight, octaves = y.value, max(weight, _LEAST_WEIGHT), [x.value]
            if pools and seconds > (below := pools[-1][0]):
                seconds = below + (seconds - below) * weight / (weight + _DOUBT)
            while pools and pools[-1][0] > seconds:
                below, its_weight, its_octaves = pools.pop()
                seconds = (below * its_weight + seconds * weight) / (its_weight + weight)
                weight, octaves = weight + its_weight, its_octaves + octaves
            pools.append((seconds, weight, octaves))
        return [(x, seconds) for seconds, _, octaves in pools for x in octaves]

    def line(self, sessions: int) -> tuple[float, float]:
        """Return base and seconds a row of every session, of the line through steps of one and of five such rows."""
        curve = self._curve()
        few, many = _along(curve, sessions), _along(curve, 5 * sessions)
        row_s = (many - few) / 4
        return max(0.1 * few, few - row_s), row_s


def _along(points: Sequence[tuple[float, float]], rows: float) -> float:
    """Return the seconds of `rows` rows on straight lines between points (rows, seconds); 0 where there are none."""
    if not points:
        return 0.0
    best = points[0][1]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if rows <= x0:
            break
        best = y1
        if rows <= x1 or (x1, y1) == points[-1]:
            best = y0 + (y1 - y0) * (rows - x0) / max(1e-9, x1 - x0)
            break
    return best
