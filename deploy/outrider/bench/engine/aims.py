"""The aims of our steps on a CPU, beside what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from outrider.bench.engine.peer import LLAMA, VLLM, VLLM_COMPILED
from outrider.bench.engine.record import GENERATE, OURS, CaseResult, EngineRecord


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
    """Yield the aims for which the record has both times."""
    cases = {result.name: result for result in record.results}
    if one := cases.get("1x1"):
        yield from _beside(one, LLAMA, 1.5)
        yield from _beside(one, GENERATE, 0.7)
        if (five := cases.get("1x5")) and record.environment.dtype == "bfloat16":
            yield Aim("1x5 / 1x1", five.engines[OURS].step_ms / one.engines[OURS].step_ms, 1.2)
    for result in record.results:
        if result.learning is not None:
            cost = result.learning
            yield Aim(f"{result.name}, lessons kept / not, wall clock", cost.step_ratio, 1.02)
            yield Aim(f"{result.name}, lessons kept / not, CPU time", cost.cpu_ratio, 1.02)
            yield Aim(f"{result.name}, lessons / step, CPU time", cost.engine_share + cost.thread_share, 0.02)
    if sixteen := cases.get("16x1"):
        for engine in (VLLM, VLLM_COMPILED):
            if theirs := sixteen.engines.get(engine):
                # Its step plans and commits, too.
                yield Aim(f"16x1, with planning / {engine}", sixteen.parts.step_ms / theirs.step_ms, 1.0)


def _beside(result: CaseResult, engine: str, at_most: float) -> Iterator[Aim]:
    if theirs := result.engines.get(engine):
        yield Aim(f"{result.name} / {engine}", 1 / theirs.ratio, at_most)
