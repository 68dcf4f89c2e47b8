"""The most sessions that a verifier holds: found by trials, for each way of dividing the drafting."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from outrider.bench.capacity.crowd import Load, load_of
from outrider.bench.capacity.record import HeldSessions, StepModel
from outrider.bench.replay.optimum import colocated
from outrider.bench.replay.traced import Policy
from outrider.bench.replay.traces import HitTrace
from outrider.bench.simulator.clock import Costs

LENGTHS = (1, 2, 3, 4, 6, 8)  # of co-located drafting; without drafts it is cloud streaming
PRECISION = 16  # a capacity is exact to this part of it, and below this number


@dataclass(frozen=True, slots=True)
class Bounds:
    """Conditions under which sessions count as held.

    Attributes:
        gap_s: longest 95th percentile of the time between tokens, in seconds.
        pace_s: longest mean time a token of a session, in seconds; infinite: any.
        max_sessions: sessions beyond which none are tried.
        seconds: time that a trial measures.
    """

    gap_s: float
    pace_s: float
    max_sessions: int
    seconds: float

    def hold(self, load: Load) -> bool:
        """Return whether the sessions of a trial are held."""
        return load.gap_p95_s <= self.gap_s and load.tokens_per_second * self.pace_s >= 1


def most_sessions(held: Callable[[int], bool], limit: int) -> int:
    """Return the most sessions that are held, where more sessions are harder to hold: 0 to `limit`."""
    low, high = 0, 1
    while high <= limit and held(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > max(1, low // PRECISION):
        middle = (low + high) // 2
        low, high = (middle, high) if held(middle) else (low, middle)
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
        self, model: StepModel, drafting_ms: float, threads: Sequence[int], rtts_ms: Sequence[float]
    ) -> Iterator[HeldSessions]:
        """Yield the capacity of each mode, for each number of the verifier's threads and each round trip.

        No round trip makes a difference to what waits for no edge, and no thread to what needs none.
        """
        costs = self._costs_of(model, drafting_ms)
        cell = functools.partial(HeldSessions, steps=model.name, drafting_ms=drafting_ms)
        yield self._found(cell(mode="cloud", threads=0, rtt_ms=None, sessions=0), costs, Policy(drafting=False))
        for rtt_ms in rtts_ms:
            yield self._found(cell(mode="edge", threads=0, rtt_ms=rtt_ms, sessions=0), costs, Policy())
        for number in threads:
            beside = cell(mode="colocated", threads=number, rtt_ms=None, sessions=0)
            tried = [self._found(replace(beside, drafts_here=n), costs, colocated(n)) for n in LENGTHS]
            yield max(tried, key=lambda capacity: capacity.sessions)
            for rtt_ms in rtts_ms:
                both = cell(mode="outrider", threads=number, rtt_ms=rtt_ms, sessions=0)
                yield self._found(both, costs, Policy(here=True))

    def _costs_of(self, model: StepModel, drafting_ms: float) -> Costs:
        steps = {f"{name}_s": getattr(model, f"{name}_ms") / 1e3 for name in ("step", "row", "min_step")}
        return replace(self._costs.with_drafting(drafting_ms / 1e3), **steps)

    def _found(self, cell: HeldSessions, costs: Costs, policy: Policy) -> HeldSessions:
        """Return the cell with its capacity, and with the load at it."""
        loads: dict[int, Load] = {}

        def held(sessions: int) -> bool:
            loads[sessions] = load_of(
                self._traces,
                costs,
                policy,
                sessions=sessions,
                rtt_s=(cell.rtt_ms or 0.0) / 1e3,
                threads=cell.threads,
                seconds=self._bounds.seconds,
            )
            return self._bounds.hold(loads[sessions])

        sessions = most_sessions(held, self._bounds.max_sessions)
        if not sessions:
            return cell
        load = loads[sessions]
        return replace(
            cell,
            sessions=sessions,
            gap_p95_ms=1e3 * load.gap_p95_s,
            tokens_per_second=load.tokens_per_second,
            steps_per_token=load.steps_per_token,
            rows_per_token=load.rows_per_token,
            cloud_drafting_ms_per_token=1e3 * load.cloud_drafting_s,
            edge_drafting_ms_per_token=1e3 * load.edge_drafting_s,
        )
