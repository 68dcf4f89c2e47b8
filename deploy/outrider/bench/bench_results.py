"""Results of a benchmark: its runs as JSON, as tables for a terminal of 100 columns, and as a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

from pydantic.dataclasses import dataclass
from rich.console import Group

from outrider.bench.bench_metrics import grouped
from outrider.bench.bench_settings import MODES
from outrider.bench.environment import Environment
from outrider.bench.links import LinkRecord, link_name, link_parts
from outrider.bench.record import RECORD, Count, Metric, one_of, write
from outrider.bench.table import UNKNOWN, Block, Grid, draw, number
from outrider.proto.errors import ConfigError
from outrider.proto.plumbing.extras import lacking

LEGEND = (
    "tok/s: tokens a second, all sessions together; ratio: to cloud streaming over the same link; accept: chance that "
    "a draft of the edge is right, given those before it; ttft: time to the first token, gap: time between tokens, "
    "both ms; same: texts identical to cloud streaming; steps, rows: of the target, a token; cloud ms, edge ms: "
    "drafting at the verifier and at the edge, a token; up B, down B: bytes a token; over: ms of a step beside forward "
    "pass, sampling and waiting. colocated: the same drafter beside the target alone; edge: outrider without drafts of "
    "the verifier's own. Ratios are of tokens a second, on the same link; above 1, outrider is faster. drafting: cloud "
    "drafting a token, as a share of colocated's"
)
HEADINGS = ("link", "mode", "tok/s", "ratio", "accept", "ttft", "gap p50", "gap p99", "same")
WORK_HEADINGS = ("link", "mode", "steps", "rows", "cloud ms", "edge ms", "up B", "down B", "over")
RATIO_HEADINGS = ("link", "mode", "/ cloud", "/ best sync", "/ best colocated", "best sync length", "drafting")
EXACT_MS = 100  # from here on, tenths of a millisecond are noise
NAMES = {mode: mode for mode in MODES} | {
    "sync": "sync (best length)",
    "colocated": "drafter beside target (best length)",
    "edge": "edge alone",
}
# Colour, line and marker: nothing depends on colour alone. The colours are those of Okabe and Ito.
LINES = {
    "cloud": ("#7a7a7a", "--", "s"),
    "sync": ("#d55e00", "-", "^"),
    "colocated": ("#222222", "-", "v"),
    "edge": ("#b88600", "--", "o"),
    "outrider": ("#0072b2", "-", "o"),
}
STYLE: Any = {
    "font.size": 9,
    "axes.edgecolor": "#999999",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e8e8e8",
    "lines.linewidth": 1.9,
    "lines.markersize": 5,
    "legend.frameon": False,
}
DPI = 150
WIDE = 20.0  # times the shortest round trip, from which on the axis is logarithmic


@dataclass(frozen=True, slots=True, config=RECORD)
class BenchmarkRun:
    """One way of decoding the prompts over one link.

    Attributes:
        mode: one of `MODES`.
        link: link between edge and verifier.
        length: drafts of a round of `sync`, or before every step of `colocated`; None: the mode has no such number.
        tokens: tokens committed by all sessions together.
        seconds: time in which they were committed.
        tokens_per_second: rate of all sessions together.
        steps_per_token: target steps a committed token.
        rows_per_token: rows of these steps a committed token, those of prompts left out.
        cloud_drafting_ms_per_token: time of the verifier's own drafter a committed token.
        edge_drafting_ms_per_token: time of the edge's drafters a committed token, catching up included.
        acceptance: chance that a draft is right, given that those before it in its chain were; None: none was compared.
        ttft_ms_p50: median time to a session's first token.
        token_gap_ms_p50, token_gap_ms_p99: quantiles of the time between tokens that reach the user.
        uplink_bytes_per_token, downlink_bytes_per_token: bytes sent and received by the edge; None: there is no link.
        overhead_ms_p50: median time of all between two steps but waiting, forward pass and sampling: events, planning,
            commits, threads; None: no step was a usual one.
        identical_to_cloud: whether every text was that of cloud streaming.
    """

    mode: Annotated[str, one_of(*MODES)]
    link: LinkRecord
    length: Count | None
    tokens: Count
    seconds: Metric
    tokens_per_second: Metric
    steps_per_token: Metric
    rows_per_token: Metric
    cloud_drafting_ms_per_token: Metric
    edge_drafting_ms_per_token: Metric
    acceptance: Metric | None
    ttft_ms_p50: Metric
    token_gap_ms_p50: Metric
    token_gap_ms_p99: Metric
    uplink_bytes_per_token: Metric | None
    downlink_bytes_per_token: Metric | None
    overhead_ms_p50: Metric | None
    identical_to_cloud: bool

    @property
    def name(self) -> str:
        """Mode with the length of its drafts, such as `sync 4`."""
        return self.mode if self.length is None else f"{self.mode} {self.length}"


@dataclass(frozen=True, slots=True, config=RECORD)
class Benchmark:
    """Runs of the same prompts under one load; `min_step_ms` is the shortest time of a target step, 0: its own."""

    environment: Environment
    min_step_ms: Metric
    temperature: Metric
    sessions: Count
    runs: tuple[BenchmarkRun, ...]

    @property
    def title(self) -> str:
        sessions = "1 session" if self.sessions == 1 else f"{self.sessions} sessions"
        step = f"target step at least {self.min_step_ms:g} ms" if self.min_step_ms else "target at its own speed"
        return f"T = {self.temperature:g}, {sessions}, {step}"


def by_link(benchmark: Benchmark) -> dict[LinkRecord, list[BenchmarkRun]]:
    """Group runs by link, the shortest first, and sort those over a link by mode and length."""

    def order(run: BenchmarkRun) -> tuple[object, ...]:
        link = run.link
        rates = tuple(-1.0 if rate is None else -rate for rate in (link.up_mbit, link.down_mbit))
        return link.rtt_ms, link.jitter_ms, rates, link.trace or "", MODES.index(run.mode), run.length or 0

    return grouped(sorted(benchmark.runs, key=order), lambda run: run.link)


def fastest(runs: Sequence[BenchmarkRun], mode: str) -> BenchmarkRun | None:
    """Return the fastest run of a mode, that of the best length; None: there is none."""
    return max((run for run in runs if run.mode == mode), key=lambda run: run.tokens_per_second, default=None)


def tables(benchmark: Benchmark) -> Group:
    """Return the tables of speed and work of every run, and of the main ratios."""
    grids = (speed(benchmark), work(benchmark), ratios(benchmark))
    return draw([grid for grid in grids if grid.blocks], f"{LEGEND}.")


def speed(benchmark: Benchmark) -> Grid:
    """Return the table of speeds: a row for each run, a block for each link."""
    blocks = []
    for link, runs in by_link(benchmark).items():
        cloud = fastest(runs, "cloud")
        rows = [
            (
                run.name,
                number(run.tokens_per_second, 1),
                _ratio(run, cloud),
                number(run.acceptance, 3),
                *(_milliseconds(ms) for ms in (run.ttft_ms_p50, run.token_gap_ms_p50, run.token_gap_ms_p99)),
                "yes" if run.identical_to_cloud else "NO",
            )
            for run in runs
        ]
        blocks.append(_named(link, rows))
    return Grid(f"Speed: {benchmark.title}", HEADINGS, 2, blocks)


def work(benchmark: Benchmark) -> Grid:
    """Return the table of what a token costs: a row for each run, a block for each link."""
    fields = {
        "steps_per_token": 3,
        "rows_per_token": 2,
        "cloud_drafting_ms_per_token": 2,
        "edge_drafting_ms_per_token": 2,
        "uplink_bytes_per_token": 1,
        "downlink_bytes_per_token": 1,
        "overhead_ms_p50": 2,
    }
    blocks = [
        _named(link, [(run.name, *(number(getattr(run, field), fields[field]) for field in fields)) for run in runs])
        for link, runs in by_link(benchmark).items()
    ]
    return Grid(f"Work: {benchmark.title}", WORK_HEADINGS, 2, blocks)


def ratios(benchmark: Benchmark) -> Grid:
    """Return the table of ratios: a row for each run of edges that draft ahead, a block for each link."""
    blocks = []
    for link, runs in by_link(benchmark).items():
        cloud, sync, colocated = (fastest(runs, mode) for mode in ("cloud", "sync", "colocated"))
        rows = [
            (
                run.name,
                *(_ratio(run, other) for other in (cloud, sync, colocated)),
                UNKNOWN if sync is None else str(sync.length),
                _drafting_share(run, colocated),
            )
            for run in runs
            if run.mode in ("edge", "outrider")
        ]
        if rows:
            blocks.append([(link_name(link), *rows[0]), *(("", *row) for row in rows[1:])])
    return Grid(f"Ratios: {benchmark.title}", RATIO_HEADINGS, 2, blocks)


def _named(link: LinkRecord, rows: Sequence[Sequence[str]]) -> Block:
    """Return the rows below a link's name, one part of it in each: a table has more height to spare than width."""
    parts = link_parts(link)
    cells = [*parts[: len(rows) - 1], " ".join(parts[len(rows) - 1 :]), *[""] * len(rows)]
    return [(cell, *row) for cell, row in zip(cells, rows, strict=False)]


