"""Plots of replays: speed and window over the links; speed-up, regret and choices of selectors of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from outrider.bench.links import LinkRecord, link_name, link_parts
from outrider.bench.plot import COLOURS, GREY, HUES, INK, canvas, save_plot, styled
from research.traces.pool import AFTER, BEFORE, DRAFTER, ORACLE, SELECTOR, Cell, PoolReplayed, PoolRow
from research.traces.sweep import Replayed

MARKERS = "os^Dv<>PX"
PANEL_IN, HEIGHT_IN = 4.4, 4.2
ACROSS = 3  # panels beside each other
CLOUD: dict[str, Any] = {"color": GREY, "linestyle": "--", "label": "cloud streaming", "zorder": 4}
LINES = ("-", "--", ":")  # styles where there are more selectors than hues
LOG_FROM = 10  # tokens at which a logarithmic axis begins
WORSE = 4.0  # height of a panel of regret, in usual regrets


def draw_sweep(replayed: Replayed, folder: Path) -> None:
    """Draw `speed.png` and `window.png`, a panel a drafter, and `drafters.png`, a panel a window policy.

    Raises:
        ConfigError: a file cannot be written.
    """
    with styled():
        plots = {
            "speed": _panels(replayed, "drafter", "window", "tokens_per_second", "tokens per second"),
            "window": _panels(replayed, "drafter", "window", "window_mean", "unverified tokens asked for"),
            "drafters": _panels(replayed, "window", "drafter", "tokens_per_second", "tokens per second"),
        }
        for name, drawn in plots.items():
            save_plot(drawn, folder / f"{name}.png")


def _panels(replayed: Replayed, panel: str, line: str, value: str, label: str) -> Any:
    """Draw `value` over the links, a panel for each `panel` with a line for each `line`: fields of `WindowResult`."""
    links = replayed.by_link
    values = {(k, getattr(r, panel), getattr(r, line)): getattr(r, value) for k, own in links.items() for r in own}
    names = {"drafter": replayed.drafters, "window": replayed.windows}
    across = min(ACROSS, len(names[panel]))
    down = -(-len(names[panel]) // across)
    drawn = canvas((max(6.4, PANEL_IN * across), HEIGHT_IN * down))
    grid = drawn.subplots(down, across, sharey=True, squeeze=False).flat
    places = range(len(links))
    for axes, shown in zip(grid, names[panel], strict=False):
        for index, name in enumerate(names[line]):
            points = [values[link, shown, name] for link in links]
            style = {"color": HUES[index % len(HUES)], "marker": MARKERS[index % len(MARKERS)]}
            axes.plot(places, points, label=name, clip_on=False, zorder=3, **style)
        if value == "tokens_per_second":
            axes.plot(places, [values[link, None, None] for link in links], **CLOUD)
        axes.set_title(f"{panel} {shown}")
        axes.set_xticks(places, ["\n".join(link_parts(link)) for link in links])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("link (round-trip time)")
    for axes in list(drawn.axes)[len(names[panel]) :]:
        axes.remove()
    drawn.axes[0].set_ylabel(label)
    handles, labels = drawn.axes[0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside upper left", ncols=4)
    return drawn


def draw_pool(replayed: PoolReplayed, folder: Path) -> None:
    """Draw `speedup-LINK.png`, `regret-LINK.png` and, where domains change, `choices-LINK.png` for every link.

    Raises:
        ConfigError: a file cannot be written.
    """
    with styled():
        for (link, rows), file in zip(replayed.by_link.items(), _files(list(replayed.by_link)), strict=True):
            plots = {"speedup": _speed_up(rows), "regret": _regret(rows)}
            if any(row.changes for row in rows):
                plots["choices"] = _choices(rows, replayed.drafters)
            for name, drawn in plots.items():
                title = f"{drawn.get_suptitle()}, {link_name(link)}, {replayed.play}"
                drawn.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
                save_plot(drawn, folder / f"{name}-{file}.png")


def _files(links: Sequence[LinkRecord]) -> list[str]:
    """Return a name for the files of each link: its trace or round-trip time, or all that tells it from another."""
    short = [link.trace or f"{link.rtt_ms:g}ms" for link in links]
    names = [link_name(link) if short.count(name) > 1 else name for link, name in zip(links, short, strict=True)]
    return ["".join(letter if letter.isalnum() else "-" for letter in name) for name in names]


def _speed_up(rows: Sequence[PoolRow]) -> Any:
    """Draw a panel a row of texts: a point and an interval for each drafter, selector and the oracle."""
    names = [f"{cell.name} alone" if cell.kind == DRAFTER else cell.name for cell in rows[0].cells]
    drawn = canvas((1.6 + 1.7 * len(rows), 1.1 + 0.24 * len(names)))
    drawn.suptitle("Speed-up over cloud streaming, with 95 % confidence intervals")
    panels = drawn.subplots(1, len(rows), sharey=True, squeeze=False)[0]
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
    return drawn


def _regret(rows: Sequence[PoolRow]) -> Any:
    """Draw two panels a row of texts: the same curves over tokens, and over their logarithm."""
    drawn = canvas((9.0, 1.0 + 2.2 * len(rows)))
    drawn.suptitle("Regret: seconds behind the oracle")
    panels = drawn.subplots(len(rows), 2, sharey="row", squeeze=False)
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
    drawn.legend(handles, labels, loc="outside lower left", ncols=6)
    return drawn


def _shown(row: PoolRow) -> tuple[float, float]:
    """Return the panel's range in seconds; curves much worse than usual leave it, which keeps the others apart."""
    curves = [cell.regret_s for _, cell, _ in _lines(row)]
    most = max(map(max, curves))
    usual = median(curve[-1] for curve in curves)
    top = min(most, WORSE * usual) if usual > 0 else most
    return min(map(min, curves)) - 0.05 * top, 1.05 * top or 1.0


