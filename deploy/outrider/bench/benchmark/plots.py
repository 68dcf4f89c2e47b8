"""A benchmark as plots: PNG files.

Every mode has the same colour everywhere, and a line style of its own, so that nothing depends on colour alone.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from outrider.bench.benchmark.record import LANES, MODES, Run
from outrider.bench.benchmark.table import Condition, by_link, fastest
from outrider.bench.links import LinkRecord, link_name, link_parts
from outrider.bench.plot import FAINT, INK, canvas, save_plot, styled
from outrider.deploy.link.traces import LinkTrace, TracePoint, find_trace
from outrider.proto.errors import ConfigError

WIDTH_IN = 9.0
PANELS = 3  # most beside each other
COLOURS = {
    "cloud": "#7a7a7a",
    "sync": "#d55e00",
    "outrider": "#0072b2",
    "optimum": "#b8559b",
    "hf-generate": "#009e73",
    "hf-assisted": "#b88600",
}
STYLES = {
    "cloud": "--",
    "sync": "-",
    "outrider": "-",
    "optimum": ":",
    "hf-generate": "-.",
    "hf-assisted": "-.",
}
MARKERS = {"cloud": "s", "sync": "^", "outrider": "o", "optimum": "D", "hf-generate": "P", "hf-assisted": "X"}
NAMES = {"cloud": "cloud", "sync": "sync (best length)", "optimum": "optimum (replayed)"}
LANE_NAMES = {"draft": "drafting", "up": "uplink", "verify": "verifying", "down": "downlink", "idle": "idle"}
TIMELINE_MODES = ("outrider", "sync", "cloud")
COURSE_MODES = ("cloud", "sync", "outrider")
COURSE_WINDOW_S = 0.5
COURSE_STEP_S = 0.05
UPLINK = "#b88600"
LOG_FROM = 20.0  # a range of round-trip times wider than this gets a logarithmic axis
MIN_GAP_MS = 1.0  # tokens of one commit come at once; a logarithmic axis has no place for that


@dataclass(frozen=True, slots=True)
class Picture:
    """A file that was drawn, and what to say about it."""

    path: Path
    title: str
    caption: str


def draw(condition: Condition, runs: Sequence[Run], folder: Path, stem: str) -> list[Picture]:
    """Draw the plots of one condition for which something was measured, as `folder/stem-….png`.

    Tokens a second needs links that differ in their round-trip time alone; the others the fields that they show.
    """
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    traced = by_link([run for run in runs if run.arrivals_s])
    drawings = [("speed", _speed), ("gaps", _gaps), ("timeline", _timeline), ("bytes", _bytes)]
    drawings += [(f"trace-{number}", partial(_arrivals, link=link)) for number, link in enumerate(traced, 1)]
    pictures = []
    with styled():
        for kind, drawing in drawings:
            figure = canvas(layout=ConstrainedLayoutEngine(wspace=0.05))
            said = drawing(figure, runs)
            if said is None:
                continue
            title, caption = said
            figure.suptitle(f"{title}\n", x=0.01, ha="left", fontsize=12, fontweight="bold", linespacing=1.5)
            figure.text(0.01, 1 - 0.36 / figure.get_figheight(), str(condition), va="top", fontsize=9, color="#555555")
            path = folder / f"{stem}-{kind}.png"
            save_plot(figure, path, "report")
            pictures.append(Picture(path, title, caption))
    return pictures


def _speed(figure: Any, runs: Sequence[Run]) -> tuple[str, str] | None:
    families = [family for family in _families(runs) if len(by_link(family)) > 1][:PANELS]
    if not families:
        return None
    figure.set_size_inches(WIDTH_IN if len(families) > 1 else 7.5, 4.6)
    panels = figure.subplots(1, len(families), sharey=True, squeeze=False)[0]
    lines: dict[str, Any] = {}
    for axes, family in zip(panels, families, strict=True):
        links = by_link(family)
        ends = []
        for mode in MODES:
            points = [(link.rtt_ms, run) for link, over in links.items() if (run := fastest(over, mode)) is not None]
            if not points:
                continue
            at, speeds = [rtt for rtt, _ in points], [run.tokens_per_second or 0.0 for _, run in points]
            line = {"color": COLOURS[mode], "linestyle": STYLES[mode], "marker": MARKERS[mode]}
            (lines[mode],) = axes.plot(at, speeds, **line, clip_on=False, zorder=4 if mode == "outrider" else 3)
            ends.append((at[-1], speeds[-1], mode))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("round-trip time (ms)")
        _axis_of_rtt(axes, [link.rtt_ms for link in links], 0.035 * len(families))
        if len(families) > 1:
            axes.set_title(_family_name(family[0].link))
        else:
            _label_ends(axes, ends)
    if len(families) > 1:
        _legend(figure, lines)
    panels[0].set_ylabel("tokens per second")
    caption = "For synchronous speculation, the best of its lengths at each round-trip time."
    if any(run.link == LinkRecord(0.0) for run in runs):
        caption += " At 0 ms there is no link, and no limit to any rate."
    return "Tokens per second against round-trip time", caption


def _axis_of_rtt(axes: Any, rtts_ms: Sequence[float], least: float) -> None:
    """Scale the axis linearly, or logarithmically where the range is wide; 0 has its own place left of the logarithm.

    The ticks are the round-trip times that were measured, named where they are the share `least` of the
    axis or more to the right of the name before.
    """
    positive = sorted({rtt for rtt in rtts_ms if rtt > 0})
    if positive and positive[-1] > LOG_FROM * positive[0]:
        axes.set_xscale("symlog", linthresh=positive[0], linscale=0.6) if 0 in rtts_ms else axes.set_xscale("log")
    elif len(positive) > 1 and 0 in rtts_ms and positive[-1] > LOG_FROM * (positive[0] / 2):
        axes.set_xscale("symlog", linthresh=positive[0], linscale=0.6)
    axes.autoscale_view()
    to_share = axes.transData + axes.transAxes.inverted()
    last, names = -1.0, []
    for rtt in sorted(set(rtts_ms)):
        share = to_share.transform((rtt, 0))[0]
        shown = share - last >= least
        names.append(f"{rtt:g}" if shown else "")
        last = share if shown else last
    axes.set_xticks(sorted(set(rtts_ms)), names)
    axes.minorticks_off()


def _legend(figure: Any, lines: Mapping[str, Any]) -> None:
    modes = [mode for mode in MODES if mode in lines]
    handles, names = [lines[mode] for mode in modes], [_name(mode) for mode in modes]
    figure.legend(handles, names, loc="outside lower left", ncols=len(modes), handlelength=2.6)


def _label_ends(axes: Any, ends: Sequence[tuple[float, float, str]]) -> None:
    """Name the lines at their right ends, pushed apart where names would overlap, or beside the last point."""
    last = max(x for x, _, _ in ends)
    at_end = sorted((y, mode) for x, y, mode in ends if x == last)
    heights = _spread([y for y, _ in at_end], 0.058 * axes.get_ylim()[1])
    for (y, mode), height in zip(at_end, heights, strict=True):
        axes.annotate(
            _name(mode),
            (last, y),
            (1.02, height),
            textcoords=("axes fraction", "data"),
            color=COLOURS[mode],
            va="center",
            annotation_clip=False,
        )
    inside = sorted((y, x, mode) for x, y, mode in ends if x != last)
    heights = _spread([y for y, _, _ in inside], 0.058 * axes.get_ylim()[1])
    for (_, x, mode), height in zip(inside, heights, strict=True):
        axes.annotate(
            _name(mode),
            (x, height),
            (8, 0),
            textcoords="offset points",
            color=COLOURS[mode],
            va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.8},
            zorder=5,
        )


def _spread(values: Sequence[float], least: float) -> list[float]:
    """Return the rising `values`, moved as little as need be so that neighbours are `least` apart."""
    groups: list[list[float]] = []  # values that touch stand around their mean
    for value in values:
        groups.append([value])
        while len(groups) > 1 and _low(groups[-1], least) - _high(groups[-2], least) < least:
            groups[-2:] = [groups[-2] + groups[-1]]
    return [_low(group, least) + index * least for group in groups for index in range(len(group))]


def _low(group: Sequence[float], least: float) -> float:
    return sum(group) / len(group) - least * (len(group) - 1) / 2


def _high(group: Sequence[float], least: float) -> float:
    return sum(group) / len(group) + least * (len(group) - 1) / 2


def _gaps(figure: Any, runs: Sequence[Run]) -> tuple[str, str] | None:
    links = {
        link: known
        for link, over in by_link(runs).items()
        if (known := [run for mode in MODES if (run := _with_gaps(over, mode)) is not None])
    }
    if not links:
        return None
    # A panel for transformers alone, which has no link, compares nothing.
    shared = [link for link, known in links.items() if not known[0].mode.startswith("hf-")]
    chosen = _evenly(shared or list(links), PANELS)
    figure.set_size_inches(WIDTH_IN if len(chosen) > 1 else 6.0, 4.3)
    panels = figure.subplots(1, len(chosen), sharex=True, sharey=True, squeeze=False)[0]
    most = max(gap for link in chosen for run in links[link] for gap in run.token_gaps_ms or ())
    lines: dict[str, Any] = {}
    for axes, link in zip(panels, chosen, strict=True):
        for run in links[link]:
            gaps = [max(gap, MIN_GAP_MS) for gap in run.token_gaps_ms or ()]
            shares = [100 * index / (len(gaps) - 1) for index in range(len(gaps))]
            (lines[run.mode],) = axes.plot(gaps, shares, color=COLOURS[run.mode], linestyle=STYLES[run.mode])
        axes.set_xscale("log")
        axes.set_xlim(MIN_GAP_MS, max(most, 10 * MIN_GAP_MS) * 1.1)
        axes.set_ylim(0, 101)
        ticks = [10.0**power for power in range(math.ceil(math.log10(max(most, 10 * MIN_GAP_MS))) + 1)]
        ticks = [tick for tick in ticks if tick <= axes.get_xlim()[1]]
        axes.set_xticks(ticks, [f"≤ {tick:g}" if tick == MIN_GAP_MS else f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_title(_link_title(link))
        axes.set_xlabel("time between tokens (ms)")
    panels[0].set_ylabel("share of tokens that come within (%)")
    _legend(figure, lines)
    caption = (
        f"Tokens of one commit come together and count as {MIN_GAP_MS:g} ms or less. A line further up and to the "
        "left is better; where it bends to the right is what a user sees as a pause."
    )
    return "Time between tokens", caption


def _with_gaps(runs: Sequence[Run], mode: str) -> Run | None:
    return fastest([run for run in runs if run.token_gaps_ms is not None], mode)


def _timeline(figure: Any, runs: Sequence[Run]) -> tuple[str, str] | None:
    traced = by_link([run for run in runs if run.timeline])
    if not traced:
        return None
    # The link for which most modes were traced; of several, an ideal one, in the middle.
    most = max(len({run.mode for run in over}) for over in traced.values())
    links = [link for link, over in traced.items() if len({run.mode for run in over}) == most]
    links = [link for link in links if link == LinkRecord(link.rtt_ms)] or links
    link = links[len(links) // 2]
    found = [(mode, fastest(traced[link], mode)) for mode in TIMELINE_MODES]
    shown = [(mode, run) for mode, run in found if run is not None]
    if not shown:
        return None
    longest = max(span.end_s for _, run in shown for span in run.timeline or ())
    end_s = min(longest, max(0.5, 10 * link.rtt_ms / 1e3))  # about ten round trips can be told apart
    figure.set_size_inches(WIDTH_IN, 1.2 + 1.35 * len(shown))
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (mode, run) in zip(panels, shown, strict=True):
        _swim(axes, mode, run, end_s)
    panels[-1].set_xlabel("time since the session began (ms)")
    panels[-1].set_xlim(0, end_s * 1e3)
    caption = (
        "The first moments of one session in each mode, on the same time axis. A slanted line is a message on its "
        "way, from when it was sent to when it came."
    )
    return f"Timeline of one session, {_link_title(link)}", caption


def _swim(axes: Any, mode: str, run: Run, end_s: float) -> None:
    for row, lane in enumerate(LANES):
        spans = [span for span in run.timeline or () if span.lane == lane and span.start_s < end_s]
        if lane in ("up", "down"):  # many messages are on their way at once
            for span in spans:
                ends_ms = (span.start_s * 1e3, span.end_s * 1e3)
                axes.plot(ends_ms, (row - 0.36, row + 0.36), color=COLOURS[mode], linewidth=0.9, solid_capstyle="butt")
        else:
            bars = [(span.start_s * 1e3, (span.end_s - span.start_s) * 1e3) for span in spans]
            colour = FAINT if lane == "idle" else COLOURS[mode]
            axes.broken_barh(bars, (row - 0.36, 0.72), facecolor=colour, edgecolor="white", linewidth=0.4)
    axes.set_yticks(range(len(LANES)), [LANE_NAMES[lane] for lane in LANES], fontsize=8)
    axes.set_ylim(len(LANES) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    length = f", {run.sync_length} tokens a round" if run.sync_length is not None else ""
    speed = f": {run.tokens_per_second:.1f} tokens per second" if run.tokens_per_second else ""
    axes.set_title(f"{mode}{length}{speed}", color=COLOURS[mode], fontweight="bold")


def _bytes(figure: Any, runs: Sequence[Run]) -> tuple[str, str] | None:
    known = [run for run in runs if None not in (run.uplink_bytes_per_token, run.downlink_bytes_per_token)]
    if not known:
        return None
    links = by_link(known)
    chosen = _evenly(list(links), 6)
    modes = [mode for mode in MODES if any(fastest(links[link], mode) for link in chosen)]
    figure.set_size_inches(WIDTH_IN, 4.3)
    axes = figure.subplots()
    width = 0.8 / len(modes)
    for place, mode in enumerate(modes):
        placed = [(n, run) for n, link in enumerate(chosen) if (run := fastest(links[link], mode)) is not None]
        at = [n + (place - (len(modes) - 1) / 2) * width for n, _ in placed]
        up = [run.uplink_bytes_per_token or 0.0 for _, run in placed]
        down = [run.downlink_bytes_per_token or 0.0 for _, run in placed]
        bar = {"width": 0.88 * width, "edgecolor": "white", "linewidth": 0.5}
        axes.bar(at, up, **bar, facecolor=COLOURS[mode], label=f"{_name(mode)}, up")
        axes.bar(at, down, **bar, bottom=up, facecolor=_pale(COLOURS[mode]), label=f"{_name(mode)}, down")
        for x, height in zip(at, (a + b for a, b in zip(up, down, strict=True)), strict=True):
            axes.annotate(f"{height:.0f}", (x, height), (0, 2), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xticks(range(len(chosen)), ["\n".join(link_parts(link)) for link in chosen])
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("link (round-trip time)")
    axes.set_ylabel("bytes per token")
    figure.legend(loc="outside lower left", ncols=len(modes), handlelength=1.2)
    return (
        "Bytes per token, up and down",
        "Sent (full colour) and received (pale) by the edge, a committed token.",
    )


def _arrivals(figure: Any, runs: Sequence[Run], link: LinkRecord) -> tuple[str, str] | None:
    """Draw speed over time on a link that changes, and below it how the link was."""
    over_link = [run for run in runs if run.link == link and run.arrivals_s]
    shown = [(mode, run) for mode in COURSE_MODES if (run := fastest(over_link, mode)) is not None]
    if not shown:
        return None
    end_s = max(run.arrivals_s[-1] for _, run in shown if run.arrivals_s)
    trace = _trace_of(link)
    figure.set_size_inches(WIDTH_IN, 5.2 if trace else 4.3)
    panels = figure.subplots(
        2 if trace else 1, 1, sharex=True, squeeze=False, height_ratios=(3.4, 1) if trace else (1,)
    )[:, 0]
    lines: dict[str, Any] = {}
    for mode, run in shown:
        at_s, speeds = speed_over_time(run.arrivals_s or ())
        style = {"color": COLOURS[mode], "linestyle": STYLES[mode], "zorder": 4 if mode == "outrider" else 3}
        (lines[mode],) = panels[0].plot(at_s, speeds, **style)
    panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel("tokens per second")
    if trace:
        _strip(panels[1], trace, end_s)
    panels[-1].set_xlim(0, end_s)
    panels[-1].set_xlabel("time since the text was asked for (s)")
    _legend(figure, lines)
    caption = (
        f"The longest text, the same in every mode; tokens of the {COURSE_WINDOW_S:g} s around each moment. Every text "
        "meets the link from the beginning of its trace, and a line ends where its text is complete."
    )
    return f"Speed on a link that changes, {link.trace}", caption


def speed_over_time(arrivals_s: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return moments (s) and tokens a second around them, from when each token came (rising, s).

    The window is `COURSE_WINDOW_S` wide with the moment in its middle; what of it lies before 0 or after the last
    token does not count.
    """
    end_s = arrivals_s[-1]
    at_s = [n * COURSE_STEP_S for n in range(int(end_s / COURSE_STEP_S) + 1)]
    speeds = []
    for at in at_s:
        low, high = max(0.0, at - COURSE_WINDOW_S / 2), min(end_s, at + COURSE_WINDOW_S / 2)
        count = bisect.bisect_right(arrivals_s, high) - bisect.bisect_right(arrivals_s, low)
        speeds.append(count / (high - low) if high > low else 0.0)
    return at_s, speeds


