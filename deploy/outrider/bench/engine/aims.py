"""The aims of our steps on a CPU, beside what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from outrider.bench.engine.peer import LLAMA_IN_8_BITS
from outrider.bench.engine.record import OURS, EngineRecord

_ONE_ROW = 1.2


@dataclass(frozen=True, slots=True)
class Aim:
    """One aim.

    Attributes:
        text: the two times that are compared.
        ratio: the first over the second, as measured.
        at_most: the ratio aimed at.
    """

    text: str
    ratio: float
    at_most: float

    @property
    def reached(self) -> bool:
        """Whether the ratio is no larger than what is aimed at."""
        return self.ratio <= self.at_most


def aims(record: EngineRecord) -> Iterator[Aim]:
    """Yield the aims: each step against the quickest other engine of our precision, and what lessons cost."""
    for result in record.results:
        name = f"{result.name} after {result.context}" if result.context else result.name
        others = {engine: times for engine, times in result.engines.items() if engine not in (OURS, LLAMA_IN_8_BITS)}
        if others:
            quickest = max(others, key=lambda engine: 1 / others[engine].ratio)
            one_row = result.sessions == result.rows == 1
            yield Aim(f"{name} / {quickest}", 1 / others[quickest].ratio, _ONE_ROW if one_row else 1.0)
        if (cost := result.learning) is not None:
            yield Aim(f"{name}, lessons kept / not, wall clock", cost.step_ratio, 1.02)
            yield Aim(f"{name}, lessons kept / not, CPU time", cost.cpu_ratio, 1.02)
            yield Aim(f"{name}, lessons / step, CPU time", cost.engine_share + cost.thread_share, 0.02)
