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
    """

    name: str
    sessions: Count
    rows: Count
    context: Count
    turns: Count
    engines: Mapping[str, EngineTimes]
    parts: StepParts | None = None


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