def _milliseconds(value: float) -> str:
    return number(value, 0 if value >= EXACT_MS else 1)


def _ratio(run: BenchmarkRun, other: BenchmarkRun | None) -> str:
    return UNKNOWN if other is None else f"{run.tokens_per_second / other.tokens_per_second:.2f}"


def _drafting_share(run: BenchmarkRun, colocated: BenchmarkRun | None) -> str:
    if colocated is None or not colocated.cloud_drafting_ms_per_token:
        return UNKNOWN
    return f"{100 * run.cloud_drafting_ms_per_token / colocated.cloud_drafting_ms_per_token:.0f} %"


def check_drawing(field: str) -> None:
    """See that plots can be drawn; raises `ConfigError`."""
    try:
        import matplotlib  # noqa: F401, ICN001 - only whether it is there
    except ImportError as error:
        raise ConfigError(f"{lacking('bench', error.name or '')}, or leave it out", field=field) from error


def plot(benchmark: Benchmark, path: Path) -> None:
    """Draw tokens a second against the round trip, a line for each mode, over the links that do not change.

    The ending of the file names its format. Raises `ConfigError` where it cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure  # has the Agg canvas: no pyplot, no display, no global state

    links = {link: runs for link, runs in by_link(benchmark).items() if link.trace is None}
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.5, 4.6), layout="constrained")
        axes = figure.subplots()
        for mode in MODES:
            shown = [run for runs in links.values() if (run := fastest(runs, mode)) is not None]
            if shown:
                colour, line, marker = LINES[mode]
                points = [(run.link.rtt_ms, run.tokens_per_second) for run in shown]
                style: Mapping[str, Any] = {"color": colour, "linestyle": line, "marker": marker, "label": NAMES[mode]}
                axes.plot(*zip(*points, strict=True), **style, clip_on=False)
        _scale(axes, sorted({link.rtt_ms for link in links}))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("round-trip time (ms)")
        axes.set_ylabel("tokens per second")
        axes.set_title(benchmark.title, loc="left")
        figure.legend(loc="outside lower left", ncols=3, handlelength=2.6)
        drawn = BytesIO()
        figure.savefig(drawn, format=path.suffix.removeprefix("."), dpi=DPI)
    write(path, lambda: path.write_bytes(drawn.getvalue()), "plot")


def _scale(axes: Any, rtts_ms: Sequence[float]) -> None:
    """Scale the axis linearly, or by logarithms where the range is wide; 0 then has a place of its own."""
    positive = [rtt_ms for rtt_ms in rtts_ms if rtt_ms > 0]
    if positive and positive[-1] > WIDE * positive[0]:
        if 0 in rtts_ms:
            axes.set_xscale("symlog", linthresh=positive[0], linscale=0.6)
        else:
            axes.set_xscale("log")
    axes.set_xticks(rtts_ms, [f"{rtt_ms:g}" for rtt_ms in rtts_ms])
    axes.minorticks_off()