def _trace_of(link: LinkRecord) -> LinkTrace | None:
    """Return the trace that was played; None where its name is no longer known."""
    try:
        return find_trace(link.trace or "")
    except ConfigError:
        return None


def _strip(axes: Any, trace: LinkTrace, end_s: float) -> None:
    """Draw the link's round trip, and the rate from the edge where that changes."""
    rounds = math.ceil(end_s / trace.duration_s)
    points = [replace(p, time_s=p.time_s + n * trace.duration_s) for n in range(rounds) for p in trace.points]
    points = [point for point in points if point.time_s < end_s]
    points.append(replace(points[-1], time_s=end_s))
    at_s = [point.time_s for point in points]
    axes.plot(at_s, [point.rtt_ms for point in points], drawstyle="steps-post", color=INK, linewidth=1.2)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("round trip\n(ms)")
    if _rate_changes(points):
        rates = axes.twinx()
        rates.plot(
            at_s, [p.up_mbit for p in points], drawstyle="steps-post", color=UPLINK, linewidth=1.2, linestyle="--"
        )
        rates.set_ylim(bottom=0)
        rates.set_ylabel("uplink\n(Mbit/s)", color=UPLINK)
        rates.tick_params(axis="y", colors=UPLINK)
        rates.spines["right"].set_visible(True)
        rates.grid(visible=False)


