"""A benchmark as PNG files. Every mode has a colour, and a line style so that nothing depends on colour alone."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from outrider.bench.bench_metrics import grouped
from outrider.bench.bench_settings import MODES
from outrider.bench.benchmark.bench_record import LANES, BenchmarkRun
from outrider.bench.benchmark.bench_table import Condition, by_link, fastest
from outrider.bench.links import LinkRecord, link_name, link_parts
from outrider.bench.plot import FAINT, GREY, HUES, INK, canvas, save_plot, styled
from outrider.deploy.link.link_traces import LinkTrace, find_trace
from outrider.proto.errors import ConfigError

WIDTH_IN = 9.0
MAX_PANELS = 3  # beside each other
LINES: dict[str, dict[str, Any]] = {
    mode: {"color": colour, "linestyle": line, "marker": marker, "zorder": 4 if mode == "outrider" else 3}
    for mode, colour, line, marker in (
        ("cloud", GREY, "--", "s"),
        ("sync", HUES[1], "-", "^"),
        ("colocated", INK, "-", "v"),
        ("edge", HUES[5], "--", "o"),
        ("outrider", HUES[0], "-", "o"),
    )
}
NAMES = {mode: mode for mode in MODES} | {
    "sync": "sync (best length)",
    "colocated": "drafter beside target (best length)",
    "edge": "edge alone",
}
LANE_NAMES = {"draft": "drafting", "up": "uplink", "verify": "verifying", "down": "downlink", "idle": "idle"}
MEASURED = ("cloud", "sync", "colocated", "outrider")
DRAFTING = ("sync", "colocated", "edge", "outrider")
SPEED_WINDOW_S = 0.5
SPEED_STEP_S = 0.05
LOG_FROM = 20.0  # a range of round-trip times wider than this gets a logarithmic axis
MIN_GAP_MS = 1.0  # tokens of one commit come at once; a logarithmic axis has no place for that


@dataclass(frozen=True, slots=True)
class Picture:
    """A file that was drawn, and its texts."""

    path: Path
    title: str
    caption: str


def draw(condition: Condition, runs: Sequence[BenchmarkRun], folder: Path, stem: str) -> list[Picture]:
    """Draw the plots of one condition for which there are metrics, as `folder/stem-….png`.

    Tokens a second needs links that differ in their round-trip time alone; the others need the fields that they show.
    """
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    traced = by_link([run for run in runs if run.arrivals_s])
    drawings = [("speed", _speed), ("drafting", _drafting), ("gaps", _gaps), ("timeline", _timeline), ("bytes", _bytes)]
    drawings += [(f"trace-{number}", partial(_arrivals, link=link)) for number, link in enumerate(traced, 1)]
    pictures = []
    with styled():
        for kind, drawing in drawings:
            figure = canvas(layout=ConstrainedLayoutEngine(wspace=0.05))
            texts = drawing(figure, runs)
            if texts is None:
                continue
            title, caption = texts
            figure.suptitle(f"{title}\n", x=0.01, ha="left", fontsize=12, fontweight="bold", linespacing=1.5)
            figure.text(0.01, 1 - 0.36 / figure.get_figheight(), str(condition), va="top", fontsize=9, color="#555555")
            path = folder / f"{stem}-{kind}.png"
            save_plot(figure, path, "report")
            pictures.append(Picture(path, title, caption))
    return pictures


def _speed(figure: Any, runs: Sequence[BenchmarkRun]) -> tuple[str, str] | None:
    families = [family for family in _families(runs) if len(by_link(family)) > 1][:MAX_PANELS]
    if not families:
        return None
    figure.set_size_inches(WIDTH_IN if len(families) > 1 else 7.5, 4.6)
    panels = figure.subplots(1, len(families), sharey=True, squeeze=False)[0]
    lines: dict[str, Any] = {}
    drawn = [
        _over_rtt(axes, family, "tokens_per_second", MODES, lines)
        for axes, family in zip(panels, families, strict=True)
    ]
    panels[0].set_ylim(bottom=0)  # of all panels, now that all lines are there
    for axes, family, ends in zip(panels, families, drawn, strict=True):
        _axis_of_rtt(axes, [run.link.rtt_ms for run in family], 0.035 * len(families))
        if len(families) > 1:
            axes.set_title(_family_name(family[0].link))
        else:
            _label_ends(axes, ends)
    if len(families) > 1:
        _legend(figure, lines)
    panels[0].set_ylabel("tokens per second")
    caption = "Of several lengths, the best at each round-trip time."
    if any(run.link == LinkRecord(0.0) for run in runs):
        caption += " At 0 ms there is no link, and no limit to any rate."
    return "Tokens per second against round-trip time", caption


def _drafting(figure: Any, runs: Sequence[BenchmarkRun]) -> tuple[str, str] | None:
    """Draw the drafting a token at the verifier and at the edge."""
    fields = {"cloud_drafting_ms_per_token": "at the verifier", "edge_drafting_ms_per_token": "at the edge"}
    known = [run for run in runs if run.mode in DRAFTING and all(getattr(run, name) is not None for name in fields)]
    families = [family for family in _families(known) if len(by_link(family)) > 1]
    if not families or not any(run.cloud_drafting_ms_per_token for run in families[0]):
        return None
    figure.set_size_inches(WIDTH_IN, 3.6)
    panels = figure.subplots(1, len(fields), sharey=True, squeeze=False)[0]
    lines: dict[str, Any] = {}
    for axes, (name, where) in zip(panels, fields.items(), strict=True):
        _over_rtt(axes, families[0], name, DRAFTING, lines)
        _axis_of_rtt(axes, [run.link.rtt_ms for run in families[0]], 0.07)
        axes.set_title(where)
    panels[0].set_ylim(bottom=0)
    _legend(figure, lines)
    panels[0].set_ylabel("drafting, ms per token")
    return "Drafting per token, at either end", "A drafter's time in all its jobs, over the committed tokens."


def _over_rtt(
    axes: Any, family: Sequence[BenchmarkRun], field: str, modes: Sequence[str], lines: dict[str, Any]
) -> list[tuple[float, float, str]]:
    """Draw a field against the round-trip time, a line for each mode, put into `lines`; return their right ends."""
    ends = []
    for mode in modes:
        shown = [run for over in by_link(family).values() for run in _by_mode(over, (mode,))]
        points = [(run.link.rtt_ms, getattr(run, field) or 0.0) for run in shown]
        if points:
            (lines[mode],) = axes.plot(*zip(*points, strict=True), **LINES[mode], clip_on=False)
            ends.append((*points[-1], mode))
    axes.set_xlabel("round-trip time (ms)")
    return ends


def _axis_of_rtt(axes: Any, rtts_ms: Sequence[float], min_share: float) -> None:
    """Scale the axis linearly, or logarithmically where the range is wide; 0 has its own place left of the logarithm.

    The ticks are the round-trip times that were measured, named where they are the share `min_share` of the axis or
    more to the right of the name before.
    """
    rtts_ms = sorted(set(rtts_ms))
    positive = [rtt for rtt in rtts_ms if rtt > 0]
    if 0 in rtts_ms and positive and positive[-1] > LOG_FROM / 2 * positive[0]:
        axes.set_xscale("symlog", linthresh=positive[0], linscale=0.6)
    elif positive and positive[-1] > LOG_FROM * positive[0]:
        axes.set_xscale("log")
    axes.autoscale_view()
    to_share = axes.transData + axes.transAxes.inverted()
    last, names = -1.0, []
    for rtt in rtts_ms:
        share = to_share.transform((rtt, 0))[0]
        shown = share - last >= min_share
        names.append(f"{rtt:g}" if shown else "")
        last = share if shown else last
    axes.set_xticks(rtts_ms, names)
    axes.minorticks_off()


def _legend(figure: Any, lines: Mapping[str, Any]) -> None:
    modes = [mode for mode in MODES if mode in lines]
    handles, names = [lines[mode] for mode in modes], [NAMES[mode] for mode in modes]
    figure.legend(handles, names, loc="outside lower left", ncols=min(4, len(modes)), handlelength=2.6)


def _label_ends(axes: Any, ends: Sequence[tuple[float, float, str]]) -> None:
    """Name the lines at their right ends, pushed apart where names would overlap, or beside the last point."""
    last = max(x for x, _, _ in ends)
    beside: dict[str, Any] = {"textcoords": ("axes fraction", "data"), "annotation_clip": False}
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.8}
    inside: dict[str, Any] = {"textcoords": "offset points", "bbox": box, "zorder": 5}
    for at_end in (True, False):
        labels = sorted((y, x, mode) for x, y, mode in ends if (x == last) == at_end)
        heights = _spread([y for y, _, _ in labels], 0.058 * axes.get_ylim()[1])
        for (y, x, mode), height in zip(labels, heights, strict=True):
            points: tuple[Any, Any] = ((x, y), (1.02, height)) if at_end else ((x, height), (8, 0))
            style = beside if at_end else inside
            axes.annotate(NAMES[mode], *points, color=LINES[mode]["color"], va="center", **style)


def _spread(values: Sequence[float], gap: float) -> list[float]:
    """Return the rising `values`, moved as little as need be so that neighbours are `gap` apart."""
    groups: list[list[float]] = []  # values that touch stand around their mean

    def place(group: Sequence[float], index: int) -> float:
        return sum(group) / len(group) + gap * (index - (len(group) - 1) / 2)

    for value in values:
        groups.append([value])
        while len(groups) > 1 and place(groups[-1], 0) - place(groups[-2], len(groups[-2]) - 1) < gap:
            groups[-2:] = [groups[-2] + groups[-1]]
    return [place(group, index) for group in groups for index in range(len(group))]


def _gaps(figure: Any, runs: Sequence[BenchmarkRun]) -> tuple[str, str] | None:
    with_gaps = by_link([run for run in runs if run.token_gaps_ms is not None])
    links = {link: known for link, over in with_gaps.items() if (known := _by_mode(over))}
    if not links:
        return None
    chosen = _evenly(list(links), MAX_PANELS)
    figure.set_size_inches(WIDTH_IN if len(chosen) > 1 else 6.0, 4.3)
    panels = figure.subplots(1, len(chosen), sharex=True, sharey=True, squeeze=False)[0]
    longest = max(gap for link in chosen for run in links[link] for gap in run.token_gaps_ms or ())
    end_ms = max(longest, 10 * MIN_GAP_MS)
    lines: dict[str, Any] = {}
    for axes, link in zip(panels, chosen, strict=True):
        for run in links[link]:
            gaps = [max(gap, MIN_GAP_MS) for gap in run.token_gaps_ms or ()]
            shares = [100 * index / (len(gaps) - 1) for index in range(len(gaps))]
            (lines[run.mode],) = axes.plot(gaps, shares, **LINES[run.mode] | {"marker": ""})
        axes.set_xscale("log")
        axes.set_xlim(MIN_GAP_MS, end_ms * 1.1)
        axes.set_ylim(0, 101)
        ticks = [10.0**power for power in range(math.ceil(math.log10(end_ms)) + 1)]
        ticks = [tick for tick in ticks if tick <= axes.get_xlim()[1]]
        axes.set_xticks(ticks, [f"≤ {tick:g}" if tick == MIN_GAP_MS else f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_title(f"round trip {link_name(link)}")
        axes.set_xlabel("time between tokens (ms)")
    panels[0].set_ylabel("share of tokens that come within (%)")
    _legend(figure, lines)
    caption = (
        f"Tokens of one commit come together and count as {MIN_GAP_MS:g} ms or less. A line further up and to the "
        "left is better; where it bends to the right is what a user sees as a pause."
    )
    return "Time between tokens", caption


def _timeline(figure: Any, runs: Sequence[BenchmarkRun]) -> tuple[str, str] | None:
    traced = by_link([run for run in runs if run.timeline])
    if not traced:
        return None
    # The link with timelines of most modes; among several, an ideal one, in the middle.
    modes = {link: len({run.mode for run in over}) for link, over in traced.items()}
    links = [link for link in traced if modes[link] == max(modes.values())]
    links = [link for link in links if link == LinkRecord(link.rtt_ms)] or links
    link = links[len(links) // 2]
    shown = _by_mode(traced[link], MEASURED[::-1])
    if not shown:
        return None
    longest = max(span.end_s for run in shown for span in run.timeline or ())
    end_s = min(longest, max(0.5, 10 * link.rtt_ms / 1e3))  # about ten round trips can be told apart
    figure.set_size_inches(WIDTH_IN, 1.2 + 1.35 * len(shown))
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for axes, run in zip(panels, shown, strict=True):
        _swim(axes, run, end_s)
    panels[-1].set_xlabel("time since the session began (ms)")
    panels[-1].set_xlim(0, end_s * 1e3)
    caption = (
        "The first moments of one session in each mode, on the same time axis. A slanted line is a message on its "
        "way, from when it was sent to when it came."
    )
    return f"Timeline of one session, round trip {link_name(link)}", caption


def _swim(axes: Any, run: BenchmarkRun, end_s: float) -> None:
    colour = LINES[run.mode]["color"]
    for row, lane in enumerate(LANES):
        spans = [span for span in run.timeline or () if span.lane == lane and span.start_s < end_s]
        if lane in ("up", "down"):  # many messages are on their way at once
            for span in spans:
                ends_ms = (span.start_s * 1e3, span.end_s * 1e3)
                axes.plot(ends_ms, (row - 0.36, row + 0.36), color=colour, linewidth=0.9, solid_capstyle="butt")
        else:
            bars = [(span.start_s * 1e3, (span.end_s - span.start_s) * 1e3) for span in spans]
            fill = FAINT if lane == "idle" else colour
            axes.broken_barh(bars, (row - 0.36, 0.72), facecolor=fill, edgecolor="white", linewidth=0.4)
    axes.set_yticks(range(len(LANES)), [LANE_NAMES[lane] for lane in LANES], fontsize=8)
    axes.set_ylim(len(LANES) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    length = f", {run.sync_length} tokens a round" if run.sync_length is not None else ""
    speed = f": {run.tokens_per_second:.1f} tokens per second" if run.tokens_per_second else ""
    axes.set_title(f"{run.mode}{length}{speed}", color=colour, fontweight="bold")


def _bytes(figure: Any, runs: Sequence[BenchmarkRun]) -> tuple[str, str] | None:
    from matplotlib.colors import to_rgb

    known = [run for run in runs if None not in (run.uplink_bytes_per_token, run.downlink_bytes_per_token)]
    if not known:
        return None
    links = by_link(known)
    chosen = _evenly(list(links), 6)
    placed = {
        mode: [(n, run) for n, link in enumerate(chosen) for run in _by_mode(links[link], (mode,))] for mode in MODES
    }
    modes = [mode for mode in MODES if placed[mode]]
    figure.set_size_inches(WIDTH_IN, 4.3)
    axes = figure.subplots()
    width = 0.8 / len(modes)
    bar = {"width": 0.88 * width, "edgecolor": "white", "linewidth": 0.5}
    for place, mode in enumerate(modes):
        at = [n + (place - (len(modes) - 1) / 2) * width for n, _ in placed[mode]]
        up = [run.uplink_bytes_per_token or 0.0 for _, run in placed[mode]]
        down = [run.downlink_bytes_per_token or 0.0 for _, run in placed[mode]]
        colour, name = to_rgb(LINES[mode]["color"]), NAMES[mode]
        pale = tuple(1 - 0.42 * (1 - part) for part in colour)
        axes.bar(at, up, **bar, facecolor=colour, label=f"{name}, up")
        bars = axes.bar(at, down, **bar, bottom=up, facecolor=pale, label=f"{name}, down")
        axes.bar_label(bars, [f"{a + b:.0f}" for a, b in zip(up, down, strict=True)], padding=2, fontsize=8)
    axes.set_xticks(range(len(chosen)), ["\n".join(link_parts(link)) for link in chosen])
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("link (round-trip time)")
    axes.set_ylabel("bytes per token")
    figure.legend(loc="outside lower left", ncols=min(3, len(modes)), handlelength=1.2)
    return "Bytes per token, up and down", "Sent (full colour) and received (pale) by the edge, a committed token."


def _arrivals(figure: Any, runs: Sequence[BenchmarkRun], link: LinkRecord) -> tuple[str, str] | None:
    """Draw speed over time on a link that changes, and below it the link."""
    shown = _by_mode([run for run in runs if run.link == link and run.arrivals_s], MEASURED)
    if not shown:
        return None
    end_s = max(run.arrivals_s[-1] for run in shown if run.arrivals_s)
    trace = _trace_of(link)
    figure.set_size_inches(WIDTH_IN, 5.2 if trace else 4.3)
    heights = (3.4, 1) if trace else (1,)
    panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    lines: dict[str, Any] = {}
    for run in shown:
        (lines[run.mode],) = panels[0].plot(*speed_over_time(run.arrivals_s or ()), **LINES[run.mode] | {"marker": ""})
    panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel("tokens per second")
    if trace:
        _strip(panels[1], trace, end_s)
    panels[-1].set_xlim(0, end_s)
    panels[-1].set_xlabel("time since the request (s)")
    _legend(figure, lines)
    caption = (
        f"The longest text, the same in every mode; tokens of the {SPEED_WINDOW_S:g} s around each moment. Every text "
        "meets the link from the beginning of its trace, and a line ends where its text is complete."
    )
    return f"Speed on a link that changes, {link.trace}", caption


def speed_over_time(arrivals_s: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return moments (s) and tokens a second around them, from the times at which tokens came (rising, s).

    The window is `SPEED_WINDOW_S` wide with the moment in its middle; any part of it before 0 or after the last token
    does not count.
    """
    end_s = arrivals_s[-1]
    at_s = [n * SPEED_STEP_S for n in range(int(end_s / SPEED_STEP_S) + 1)]
    speeds = []
    for at in at_s:
        low, high = max(0.0, at - SPEED_WINDOW_S / 2), min(end_s, at + SPEED_WINDOW_S / 2)
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
    known = [point.up_mbit for point in points if math.isfinite(point.up_mbit)]
    if known and max(known) > 1.5 * min(known):  # more than the usual flutter
        rates, colour = axes.twinx(), HUES[4]
        style = {"drawstyle": "steps-post", "color": colour, "linewidth": 1.2, "linestyle": "--"}
        rates.plot(at_s, [point.up_mbit for point in points], **style)
        rates.set_ylim(bottom=0)
        rates.set_ylabel("uplink\n(Mbit/s)", color=colour)
        rates.tick_params(axis="y", colors=colour)
        rates.spines["right"].set_visible(True)
        rates.grid(visible=False)


