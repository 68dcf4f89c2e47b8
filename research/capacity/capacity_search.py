"""The most sessions that a verifier holds: found by repeated trials, for each way of dividing the drafting."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from outrider.deploy.link.shape import LinkShape
from research.capacity.capacity_record import HeldSessions, StepModel
from research.replay.crowd import LENGTHS, Load, load_of
from research.replay.hit_traces import HitTrace
from research.replay.lengths import colocated
from research.replay.traced import Policy
from research.simulator.clock import Costs

PRECISION = 8  # sizes that are tried differ by this part, and by 1 below this number
CONFIRMED = 1  # sizes beyond the one that failed, of which none may be held
MIN_SECONDS = 1.5  # that a trial measures, however many its sessions are


@dataclass(frozen=True, slots=True)
class Bounds:
    """Conditions under which sessions count as held.

    Attributes:
        gap_s: longest 95th percentile of the time between tokens, in seconds.
        pace_s: longest mean time a token of a session, in seconds; infinite: any.
        max_sessions: sessions beyond which none are tried.
        seconds: time that a trial measures, of all sessions together.
        seeds: number of searches, in which sessions begin at other moments with other texts.
    """

    gap_s: float
    pace_s: float
    max_sessions: int
    seconds: float
    seeds: int = 1

    def hold(self, load: Load) -> bool:
        """Return whether the sessions of a trial are held."""
        return load.gap_p95_s <= self.gap_s and load.tokens_per_second * self.pace_s >= 1

    def trial_s(self, sessions: int) -> float:
        """Return the time that a trial measures, in seconds."""
        return max(MIN_SECONDS, self.seconds / sessions)


def sizes_to(limit: int) -> list[int]:
    """Return the numbers of sessions that are tried, from 1 to `limit`."""
    sizes = [1]
    while sizes[-1] < limit:
        sizes.append(min(limit, sizes[-1] + max(1, sizes[-1] // PRECISION)))
    return sizes


def most_sessions(held: Callable[[int], bool], limit: int, guess: int = 1) -> int:
    """Return the most sessions that are held, of the sizes up to `limit`; 0: not even one.

    More sessions are harder to hold, but a single trial may fail or succeed by chance. So the answer is bracketed
    around the guess, the bracket halved, and the answer confirmed: of the next sizes above it none is held.
    """
    sizes = sizes_to(limit)
    tried: dict[int, bool] = {}

    def holds(i: int) -> bool:
        if i not in tried:
            tried[i] = held(sizes[i])
        return tried[i]

    low = min(range(len(sizes)), key=lambda i: abs(sizes[i] - guess))
    if not holds(low):
        low = _down(holds, low)
    while True:
        low = _up(holds, low, len(sizes))
        further = [i for i in range(low + 2, min(len(sizes), low + 2 + CONFIRMED)) if holds(i)]
        if not further:
            return sizes[low] if low >= 0 else 0
        low = further[-1]


def _down(holds: Callable[[int], bool], low: int) -> int:
    """Return the index of a size that is held, below one that is not, in steps that double; -1: none was found."""
    step = 1
    while low >= 0 and not holds(low):
        low, step = low - step, 2 * step
    return max(-1, low)


def _up(holds: Callable[[int], bool], low: int, end: int) -> int:
    """Return the index, below `end`, of a size that is held before one that is not, from the held `low` on."""
    step = 1
    while low + step < end and holds(low + step):
        low, step = low + step, 2 * step
    high = min(low + step, end)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


class Search:
    """Capacities on one recording.

    Args:
        traces: recorded texts of one drafter.
        costs: measured costs of the machines.
        bounds: conditions.
    """

    def __init__(self, traces: Sequence[HitTrace], costs: Costs, bounds: Bounds) -> None:
        self._traces = traces
        self._costs = costs
        self._bounds = bounds

    def capacities(
        self,
        model: StepModel,
        drafting_ms: float,
        threads: Sequence[int],
        rtts_ms: Sequence[float],
        modes: Sequence[str],
    ) -> Iterator[HeldSessions]:
        """Yield the capacity of each mode, for each number of the verifier's threads and each round trip.

        No round trip makes a difference to what waits for no edge, and no thread to what needs none.
        """
        costs = self._costs_of(model, drafting_ms)
        cell = functools.partial(HeldSessions, steps=model.name, drafting_ms=drafting_ms)
        if "cloud" in modes:
            yield self._found(cell(mode="cloud", threads=0, rtt_ms=None), costs, Policy(drafting=False))
        if "edge" in modes:
            yield from self._over_links(cell(mode="edge", threads=0, rtt_ms=None), rtts_ms, costs, Policy())
        for number in threads:
            if "colocated" in modes:
                beside = cell(mode="colocated", threads=number, rtt_ms=None)
                yield self._colocated(beside, costs)
            if "outrider" in modes:
                both = cell(mode="outrider", threads=number, rtt_ms=None)
                yield from self._over_links(both, rtts_ms, costs, Policy(here=True))

    def _costs_of(self, model: StepModel, drafting_ms: float) -> Costs:
        steps = {f"{name}_s": getattr(model, f"{name}_ms") / 1e3 for name in ("step", "row", "min_step")}
        return replace(self._costs.with_drafting(drafting_ms / 1e3), **steps)

    def _over_links(
        self, cell: HeldSessions, rtts_ms: Sequence[float], costs: Costs, policy: Policy
    ) -> Iterator[HeldSessions]:
        """Yield the cell at each round trip, whose capacity is a guess at the next one's."""
        guess = 1
        for rtt_ms in rtts_ms:
            found = self._found(replace(cell, rtt_ms=rtt_ms), costs, policy, guess)
            guess = max(1, found.sessions)
            yield found

    def _colocated(self, cell: HeldSessions, costs: Costs) -> HeldSessions:
        """Return the cell at the number of drafts before every step that holds most sessions, in one search each."""
        guess, tried = 1, {}
        for length in LENGTHS:
            tried[length], _ = self._searched(cell, costs, colocated(length), 0, guess)
            guess = max(1, tried[length])
        best = max(tried, key=lambda length: tried[length])
        return self._found(replace(cell, drafts_here=best), costs, colocated(best), max(1, tried[best]))

    def _found(self, cell: HeldSessions, costs: Costs, policy: Policy, guess: int = 1) -> HeldSessions:
        """Return the cell with its capacity, the median of all searches, and with the load at it."""
        searches: list[tuple[int, Mapping[int, Load]]] = []
        for seed in range(self._bounds.seeds):
            searches.append(self._searched(cell, costs, policy, seed, guess))
            guess = max(1, searches[0][0])
        searches.sort(key=lambda search: search[0])
        sessions, loads = searches[(len(searches) - 1) // 2]
        cell = replace(cell, sessions=sessions, low=searches[0][0], high=searches[-1][0])
        if not sessions:
            return cell
        load = loads[sessions]
        return replace(
            cell,
            gap_p95_ms=_short(1e3 * load.gap_p95_s),
            tokens_per_second=_short(load.tokens_per_second),
            steps_per_token=_short(load.steps_per_token),
            rows_per_token=_short(load.rows_per_token),
            cloud_drafting_ms_per_token=_short(1e3 * load.cloud_drafting_s),
            edge_drafting_ms_per_token=_short(1e3 * load.edge_drafting_s),
        )

    def _searched(
        self, cell: HeldSessions, costs: Costs, policy: Policy, seed: int, guess: int
    ) -> tuple[int, Mapping[int, Load]]:
        """Return the capacity that one search finds, and the load of each number of sessions that it tried."""
        loads: dict[int, Load] = {}

        def held(sessions: int) -> bool:
            loads[sessions] = load_of(
                self._traces,
                costs,
                policy,
                sessions=sessions,
                links=(LinkShape((cell.rtt_ms or 0.0) / 1e3),),
                threads=cell.threads,
                seconds=self._bounds.trial_s(sessions),
                seed=seed,
            )
            return self._bounds.hold(loads[sessions])

        return most_sessions(held, self._bounds.max_sessions, guess), loads


def _short(value: float) -> float:
    """Return the value with four digits."""
    return float(f"{value:.4g}")
