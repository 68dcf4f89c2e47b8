"""The table of `outrider engine-bench`, for a terminal of 100 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group

from outrider.bench.engine.record import EngineRecord, StepComparison, StepParts
from outrider.bench.table import UNKNOWN, Grid, draw, number

HEADINGS = ("sessions x rows", "weights", "forward", "products", "attention", "rest", "sampling", "ratio", "generate")
LEGEND = (
    "ms, medians; forward: the model's pass, which consists of products (linear layers), attention and rest; ratio: "
    "the plain pass's time over the packed one's, median of pairs; generate: step of transformers' `generate` for a "
    "batch of these sessions, which has one row each"
)


def table(record: EngineRecord) -> Group:
    """Return plain and packed steps in turn, for each number of sessions and rows."""
    kept = "keep" if record.rows_keep_bits else "do not keep"
    caption = (
        f"{len(record.packed_shapes)} of {len(record.packed_shapes) + len(record.plain_shapes)} shapes packed, "
        f"{record.packed_bytes / 2**20:.0f} MiB; rows {kept} their bits beside others"
    )
    title = f"Steps of {record.environment.target}, {record.environment.dtype}, context {record.context}"
    grids = [Grid(title, HEADINGS, 2, [_block(result) for result in record.results], caption)]
    return draw(grids, f"{LEGEND}; {_clock(record.clock)}")


def _clock(clock: str) -> str:
    return "CPU time of the thread" if clock == "thread" else "wall clock"


def _block(result: StepComparison) -> Sequence[Sequence[str]]:
    return (
        _row(result.name, "plain", result.plain, UNKNOWN, number(result.generate_ms, 2)),
        _row("", "packed", result.packed, number(result.forward_ratio, 2), ""),
    )


def _row(name: str, weights: str, parts: StepParts, ratio: str, generate: str) -> Sequence[str]:
    times = (parts.forward_ms, parts.products_ms, parts.attention_ms, parts.rest_ms, parts.sampling_ms)
    return (name, weights, *(number(time, 2) for time in times), ratio, generate)