def _lines(row: PoolRow) -> list[tuple[str, Cell, dict[str, Any]]]:
    """Return name, cell and style of each selector, and of the best drafter alone where drafters were played."""
    found: list[tuple[str, Cell, dict[str, Any]]] = [
        (cell.name, cell, {"color": HUES[i % len(HUES)], "linestyle": LINES[i // len(HUES) % len(LINES)]})
        for i, cell in enumerate(row.of_kind(SELECTOR))
    ]
    best = max(row.of_kind(DRAFTER), key=lambda cell: cell.speed_up, default=None)
    if best:
        found.append(("best drafter alone", best, {"color": INK, "linewidth": 1.2, "linestyle": "-."}))
    return found


def _choices(rows: Sequence[PoolRow], drafters: Sequence[str]) -> Any:
    """Draw the drafters' shares around changes of domain: a line a selector, a column a domain."""
    changes = [change for row in rows for change in row.changes]
    names = list(dict.fromkeys(change.name for change in changes))
    domains = list(dict.fromkeys(change.domain for change in changes))
    domains.sort(key=[row.name for row in rows if row.name in domains].index)
    drawn = canvas((1.4 + 2.1 * len(domains), 1.2 + 0.95 * len(names)))
    drawn.suptitle("Who drafts around a change of domain")
    panels = drawn.subplots(len(names), len(domains), sharex=True, sharey=True, squeeze=False)
    colours = [COLOURS[(1 + i) % len(COLOURS)] for i in range(len(drafters))]
    for change in changes:
        axes = panels[names.index(change.name)][domains.index(change.domain)]
        shares = zip(*change.shares, strict=True)
        axes.stackplot(range(-BEFORE, AFTER), *shares, labels=drafters, colors=colours, linewidth=0)
        axes.axvline(0, color=INK, linewidth=1.0)
        axes.set_xlim(-BEFORE, AFTER - 1)
        axes.set_ylim(0, 1)
        axes.grid(visible=False)
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
    drawn.legend(handles, labels, loc="outside lower left", ncols=min(6, len(drafters)))
    return drawn
