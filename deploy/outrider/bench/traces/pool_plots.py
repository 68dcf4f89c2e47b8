"""Selectors of a pool as pictures: speed-up with its intervals, regret over tokens, and who drafts around a change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from outrider.bench.benchmark.plots import DPI, STYLE
from outrider.bench.benchmark.record import LinkRecord
from outrider.bench.benchmark.table import link_name
from outrider.bench.comparison.plot import COLOURS
from outrider.bench.traces.pool_figures import DRAFTER, ORACLE, SELECTOR, Cell, Change, PoolReplayed, Row
from outrider.bench.traces.tally import AFTER, BEFORE
from outrider.proto.errors import ConfigError

GREY, *HUES = COLOURS
LINES = ("-", "--", ":")  # where there are more selectors than hues
INK = "#222222"
LOG_FROM = 10  # tokens, where a logarithmic axis begins
WORSE = 4.0  # times the regret that is usual, which a panel of regret reaches up to


def draw(replayed: PoolReplayed, folder: Path) -> None:
    """Draw `speedup-LINK.png`, `regret-LINK.png` and, where domains change, `choices-LINK.png` for every link.

    Raises:
        ConfigError: a file cannot be written.
    """
    import matplotlib as mpl

    with mpl.rc_context(STYLE):  # a bare figure has the Agg canvas: no pyplot, no display, no global state
        for link in replayed.links:
            rows = replayed.over(link)
            pictures = {"speedup": _speed_up(rows), "regret": _regret(rows)}
            if any(row.changes for row in rows):
                pictures["choices"] = _choices(rows, replayed.drafters)
            for name, canvas in pictures.items():
                title = f"{canvas.get_suptitle()}, {link_name(link)}, {replayed.play}"
                canvas.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
                path = folder / f"{name}-{_slug(link)}.png"
                try:
                    canvas.savefig(path, dpi=DPI)
                except OSError as error:
                    raise ConfigError(f"cannot write {path}: {error.strerror}", field="plot") from error


def _slug(link: LinkRecord) -> str:
    """For a file's name."""
    return "".join(letter if letter.isalnum() else "-" for letter in link.trace or f"{link.rtt_ms:g}ms")


def _speed_up(rows: Sequence[Row]) -> Any:
    """A panel a row of texts: a point and an interval for each drafter, selector and the oracle."""
    from matplotlib.figure import Figure as Canvas

    names = [f"{name} alone" if kind == DRAFTER else name for kind, name in rows[0].columns]
    canvas = Canvas(figsize=(1.6 + 1.7 * len(rows), 1.1 + 0.24 * len(names)), layout="constrained")
    canvas.suptitle("Speed-up over cloud streaming, with 95 % confidence intervals")
    panels = canvas.subplots(1, len(rows), sharey=True, squeeze=False)[0]
    for axes, row in zip(panels, rows, strict=True):
        for place, cell in enumerate(row.cells):
            colour = {DRAFTER: GREY, SELECTOR: HUES[0], ORACLE: HUES[1]}[cell.kind]
            if cell.interval is not None:
                axes.plot((cell.interval.low, cell.interval.high), (place, place), color=colour, linewidth=1.4)
            axes.plot(cell.speed_up, place, marker="o", color=colour, zorder=4)
        axes.axvline(1.0, color=INK, linewidth=0.8, linestyle=":")
        axes.axvline(row.of(ORACLE, ORACLE).speed_up, color=HUES[1], linewidth=0.8, linestyle=":")
        axes.set_title(row.name or "all")
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].set_ylim(len(names) - 0.5, -0.5)
    return canvas


