"""Capacities as one picture: a row of panels for each step model, a column for each time of a drafted token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.bench.metrics import grouped
from outrider.bench.plot import GREY, HUES, INK, canvas, save_plot, styled
from research.capacity.record import Capacities, HeldSessions

PANEL_IN, HEIGHT_IN = 3.2, 2.9
NAMES = {"cloud": "cloud streaming", "colocated": "drafter beside target", "edge": "edge alone", "outrider": "outrider"}
STYLES: dict[str, dict[str, Any]] = {
    "cloud": {"color": GREY, "linestyle": "--", "marker": "s"},
    "colocated": {"color": INK, "marker": "v"},
    "edge": {"color": HUES[5], "linestyle": "--", "marker": "o"},
    "outrider": {"color": HUES[0], "marker": "o"},
}
BAND = 0.15  # opacity of the range of several searches
MORE_THREADS: dict[str, Any] = {"markerfacecolor": "white", "linewidth": 1.3}


def draw_capacities(found: Capacities, path: Path) -> None:
    """Draw sessions against the round trip.

    Raises:
        ConfigError: the file cannot be written.
    """
    prices = sorted({result.drafting_ms for result in found.results})
    rtts = sorted({result.rtt_ms for result in found.results if result.rtt_ms is not None})
    with styled():
        drawn = canvas((PANEL_IN * len(prices), HEIGHT_IN * len(found.models) + 0.6))
        panels = drawn.subplots(len(found.models), len(prices), sharex=True, sharey="row", squeeze=False)
        lines: dict[str, Any] = {}
        for row, model in zip(panels, found.models, strict=True):
            for axes, price in zip(row, prices, strict=True):
                own = [r for r in found.results if r.steps == model.name and r.drafting_ms == price]
                _panel(axes, own, rtts, lines)
                axes.set_title(f"{model.name} steps, {price:g} ms a drafted token")
            row[0].set_ylabel("sessions held")
            row[0].set_ylim(0, 1.05 * max(1, *(r.high for r in found.results if r.steps == model.name)))
        for axes in panels[-1]:
            axes.set_xlabel("round-trip time (ms)")
        drawn.legend(lines.values(), lines.keys(), loc="outside lower left", ncols=min(4, len(lines)), handlelength=2.6)
        save_plot(drawn, path)


def _panel(axes: Any, results: Sequence[HeldSessions], rtts: Sequence[float], lines: dict[str, Any]) -> None:
    by_line = grouped(results, lambda result: (result.mode, result.threads))
    fewest = {mode: min(threads for own, threads in by_line if own == mode) for mode, _ in by_line}
    for (mode, threads), own in by_line.items():
        points = [(rtt, result.sessions) for result in own for rtt in _places(result, rtts)]
        style = STYLES[mode] | (MORE_THREADS if threads > fewest[mode] else {})
        counted = f", {threads} thread{'s' if threads > 1 else ''}" if threads else ""
        (lines[NAMES[mode] + counted],) = axes.plot(*zip(*sorted(points), strict=True), **style, clip_on=False)
        ranges = sorted((rtt, result.low, result.high) for result in own for rtt in _places(result, rtts))
        axes.fill_between(*zip(*ranges, strict=True), color=style["color"], alpha=BAND, linewidth=0)
    if len(rtts) > 1 and rtts[0] > 0:
        axes.set_xscale("log")
    axes.set_xticks(rtts, [f"{rtt:g}" for rtt in rtts])
    axes.minorticks_off()


def _places(result: HeldSessions, rtts: Sequence[float]) -> Sequence[float]:
    """Return the round trips at which a result holds."""
    return rtts if result.rtt_ms is None else (result.rtt_ms,)
