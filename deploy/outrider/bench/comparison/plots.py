"""A comparison as one plot: block efficiency by domain, and by the age of the steering vectors, a row a temperature."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.bench.comparison.record import Comparison, Variant, VariantResult, ages_of, in_front
from outrider.bench.comparison.tables import ALL
from outrider.bench.plot import COLOURS, FAINT, canvas, save_plot, styled
from outrider.proto.errors import ConfigError

SUFFIXES = (".png", ".pdf", ".svg")
HATCHES = {"int8": "", "float16": "///", "none": "..."}  # where a drafter has several kinds of vectors
LINES = {"int8": "-", "float16": "--"}
ROW_IN = 3.4


def check_plot(path: Path) -> None:
    """Refuse a path whose suffix is none of `SUFFIXES` by a `ConfigError`, before the work."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{path} does not end in {', '.join(SUFFIXES)}", field="plot")


def draw(comparison: Comparison, path: Path) -> None:
    """Draw the comparison into `path`.

    Raises:
        ConfigError: the file cannot be written.
    """
    aged = len(ages_of(comparison.variants)) > 1
    rows, columns = len(comparison.temperatures), 1 + aged
    with styled():
        drawn = canvas((5.6 * columns, ROW_IN * rows + 0.5))
        panels = drawn.subplots(rows, columns, squeeze=False)
        for temperature, beside in zip(comparison.temperatures, panels, strict=True):
            _by_domain(beside[0], comparison, temperature)
            if aged:
                _by_age(beside[1], comparison, temperature)
        handles, labels = panels[0, 0].get_legend_handles_labels()
        drawn.legend(handles, labels, loc="outside upper left", ncols=4)
        save_plot(drawn, path)


def _by_domain(axes: Any, comparison: Comparison, temperature: float) -> None:
    """Draw bars with the confidence interval of each."""
    variants = in_front(comparison.variants)
    width = 0.8 / len(variants)
    for index, variant in enumerate(variants):
        shown = [comparison.by_variant(temperature, domain)[variant] for domain in comparison.domains]
        at = [place + (index - (len(variants) - 1) / 2) * width for place in range(len(shown))]
        axes.bar(
            at,
            [result.block_efficiency for result in shown],
            0.92 * width,
            yerr=_errors(shown),
            error_kw={"elinewidth": 1, "capsize": 2},
            color=_colour(comparison, variant),
            hatch=HATCHES[variant.vectors] if comparison.name(variant) != variant.drafter else "",
            edgecolor="white",
            label=comparison.name(variant),
        )
    axes.set_xticks(range(len(comparison.domains)), [domain or ALL for domain in comparison.domains])
    axes.grid(visible=False, axis="x")
    axes.set_ylabel(f"tokens a target step, {comparison.drafts} drafts a round")
    axes.set_title(f"T = {temperature:g}, by domain, with 95 % confidence intervals")


def _by_age(axes: Any, comparison: Comparison, temperature: float) -> None:
    """Draw lines over the age, for all prompts together, with intervals; without vectors age does not matter."""
    by_variant = comparison.by_variant(temperature, None)
    for variant, result in by_variant.items():
        if variant.age is None:
            style = {"color": _colour(comparison, variant), "linestyle": ":", "linewidth": 1.6}
            axes.axhline(result.block_efficiency, label=comparison.name(variant), **style)
    for variant in (variant for variant in in_front(comparison.variants) if variant.age is not None):
        own = [r for v, r in by_variant.items() if (v.drafter, v.vectors) == (variant.drafter, variant.vectors)]
        line = sorted(own, key=lambda result: result.variant.age or 0)
        ages, colour = [result.variant.age or 0 for result in line], _colour(comparison, variant)
        style = {"color": colour, "linestyle": LINES[variant.vectors], "marker": "o", "zorder": 4}
        axes.plot(ages, [result.block_efficiency for result in line], label=comparison.name(variant), **style)
        intervals = [result.interval for result in line if result.interval]
        if len(intervals) == len(line):
            low, high = [interval.low for interval in intervals], [interval.high for interval in intervals]
            axes.fill_between(ages, low, high, color=colour, alpha=0.15, linewidth=0)
    ages = sorted(ages_of(comparison.variants))
    axes.set_xscale("symlog", base=2, linthresh=1)
    axes.set_xticks(ages, [str(age) for age in ages])
    axes.minorticks_off()
    axes.grid(visible=True, color=FAINT)
    axes.set_xlabel("positions by which the vector is older than the freshest")
    axes.set_title(f"T = {temperature:g}, by age of the vector, all domains")
    axes.legend(fontsize=8, handlelength=3)


def _errors(results: Sequence[VariantResult]) -> list[list[float]] | None:
    """Return [2][bars], below and above; None where they are not known."""
    known = [(result.block_efficiency, result.interval) for result in results if result.interval]
    if len(known) < len(results):
        return None
    below = [max(0.0, efficiency - interval.low) for efficiency, interval in known]
    return [below, [max(0.0, interval.high - efficiency) for efficiency, interval in known]]


def _colour(comparison: Comparison, variant: Variant) -> str:
    labels = [drafter.label for drafter in comparison.drafters]
    return COLOURS[labels.index(variant.drafter) % len(COLOURS)]
