"""Curves of learning: hits over tokens served, a panel for each domain and start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outrider.bench.learning.record import LearningRun, LearningRuns
from outrider.bench.metrics import grouped
from outrider.bench.plot import GREY, HUES, INK, canvas, save_plot, styled

PANEL_IN, HEIGHT_IN = 3.3, 2.9
MAX_PANELS = 3  # in a row
TITLES = {"warm": "from the trained drafter", "cold": "from the cold drafter"}
LINES = [{"color": color, "linestyle": line} for line in ("-", "--") for color in (*HUES, INK)]
BAND = 0.15  # opacity of the range of the seeds


def draw_curves(found: LearningRuns, path: Path) -> None:
    """Draw the mean over the seeds of each loss with its most rehearsed share, and the range of the seeds.

    Raises:
        ConfigError: the file cannot be written.
    """
    panels = grouped(found.runs, lambda run: (run.stream, run.start))
    losses = list(dict.fromkeys(run.arm for run in found.runs))
    across = min(MAX_PANELS, len(panels))
    down = -(-len(panels) // across)
    with styled():
        drawn = canvas((PANEL_IN * across, HEIGHT_IN * down + 0.4))
        grid = drawn.subplots(down, across, sharex=True, squeeze=False)
        lines: dict[str, Any] = {}
        for axes, ((stream, start), runs) in zip(grid.flat, panels.items(), strict=False):
            axes.set_title(f"{stream}, {TITLES[start]}")
            rehearsed = max(run.rehearsed for run in runs)
            for arm, own in grouped((run for run in runs if run.rehearsed == rehearsed), lambda run: run.arm).items():
                lines[arm] = _curve(axes, own, LINES[losses.index(arm) % len(LINES)])
            axes.axhline(np.mean([_before(run) for run in runs]), color=GREY, linestyle=":", linewidth=1)
            axes.set_xlabel("tokens served")
        for axes in grid.flat[len(panels) :]:
            axes.remove()
        for row in grid:
            row[0].set_ylabel("share of hits")
        drawn.legend(lines.values(), lines.keys(), loc="outside lower left", ncols=min(6, len(lines)))
        save_plot(drawn, path)


def _before(run: LearningRun) -> float:
    return (run.before.greedy + run.before.sampled) / 2


def _curve(axes: Any, runs: Sequence[LearningRun], style: dict[str, Any]) -> Any:
    """Draw one loss, and return its line; the points of a run are means of what was served between them."""
    first = max(run.curve[0][0] for run in runs)
    places = np.linspace(first, min(run.curve[-1][0] for run in runs), len(runs[0].curve))
    curves = [np.array(run.curve, dtype=float) for run in runs]
    shares = np.array([np.interp(places, curve[:, 0], curve[:, 1]) for curve in curves])
    axes.fill_between(places, shares.min(0), shares.max(0), color=style["color"], alpha=BAND, linewidth=0)
    (line,) = axes.plot(places, shares.mean(0), **style)
    return line
