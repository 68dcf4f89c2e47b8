"""A replayed grid as pictures: speed and window over the links by policy, speed over the links by drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from outrider.bench.benchmark.plots import DPI, STYLE
from outrider.bench.benchmark.record import LinkRecord
from outrider.bench.benchmark.table import link_parts
from outrider.bench.comparison.plot import COLOURS
from outrider.bench.traces.figures import Figure, Replayed
from outrider.proto.errors import ConfigError

MARKERS = "os^Dv<>PX"
PANEL_IN, HEIGHT_IN = 4.4, 4.2
ACROSS = 3  # panels beside each other
CLOUD: dict[str, Any] = {"color": COLOURS[0], "linestyle": "--", "label": "cloud streaming", "zorder": 4}
SPEED, WISHED = "tokens per second", "unverified tokens wished for"

Value = Callable[[Figure], float | None]


def draw(replayed: Replayed, folder: Path) -> None:
    """Draw `speed.png` and `window.png`, a panel a drafter, and `drafters.png`, a panel a window policy.

    Raises:
        ConfigError: a file cannot be written.
    """
    import matplotlib as mpl

    policies, drafters = replayed.windows, replayed.drafters
    with mpl.rc_context(STYLE):  # a bare figure has the Agg canvas: no pyplot, no display, no global state
        pictures = {
            "speed": _panels(replayed, "drafter", drafters, policies, _by_window, _speed, SPEED),
            "window": _panels(replayed, "drafter", drafters, policies, _by_window, _wished, WISHED),
            "drafters": _panels(replayed, "window", policies, drafters, _by_drafter, _speed, SPEED),
        }
        for name, canvas in pictures.items():
            path = folder / f"{name}.png"
            try:
                canvas.savefig(path, dpi=DPI)
            except OSError as error:
                raise ConfigError(f"cannot write {path}: {error.strerror}", field="plot") from error


def _by_window(drafter: str, window: str) -> tuple[str, str]:
    return drafter, window


def _by_drafter(window: str, drafter: str) -> tuple[str, str]:
    return drafter, window


def _speed(figure: Figure) -> float | None:
    return figure.tokens_per_second


def _wished(figure: Figure) -> float | None:
    return figure.window_mean


def _panels(
    replayed: Replayed,
    word: str,
    panels: Sequence[str],
    lines: Sequence[str],
    key: Callable[[str, str], tuple[str, str]],
    value: Value,
    what: str,
) -> Any:
    """A panel for each of `panels`, with a line for each of `lines`.

    Args:
        replayed: whose figures are drawn.
        word: what a panel's name is the name of.
        panels: drafters, or windows.
        lines: the other of both.
        key: which drafter and window the names of a panel and a line stand for.
        value: of a figure, that is drawn.
        what: that is, for the axis.
    """
    from matplotlib.figure import Figure as Canvas

    across = min(ACROSS, len(panels))
    down = -(-len(panels) // across)
    canvas = Canvas(figsize=(max(6.4, PANEL_IN * across), HEIGHT_IN * down), layout="constrained")
    grid = canvas.subplots(down, across, sharey=True, squeeze=False).flat
    for axes, panel in zip(grid, panels, strict=False):
        for index, line in enumerate(lines):
            points = [value(_figure(replayed, link, *key(panel, line))) for link in replayed.links]
            style = {"color": COLOURS[1 + index % (len(COLOURS) - 1)], "marker": MARKERS[index % len(MARKERS)]}
            axes.plot(range(len(points)), points, label=line, clip_on=False, zorder=3, **style)
        if value is _speed:
            cloud = [replayed.over(link)[0].tokens_per_second for link in replayed.links]
            axes.plot(range(len(cloud)), cloud, **CLOUD)
        axes.set_title(f"{word} {panel}")
        axes.set_xticks(range(len(replayed.links)), ["\n".join(link_parts(link)) for link in replayed.links])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("link (round-trip time)")
    for axes in list(canvas.axes)[len(panels) :]:
        axes.remove()
    canvas.axes[0].set_ylabel(what)
    handles, labels = canvas.axes[0].get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside upper left", ncols=4)
    return canvas


def _figure(replayed: Replayed, link: LinkRecord, drafter: str, window: str) -> Figure:
    return next(f for f in replayed.over(link) if (f.drafter, f.window) == (drafter, window))