def _by_mode(runs: Sequence[BenchmarkRun], modes: Sequence[str] = MODES) -> list[BenchmarkRun]:
    """Return the fastest run of each of the modes that have one, in the order of `modes`."""
    return [run for mode in modes if (run := fastest(runs, mode)) is not None]


def _families(runs: Sequence[BenchmarkRun]) -> list[list[BenchmarkRun]]:
    """Group runs over links that differ in their round-trip time alone, most links first.

    Runs without any link, such as those of transformers, join the first group.
    """
    without_link = [run for run in runs if run.link == LinkRecord(0.0)]
    with_link = grouped((run for run in runs if run.link != LinkRecord(0.0)), lambda run: replace(run.link, rtt_ms=0.0))
    families = sorted(with_link.values(), key=lambda family: -len(by_link(family)))
    if families:
        nowhere = replace(families[0][0].link, rtt_ms=0.0)
        families[0] += [replace(run, link=nowhere) for run in without_link]
    return families


def _family_name(link: LinkRecord) -> str:
    if replace(link, rtt_ms=0.0) == LinkRecord(0.0):
        return "unlimited bandwidth, no jitter"
    rates = ("unlimited" if rate is None else f"{rate:g} Mbit/s" for rate in (link.up_mbit, link.down_mbit))
    jitter = f"±{link.jitter_ms:g} ms" if link.jitter_ms else ""
    parts = ("{} up, {} down".format(*rates), jitter, link.trace)
    return ", ".join(part for part in parts if part)


def _evenly(links: Sequence[LinkRecord], count: int) -> list[LinkRecord]:
    """Return at most `count` of the links, the first and the last among them."""
    if len(links) <= count:
        return list(links)
    return [links[round(n * (len(links) - 1) / (count - 1))] for n in range(count)]