def _rate_changes(points: Sequence[TracePoint]) -> bool:
    """Return whether rates vary by more than the usual flutter."""
    rates = [point.up_mbit for point in points if math.isfinite(point.up_mbit)]
    return bool(rates) and max(rates) > 1.5 * min(rates)


def _families(runs: Sequence[Run]) -> list[list[Run]]:
    """Group runs over links that differ in their round-trip time alone, most links first.

    What had no link at all, as transformers' own decoding, stands in the first.
    """
    without_link = [run for run in runs if run.link == LinkRecord(0.0)]
    found: dict[LinkRecord, list[Run]] = {}
    for run in runs:
        if run.link != LinkRecord(0.0):
            found.setdefault(replace(run.link, rtt_ms=0.0), []).append(run)
    families = sorted(found.values(), key=lambda family: -len(by_link(family)))
    if families:
        nowhere = replace(families[0][0].link, rtt_ms=0.0)
        families[0] += [replace(run, link=nowhere) for run in without_link]
    return families


def _family_name(link: LinkRecord) -> str:
    if replace(link, rtt_ms=0.0) == LinkRecord(0.0):
        return "unlimited bandwidth, no jitter"
    rates = ("unlimited" if rate is None else f"{rate:g} Mbit/s" for rate in (link.up_mbit, link.down_mbit))
    parts = (
        "{} up, {} down".format(*rates),
        f"±{link.jitter_ms:g} ms" if link.jitter_ms else "",
        link.trace or "",
    )
    return ", ".join(part for part in parts if part)


def _link_title(link: LinkRecord) -> str:
    return f"round trip {link_name(link)}"


def _name(mode: str) -> str:
    return NAMES.get(mode, mode)


def _pale(colour: str) -> str:
    """Mix `#rrggbb` with white."""
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(255 - 0.42 * (255 - part)):02x}" for part in parts)


def _evenly(links: Sequence[LinkRecord], most: int) -> list[LinkRecord]:
    """Return at most `most` of the links, the first and the last among them."""
    if len(links) <= most:
        return list(links)
    return [links[round(n * (len(links) - 1) / (most - 1))] for n in range(most)]
