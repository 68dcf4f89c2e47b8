"""Division of drafting between an edge and a drafter beside the target.

With shared noise either end proposes the same tokens, so the question is who drafts. After a miss the edge's next
drafts arrive a round trip later, at no cost to the cloud; the drafter beside the target has its own at once, on cores
that others may need. A second of its drafting has a price in seconds of waiting, and a session minimises

    seconds a token + price * seconds of drafting here a token.

Unless it is set, the price is the highest of `_PRICES` at which a token takes no more of its time than with a drafter
beside the target alone, which waits for its drafts before every step and rests during it; where the edge takes no part,
at most `ALONE` of that time, since there is nothing to win for it. It is 0 where none is so high.
Sessions share steps and the threads that draft, and all wait for what one of them takes. So each divides as if all did
as it does: a row takes the time of a row of every session, and a draft here that of all jobs which share its thread.
With goal efficiency waiting is free, and cloud work a token is minimised: seconds of target steps and of drafting here.

Between two misses only the end of the run is random: a step with d drafts is survived with probability a^(d+1). So the
course of a run is known but for its end, and `_run` follows it: tokens committed, the edge's arrivals, the drafts that
are left. Where a branch of the edge follows the miss (`policy.likely_branches`), the next run begins with its drafts;
so runs are of two kinds, and the costs are theirs in the stationary shares. `division_of` computes them for each
number of drafts that a step could wait for, with and without drafting here while the target steps, with and without
the edge, and takes the cheapest. A chain is given up where it has become hopeless (`Window` has the same rule for the
edge); the costs leave that out.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from outrider.proto.policy.patience import WORTH_THE_LINK
from outrider.proto.types import Goal

ALONE = 0.97  # replayed: 3 % faster on links beyond a step, for a tenth more drafting here
_PRICES = (0.0, 0.2, 0.5, 1.0, 1.5, 2.5, 4.0, 7.0, math.inf)
_LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
_DEAREST = 1e3  # stands for an infinite price
_AHEAD_S = 0.0013  # of a step beside which the verifier drafts: target and drafter share one interpreter
_EDGE_WINDOW = 64  # drafts that an edge has in flight at most
_MAX_STEPS = 32  # of a run that is followed
_BRANCHES = 2  # drafted before the one that is taken
_SURELY_OVER = 1e-3
_LIKE, _LIKE_ACCEPTANCE, _LIKE_BRANCHED = 0.15, 0.04, 0.08  # differences that change no division
_LIKE_S = 2e-5
_QUICKEST_S = 1e-6  # of a drafted token; an edge may report anything above 0
_PER_OCTAVE = 6  # resolution of times: they waver, and the division must not


@dataclass(frozen=True, slots=True)
class EndsView:
    """Knowledge of both ends of a session; times in seconds.

    Attributes:
        acceptance: chance that a draft agrees, given that all before it did.
        step_s: time of a step beside its rows.
        row_s: time of a row of every session in the step.
        max_drafts: most drafts of a step.
        edge_s: time of a drafted token at the edge; infinite: it drafts nothing.
        round_trip_s: time from a commit to its answer, without drafting.
        here_s: time of a drafted token beside the target.
        sharing: sessions at a thread of such drafting at once; each waits for the drafts of those before it, too.
        branched: share of misses whose branch the edge has sent in time, where its chain had come in time.
        branch_drafts: drafts of such a branch.
        price: seconds of waiting that a second of drafting here is worth; None: as the module says.
    """

    acceptance: float
    step_s: float
    row_s: float
    max_drafts: int
    edge_s: float
    round_trip_s: float
    here_s: float
    sharing: float = 1.0
    branched: float = 0.0
    branch_drafts: int = 0
    price: float | None = None
    goal: Goal = Goal.LATENCY

    def is_like(self, other: EndsView) -> bool:
        """Return whether no measurement differs so much that another division could be better."""
        mine, theirs = (
            (view.step_s, view.row_s, view.edge_s, view.round_trip_s, view.here_s, view.here_s * view.sharing)
            for view in (self, other)
        )
        close = all(map(_is_close, mine, theirs)) and abs(self.acceptance - other.acceptance) < _LIKE_ACCEPTANCE
        close = close and abs(self.branched - other.branched) < _LIKE_BRANCHED
        same = (self.max_drafts, self.branch_drafts, self.price, self.goal)
        return close and same == (other.max_drafts, other.branch_drafts, other.price, other.goal)


@dataclass(frozen=True, slots=True)
class ExpectedCosts:
    """Expected seconds a token: in all, in target steps, and in drafting beside the target."""

    token_s: float
    step_s: float
    here_s: float


_NO_COSTS = ExpectedCosts(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Division:
    """A division of drafting between the two ends.

    Attributes:
        drafts: drafts that a step waits for.
        ahead: whether the verifier drafts while its target steps.
        edge_pays: whether the edge's drafts are worth making and sending.
        price: seconds of waiting that a second of drafting here is worth.
        costs: costs that follow.
    """

    drafts: int
    ahead: bool
    edge_pays: bool
    price: float
    costs: ExpectedCosts

    @property
    def priced_s(self) -> float:
        """Seconds a token, drafting here included at its price."""
        return self.costs.token_s + min(self.price, _DEAREST) * self.costs.here_s

    def waits_for_edge(self, lacking: int, committed: int, since_miss_s: float, view: EndsView) -> bool:
        """Return whether it is cheaper to wait for the edge's drafts than to make the `lacking` ones here.

        Args:
            lacking: drafts that a step waits for and that are not here.
            committed: tokens committed since the last miss.
            since_miss_s: time since the commit that held the miss, in seconds.
            view: knowledge of both ends.
        """
        if not self.edge_pays:
            return False
        wait_s = edge_wait_s(committed + self.drafts, view.round_trip_s, view.edge_s, since_miss_s)
        return not is_overdue(wait_s) and wait_s < (view.sharing + self.price) * lacking * view.here_s


def edge_wait_s(drafts: int, round_trip_s: float, edge_s: float, since_miss_s: float) -> float:
    """Return the time until the edge's `drafts` drafts since the last miss are here, in seconds; below 0: since then.

    Args:
        drafts: drafts, those that have been committed included.
        round_trip_s: time from a commit to its answer, without drafting.
        edge_s: time of a drafted token at the edge.
        since_miss_s: time since the commit that held the miss.
    """
    return round_trip_s + drafts * edge_s - since_miss_s


def is_overdue(wait_s: float, late_s: float = 0.0) -> bool:
    """Return whether drafts due in `wait_s` are late by `late_s` or more: the edge may have stopped before them."""
    return wait_s <= -late_s


def division_of(view: EndsView) -> Division:
    """Return the division between the two ends, as the module says."""
    return _division_of(
        replace(
            view,
            acceptance=round(view.acceptance * 25) / 25,
            step_s=_coarse(view.step_s),
            row_s=_coarse(view.row_s),
            edge_s=max(_QUICKEST_S, _coarse(view.edge_s)),
            round_trip_s=_coarse(view.round_trip_s),
            here_s=max(_QUICKEST_S, _coarse(view.here_s)),
            sharing=_coarse(view.sharing),
            branched=round(view.branched * 10) / 10,
        )
    )


@lru_cache(maxsize=1024)
def _division_of(view: EndsView) -> Division:
    alone = [_with_costs(view, Division(*kind, False, 0.0, _NO_COSTS)) for kind in _kinds(view)]
    if view.goal is Goal.EFFICIENCY:
        divisions = [*alone, *_with_edge(view, math.inf)]
        return min(divisions, key=lambda division: division.costs.step_s + division.costs.here_s)

    @cache
    def cheapest(price: float) -> Division:
        return _cheapest([replace(division, price=price) for division in alone], _with_edge(view, price))

    if view.price is not None:
        return cheapest(view.price)
    beside_s = min(division.costs.token_s for division in alone if not division.ahead)

    def highest(most: float) -> Division:
        """Return the division at the highest price at which a token takes at most that share of `beside_s`."""
        slower = bisect.bisect_left(_PRICES, True, key=lambda price: cheapest(price).costs.token_s > most * beside_s)
        return cheapest(_PRICES[max(0, slower - 1)])

    together = highest(1.0)
    return together if together.edge_pays else highest(ALONE)


def _cheapest(alone: Sequence[Division], together: Sequence[Division]) -> Division:
    """Return the division of the lowest priced time; the edge takes part only where that makes a difference."""
    without = min(alone, key=lambda division: division.priced_s)
    edge = min(together, key=lambda division: division.priced_s, default=without)
    return edge if without.priced_s > WORTH_THE_LINK * edge.priced_s else without


def _with_edge(view: EndsView, price: float) -> list[Division]:
    if view.edge_s == math.inf:
        return []
    return [_with_costs(view, Division(*kind, True, price, _NO_COSTS)) for kind in _kinds(view)]


def _kinds(view: EndsView) -> Iterator[tuple[int, bool]]:
    """Yield the drafts that a step may wait for, with whether the verifier drafts meanwhile."""
    return itertools.product([drafts for drafts in _LENGTHS if drafts <= view.max_drafts], (False, True))


@dataclass(frozen=True, slots=True)
class _Run:
    """A run from a miss to the next: expected tokens, seconds in all, of steps and of drafting here.

    Attributes:
        branched: chance that a branch follows the miss at its end.
    """

    tokens: float
    seconds: float
    steps_s: float
    here_s: float
    branched: float


def _with_costs(view: EndsView, division: Division) -> Division:
    """Return the division with its costs, by following runs that begin with a branch and runs that do not."""
    run = _run(view, division, 0)
    if not (run.branched and view.branch_drafts):
        costs = ExpectedCosts(run.seconds / run.tokens, run.steps_s / run.tokens, run.here_s / run.tokens)
        return replace(division, costs=costs)
    warm = _run(view, division, view.branch_drafts)
    share = run.branched / (1 - warm.branched + run.branched)  # of the runs that begin with a branch

    def mean(cold: float, warm: float) -> float:
        return cold + share * (warm - cold)

    tokens = mean(run.tokens, warm.tokens)
    return replace(
        division,
        costs=ExpectedCosts(
            mean(run.seconds, warm.seconds) / tokens,
            mean(run.steps_s, warm.steps_s) / tokens,
            mean(run.here_s, warm.here_s) / tokens,
        ),
    )


def _run(view: EndsView, division: Division, head: int) -> _Run:
    """Follow a run that begins with the `head` drafts of a branch."""
    drafts, edge = division.drafts, division.edge_pays
    branch_s = _BRANCHES * view.branch_drafts * view.edge_s if edge else 0.0
    committed, now, left, survival = 0, 0.0, head, 1.0
    seconds = steps_s = here_s = branched = 0.0
    for _ in range(_MAX_STEPS):
        beyond = committed - head  # of the branch, which the edge need not draft any more
        here = max(_arrived(view, now, beyond) if edge else 0, left)
        wait_s = made_s = 0.0
        if here < drafts:
            lacking = drafts - here
            if division.waits_for_edge(lacking, beyond, now, view):
                wait_s = edge_wait_s(beyond + drafts, view.round_trip_s, view.edge_s, now)
            else:
                made_s = lacking * view.here_s
                wait_s = view.sharing * made_s
            here = drafts
        block = min(here, view.max_drafts)
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
    return _Run(tokens, seconds, steps_s, here_s, branched)


def _arrived(view: EndsView, now: float, committed: int) -> int:
    """Return how many drafts beyond `committed` have come from an edge whose chain lives since the last miss.

    `committed` is below 0 where the edge had drafts of a branch at the miss, which `committed` counts from.
    """
    if now <= view.round_trip_s:
        return 0
    return max(0, min(_EDGE_WINDOW, int((now - view.round_trip_s) / view.edge_s) - committed))


def _is_close(one: float, other: float) -> bool:
    return one == other or math.isclose(one, other, rel_tol=_LIKE, abs_tol=_LIKE_S)


def _coarse(seconds: float) -> float:
    if not 1e-6 < seconds < math.inf:
        return seconds if seconds == math.inf else 0.0
    return math.exp2(round(math.log2(seconds) * _PER_OCTAVE) / _PER_OCTAVE)
