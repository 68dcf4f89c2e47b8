"""A comparison as tables for a terminal of 100 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group

from outrider.bench.comparison.record import Comparison, Ratio, Variant, VariantResult, ages_of, in_front
from outrider.bench.metrics import Interval
from outrider.bench.table import UNKNOWN, Grid, draw, interval_of, number

ALL, MEAN = "all", "mean of domains"
_HEADINGS = ("drafter", "vectors", "age", "efficiency", "95 %", "accept", "tokens", "steps", "first", "next")
RATIOS_BESIDE = 4  # in one table
LEGEND = (
    "efficiency: block efficiency, committed tokens a target step in synchronous rounds; 95 %: its confidence "
    "interval, by resampling the prompts of each domain; accept: chance that a draft is right, given those before it; "
    "first, next: median processor time of a round's first draft, with its vector, and of one after it, "
    "ms; age: positions by which vectors are older than the freshest. Ratios are paired: both drafters have the same "
    "texts in every resample; with a vector: steps that make one by those without, pair by pair"
)


def tables(comparison: Comparison) -> Group:
    """Return all tables for a terminal of 100 columns."""
    return draw(grids(comparison), LEGEND)


def grids(comparison: Comparison) -> list[Grid]:
    """Return results by domain, ratios, and results by age where there are several; then the cost to a verifier."""
    found: list[Grid] = []
    for temperature in comparison.temperatures:
        condition = f"T = {temperature:g}, {comparison.drafts} drafts a round"
        found.append(_results(comparison, temperature, condition))
        found += _ratios(comparison, temperature, condition)
        if len(ages_of(comparison.variants)) > 1:
            found.append(_by_age(comparison, temperature, condition))
    return [*found, _steps(comparison)] if comparison.steps else found


def _results(comparison: Comparison, temperature: float, condition: str) -> Grid:
    headings = ("domain", *_HEADINGS)
    blocks = []
    for domain in comparison.domains:
        by_variant = comparison.by_variant(temperature, domain)
        rows = [_result_row(by_variant[variant]) for variant in in_front(comparison.variants)]
        names = (domain or ALL, *[""] * (len(rows) - 1))
        blocks.append([(name, *row) for name, row in zip(names, rows, strict=True)])
    return Grid(f"Block efficiency: {condition}", headings, 3, blocks)


def _by_age(comparison: Comparison, temperature: float, condition: str) -> Grid:
    """Return results of all prompts together: a block a steered drafter, which begins without vectors."""
    by_variant = comparison.by_variant(temperature, None)
    blocks = []
    for drafter in comparison.drafters:
        if drafter.projection is not None:
            own = sorted((v for v in by_variant if v.drafter == drafter.label), key=lambda v: v.age is not None)
            blocks.append([_result_row(by_variant[variant]) for variant in own])
    return Grid(f"By age of the vectors, all domains: {condition}", _HEADINGS, 2, blocks)


def _steps(comparison: Comparison) -> Grid:
    headings = ("projection", "rows", "step, ms", "with a vector", "quartiles")
    rows = [
        (s.projection, str(s.rows), f"{s.plain_ms:.1f}", f"{s.ratio:.3f}", interval_of(Interval(s.low, s.high)))
        for s in comparison.steps
    ]
    return Grid("A verifier's step, one session, by the rows that it computes", headings, 1, [rows])


def _result_row(result: VariantResult) -> tuple[str, ...]:
    return (
        result.variant.drafter,
        result.variant.vectors,
        UNKNOWN if result.variant.age is None else str(result.variant.age),
        f"{result.block_efficiency:.3f}",
        interval_of(result.interval),
        number(result.acceptance),
        str(result.tokens),
        str(result.steps),
        number(result.first_ms),
        number(result.next_ms),
    )


def _ratios(comparison: Comparison, temperature: float, condition: str) -> list[Grid]:
    ratios = [ratio for ratio in comparison.ratios if ratio.temperature == temperature]
    means = [ratio for ratio in comparison.mean_ratios if ratio.temperature == temperature]
    others = list(dict.fromkeys(ratio.against for ratio in ratios))
    found = []
    for first in range(0, len(others), RATIOS_BESIDE):
        beside = others[first : first + RATIOS_BESIDE]
        rows = [(domain or ALL, *_cells(ratios, domain, beside)) for domain in comparison.domains]
        if means:
            rows.append((MEAN, *_cells(means, None, beside)))
        title = f"Block efficiency of {comparison.name(ratios[0].variant)} over that of others: {condition}"
        found.append(Grid(title, ("domain", *(f"/ {comparison.name(other)}" for other in beside)), 1, [rows]))
    return found


def _cells(ratios: Sequence[Ratio], domain: str | None, others: Sequence[Variant]) -> list[str]:
    by_other = {ratio.against: ratio for ratio in ratios if ratio.domain == domain}
    return [f"{by_other[other].ratio:.3f} {interval_of(by_other[other].interval)}" for other in others]