def _regret(rows: Sequence[Row]) -> Any:
    """A line of two panels a row of texts: the same curves over tokens, and over their logarithm."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(9.0, 1.0 + 2.2 * len(rows)), layout="constrained")
    canvas.suptitle("Regret: seconds behind the oracle")
    panels = canvas.subplots(len(rows), 2, sharey="row", squeeze=False)
    for (linear, logarithmic), row in zip(panels, rows, strict=True):
        for axes in (linear, logarithmic):
            for name, cell, style in _lines(row):
                axes.plot(row.positions, cell.regret_s, label=name, **style)
            axes.axhline(0.0, color=INK, linewidth=0.6)
        linear.set_title(row.name or "all")
        linear.set_ylabel("seconds")
        linear.set_ylim(*_shown(row))
        linear.set_xlim(0, row.positions[-1])
        logarithmic.set_xscale("log")
        logarithmic.set_xlim(min(LOG_FROM, row.positions[-1] / 10), row.positions[-1])
    panels[-1][0].set_xlabel("tokens since the beginning")
    panels[-1][1].set_xlabel("the same, logarithmic")
    handles, labels = panels[0][0].get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside lower left", ncols=6)
    return canvas


def _shown(row: Row) -> tuple[float, float]:
    """Least and most seconds: who does much worse than most leaves the panel, so that these can be told apart."""
    curves = [cell.regret_s for _, cell, _ in _lines(row)]
    most = max(map(max, curves))
    usual = median(curve[-1] for curve in curves)
    top = min(most, WORSE * usual) if usual > 0 else most
    return min(map(min, curves)) - 0.05 * top, 1.05 * top or 1.0


def _lines(row: Row) -> list[tuple[str, Cell, dict[str, Any]]]:
    """Name, cell and style of each selector, and of the best drafter alone where drafters were played."""
    selectors = [cell for cell in row.cells if cell.kind == SELECTOR]
    found: list[tuple[str, Cell, dict[str, Any]]] = [
        (cell.name, cell, {"color": HUES[i % len(HUES)], "linestyle": LINES[i // len(HUES) % len(LINES)]})
        for i, cell in enumerate(selectors)
    ]
    alone = [cell for cell in row.cells if cell.kind == DRAFTER]
    if alone:
        best = max(alone, key=lambda cell: cell.speed_up)
        found.append(("best drafter alone", best, {"color": INK, "linewidth": 1.2, "linestyle": "-."}))
    return found


def _choices(rows: Sequence[Row], drafters: Sequence[str]) -> Any:
    """A line a selector, a column a domain: whose drafts, as stacked shares, around the change to that domain."""
    from matplotlib.figure import Figure as Canvas

    changes = [change for row in rows for change in row.changes]
    names = list(dict.fromkeys(change.name for change in changes))
    domains = list(dict.fromkeys(change.domain for change in changes))
    domains.sort(key=[row.name for row in rows if row.name in domains].index)
    canvas = Canvas(figsize=(1.4 + 2.1 * len(domains), 1.2 + 0.95 * len(names)), layout="constrained")
    canvas.suptitle("Who drafts around a change of domain")
    panels = canvas.subplots(len(names), len(domains), sharex=True, sharey=True, squeeze=False)
    for change in changes:
        axes = panels[names.index(change.name)][domains.index(change.domain)]
        _stack(axes, change, drafters)
    for axes, name in zip(panels[:, 0], names, strict=True):
        axes.set_ylabel(name, rotation=0, ha="right", va="center")
        axes.set_yticks([])
    for axes in panels[:-1].flat:
        axes.tick_params(axis="x", length=0)
    for axes, domain in zip(panels[0], domains, strict=True):
        axes.set_title(f"to {domain}")
    for axes in panels[-1]:
        axes.set_xlabel("tokens after it")
    handles, labels = panels[0][0].get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside lower left", ncols=min(6, len(drafters)))
    return canvas


def _stack(axes: Any, change: Change, drafters: Sequence[str]) -> None:
    positions = range(-BEFORE, AFTER)
    shares = list(zip(*change.shares, strict=True))
    colours: list[str] = [COLOURS[(1 + i) % len(COLOURS)] for i in range(len(drafters))]
    axes.stackplot(positions, *shares, labels=drafters, colors=colours, linewidth=0)
    axes.axvline(0, color=INK, linewidth=1.0)
    axes.set_xlim(-BEFORE, AFTER - 1)
    axes.set_ylim(0, 1)
    axes.grid(visible=False)
