"""The summary of many schedules: what happened, how often each fault met each state, and what was found."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

from research.chaos.faults import IMPOSSIBLE, KINDS, PAIRS, State
from research.chaos.schedule import Schedule
from research.chaos.world import Violation

PART = 250  # schedules that a process is given at once


@dataclass(slots=True)
class ChaosSummary:
    """Summary of schedules that were run.

    Attributes:
        schedules: number of schedules.
        counts: events, texts, tokens and streams.
        coverage: faults by kind and by the state of the session that they met.
        found: what does not hold, by seed.
        slowest_s: longest time from the last fault to the end of the last session, in virtual seconds.
        slowest: seed of that schedule.
        seconds: processor time.
    """

    schedules: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    coverage: Counter[tuple[str, State]] = field(default_factory=Counter)
    found: dict[int, str] = field(default_factory=dict)
    slowest_s: float = 0.0
    slowest: int = 0
    seconds: float = 0.0

    def add(self, other: ChaosSummary) -> None:
        """Add what other schedules have shown."""
        self.schedules += other.schedules
        self.counts += other.counts
        self.coverage += other.coverage
        self.found |= other.found
        self.seconds += other.seconds
        if other.slowest_s > self.slowest_s:
            self.slowest_s, self.slowest = other.slowest_s, other.slowest

    @property
    def missed(self) -> list[tuple[str, State]]:
        """Pairs of a fault and a state that can meet and have not."""
        return [pair for pair in PAIRS if not self.coverage[pair]]

    def lines(self) -> Iterable[str]:
        """Yield the summary for people."""
        counts = self.counts
        yield (
            f"{self.schedules} schedules, {counts['events']} events, {counts['turns']} turns of "
            f"{counts['tokens']} tokens, {counts['streams']} streams, {self.coverage.total()} faults, "
            f"{self.seconds:.0f} s of processor time"
        )
        yield (
            f"{counts['left for silence']} streams left because their verifier was silent, "
            f"{counts['fenced frames']} late frames fenced"
        )
        yield f"the slowest session ended {self.slowest_s:.1f} s after the last fault (seed {self.slowest})"
        yield "".join([f"{'fault':12}", *(f"{state:>12}" for state in State)])
        for kind in KINDS:
            cells = ("-" if (kind, state) in IMPOSSIBLE else str(self.coverage[kind, state]) for state in State)
            yield "".join([f"{kind:12}", *(f"{cell:>12}" for cell in cells)])
        for seed, what in sorted(self.found.items()):
            yield f"seed {seed}: {what}"
        if self.found:
            yield f"replay one with: python -m research.chaos --seed {min(self.found)}"


def run_schedules(first: int, count: int, kinds: Sequence[str] = ()) -> ChaosSummary:
    """Run schedules one after the other, from seed `first` on, with faults of `kinds` alone; empty: of all kinds."""
    summary, began = ChaosSummary(), time.process_time()
    for seed in range(first, first + count):
        schedule = Schedule(seed, kinds)
        try:
            schedule.run()
        except (Exception, Violation) as error:  # whatever shipped code raises is a finding
            summary.found[seed] = f"{type(error).__name__}: {error}"
        summary.schedules += 1
        summary.counts += schedule.world.counts
        summary.counts["events"] += schedule.world.clock.num_events
        summary.coverage += schedule.coverage
        if schedule.slowest_s > summary.slowest_s:
            summary.slowest_s, summary.slowest = schedule.slowest_s, seed
    summary.seconds = time.process_time() - began
    return summary


def run_in_processes(first: int, count: int, kinds: Sequence[str] = (), *, processes: int) -> ChaosSummary:
    """Run schedules like `run_schedules`, in several processes at once."""
    if processes == 1:
        return run_schedules(first, count, kinds)
    total = ChaosSummary()
    starts = range(first, first + count, PART)
    counts = [min(PART, first + count - start) for start in starts]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for part in pool.map(run_schedules, starts, counts, [kinds] * len(counts)):
            total.add(part)
    return total
