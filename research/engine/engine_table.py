"""The tables of `python -m research engine`, for a terminal of 100 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group

from outrider.bench.table import Block, Grid, draw, number
from research.engine.engine_record import CaseResult, EngineRecord, StepParts

PARTS = ("sessions x rows", "products", "attention", "operators", "Python", "sampling", "planning", "= step", "calls")
PARTS_LEGEND = (
    "products: linear layers; operators: all others in the pass, of calls in all; Python: the pass's time "
    "in no operator; these are shares by torch's profiler, of the pass's time without it; planning: events, plans and "
    "commits between two steps, by the engine's own timings (wall clock)"
)
LEGEND = (
    "ms, medians; engines take turns of a few steps, from tokens to tokens, ours without planning (--parts times it); "
    "/ ours: median over turns"
)


def table(record: EngineRecord) -> Group:
    """Return the parts of our steps, and the engines beside each other."""
    return draw(_grids(record), f"{LEGEND}; {_clock(record.clock)}")


def _grids(record: EngineRecord) -> Iterator[Grid]:
    kept = "keep" if record.rows_keep_bits else "do not keep"
    caption = (
        f"{len(record.packed_shapes)} of {len(record.packed_shapes) + len(record.plain_shapes)} shapes packed, "
        f"{record.packed_bytes / 2**20:.0f} MiB; rows {kept} their bits beside others"
    )
    title = f"Steps of {record.environment.target}, {record.environment.dtype}"
    if parts := [_parts(result, result.parts) for result in record.results if result.parts]:
        yield Grid(f"Parts of our steps, {title}", PARTS, 1, [parts], PARTS_LEGEND)
    contexts = list(dict.fromkeys(result.context for result in record.results))
    for context in contexts:
        results = [result for result in record.results if result.context == context]
        engines = dict.fromkeys(engine for result in results for engine in result.engines)
        yield Grid(
            f"{title}, after {context} tokens" if context else f"{title}, prompt",
            ("engine", "", *(result.name for result in results)),
            2,
            [_engine(engine, results) for engine in engines],
            caption if context == contexts[-1] else "",
        )


def _clock(clock: str) -> str:
    return "CPU time of the thread" if clock == "cpu" else "wall clock"


def _parts(result: CaseResult, parts: StepParts) -> Sequence[str]:
    times = (parts.products_ms, parts.attention_ms, parts.operators_ms, parts.python_ms, parts.sampling_ms,
             parts.planning_ms, parts.step_ms)  # fmt: skip
    return (f"{result.name} @ {result.context}", *(number(time, 2) for time in times), str(parts.operator_calls))


def _engine(engine: str, results: Sequence[CaseResult]) -> Block:
    times = [result.engines.get(engine) for result in results]
    return (
        (engine, "ms", *(number(each.step_ms if each else None, 2) for each in times)),
        ("", "/ ours", *(number(each.ratio if each else None, 2) for each in times)),
    )
