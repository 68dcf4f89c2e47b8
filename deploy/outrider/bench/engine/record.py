"""The record of `outrider engine-bench`."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from outrider.bench.environment import Environment
from outrider.bench.record import RECORD, Count, Metric


@dataclass(frozen=True, slots=True, config=RECORD)
class StepParts:
    """Median times of a target step, ms.

    Attributes:
        forward_ms: the model's pass.
        products_ms: its linear layers.
        attention_ms: its attention over the KV cache.
        sampling_ms: from logits to tokens.
    """

    forward_ms: Metric
    products_ms: Metric
    attention_ms: Metric
    sampling_ms: Metric

    @property
    def rest_ms(self) -> float:
        """Rest of the pass: norms, activations, positions, Python."""
        return max(0.0, self.forward_ms - self.products_ms - self.attention_ms)

    @property
    def step_ms(self) -> float:
        """Pass and sampling."""
        return self.forward_ms + self.sampling_ms


@dataclass(frozen=True, slots=True, config=RECORD)
class StepComparison:
    """Steps of some sessions with some rows each.

    Attributes:
        plain: step with plain products.
        packed: step with the products that the calibration chose.
        forward_ratio: median over pairs of steps of the plain pass's time over the packed one's.
        generate_ms: step of transformers' `generate` for a batch of these sessions; None: it has no such step.
    """

    sessions: Count
    rows: Count
    plain: StepParts
    packed: StepParts
    forward_ratio: Metric
    generate_ms: Metric | None

    @property
    def name(self) -> str:
        """Sessions and rows in the form of the option."""
        return f"{self.sessions}x{self.rows}"


@dataclass(frozen=True, slots=True, config=RECORD)
class EngineRecord:
    """One measurement.

    Attributes:
        clock: clock of the times, `thread` (CPU time of the thread, for one thread of torch) or `wall`.
        context: tokens before the rows of each session.
        repetitions: steps of each kind.
        packed_shapes: shapes (out_features, in_features) of linear layers with packed weights.
        plain_shapes: shapes of the others.
        packed_bytes: size of the packed weights.
        rows_keep_bits: whether a row's product had the same bits beside 0 to 32 others.
    """

    environment: Environment
    clock: str
    context: Count
    repetitions: Count
    temperature: Metric
    packed_shapes: tuple[tuple[int, int], ...]
    plain_shapes: tuple[tuple[int, int], ...]
    packed_bytes: Count
    rows_keep_bits: bool
    results: tuple[StepComparison, ...]
