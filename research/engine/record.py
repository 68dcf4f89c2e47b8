"""The record of `python -m research engine`."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic.dataclasses import dataclass

from outrider.bench.environment import Environment
from outrider.bench.record import RECORD, Count, Metric

OURS, LIBRARY = "outrider", "transformers"


@dataclass(frozen=True, slots=True, config=RECORD)
class StepParts:
    """Times of one of our steps by part, ms.

    Attributes:
        forward_ms: the model's pass, median.
        products_ms: share of products by weights in it.
        attention_ms: share of attention, with the KV cache.
        operators_ms: share of all other operators.
        python_ms: share of the time in no operator.
        operator_calls: operators called in the pass.
        sampling_ms: from logits to tokens, median.
        planning_ms: between two steps of the engine with all sessions and at least half of the rows, for events, plans
            and commits, median; None: not measured.
    """

    forward_ms: Metric
    products_ms: Metric
    attention_ms: Metric
    operators_ms: Metric
    python_ms: Metric
    operator_calls: Count
    sampling_ms: Metric
    planning_ms: Metric | None

    @property
    def step_ms(self) -> float:
        """Whole step of the engine."""
        return self.forward_ms + self.sampling_ms + (self.planning_ms or 0.0)


@dataclass(frozen=True, slots=True, config=RECORD)
class LearningCost:
    """Cost of keeping lessons: two engines take turns, of which one does.

    Attributes:
        step_ratio: median over turns of the mean step's time, by the wall clock, with lessons over that without.
        cpu_ratio: the same of the process's CPU time for the whole texts, the collector's thread included.
        engine_share: CPU time of lessons in the engine's thread, as they measure it, over the steps' time.
        thread_share: the same of the collector's thread.
        positions: positions that were kept.
        turns: turns of each engine.
    """

    step_ratio: Metric
    cpu_ratio: Metric
    engine_share: Metric
    thread_share: Metric
    positions: Count
    turns: Count


@dataclass(frozen=True, slots=True, config=RECORD)
class RowPrices:
    """Times of a further row of a session in a step, pass and sampling, medians of what it adds; noise may exceed them.

    Attributes:
        context: tokens before the rows.
        chain_ms: a row of the chain.
        branch_ms: a row that is a branch.
    """

    context: Count
    chain_ms: float
    branch_ms: float

    @property
    def ratio(self) -> float | None:
        """Rows of the chain that are as dear as a branch; None: noise exceeds what a row of the chain adds."""
        return self.branch_ms / self.chain_ms if self.chain_ms > 0 else None


@dataclass(frozen=True, slots=True, config=RECORD)
class EngineTimes:
    """Steps of one engine.

    Attributes:
        step_ms: from tokens to tokens, median.
        ratio: median over turns of its time over ours in the same turn.
    """

    step_ms: Metric
    ratio: Metric


@dataclass(frozen=True, slots=True, config=RECORD)
class CaseResult:
    """The steps of all engines for some sessions with some rows each.

    Attributes:
        name: the step in the form of the option, or `prefill TOKENS`.
        context: tokens before the rows of each session.
        turns: turns of each engine that count.
        engines: times by engine, ours (pass and sampling) first.
        parts: parts of our step; None: not measured.
        learning: cost of keeping lessons; None: not measured.
        prices: times of its rows; None: it has no branches.
    """

    name: str
    sessions: Count
    rows: Count
    context: Count
    turns: Count
    engines: Mapping[str, EngineTimes]
    parts: StepParts | None = None
    learning: LearningCost | None = None
    prices: RowPrices | None = None


@dataclass(frozen=True, slots=True, config=RECORD)
class EngineRecord:
    """One measurement.

    Attributes:
        clock: clock of the times, `cpu` (CPU time of the thread) or `wall`.
        packed_shapes: shapes (out_features, in_features) of linear layers with packed weights.
        plain_shapes: shapes of the others.
        packed_bytes: size of the packed weights.
        rows_keep_bits: whether a row of the served target keeps its bits whatever shares its pass.
    """

    environment: Environment
    clock: str
    temperature: Metric
    packed_shapes: tuple[tuple[int, int], ...]
    plain_shapes: tuple[tuple[int, int], ...]
    packed_bytes: Count
    rows_keep_bits: bool
    results: tuple[CaseResult, ...]
