"""Tables of a benchmark: speed and work of every run and the main ratios, three tables a condition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from rich.console import Group

from outrider.bench.bench_metrics import grouped
from outrider.bench.bench_settings import MODES
from outrider.bench.benchmark.bench_record import Benchmark, BenchmarkRun
from outrider.bench.links import LinkRecord, link_name, link_parts
from outrider.bench.table import UNKNOWN, Grid, draw, number

LEGEND = (
    "tok/s: tokens a second, all sessions together; ratio: to cloud streaming over the same link; accept: chance that "
    "a draft of the edge is right, given those before it; ttft: time to the first token, gap: time between tokens, "
    "both ms; same: texts identical to cloud streaming; steps, rows: of the target, a token; cloud ms, edge ms: "
    "drafting at the verifier and at the edge, a token; up B, down B: bytes a token; over: ms of a step beside forward "
    "pass, sampling and waiting. colocated: the same drafter beside the target alone; edge: outrider without drafts of "
    "the verifier's own"
)
RATIO_LEGEND = (
    "Ratios are of tokens a second, on the same link; above 1, outrider is faster. drafting: cloud drafting a token, "
    "as a share of colocated's"
)
HEADINGS = ("link", "mode", "tok/s", "ratio", "accept", "ttft", "gap p50", "gap p99", "same")
WORK_HEADINGS = ("link", "mode", "steps", "rows", "cloud ms", "edge ms", "up B", "down B", "over")
_EXACT_MS = 100  # from here on, tenths of a millisecond are noise


@dataclass(frozen=True, slots=True)
class Condition:
    """Settings that compared runs have in common; the runs differ in mode and link."""

    min_step_ms: float
    temperature: float
    sessions: int
    domain: str

    def __str__(self) -> str:
        sessions = "1 session" if self.sessions == 1 else f"{self.sessions} sessions"
        step = f"target step at least {self.min_step_ms:g} ms" if self.min_step_ms else "target at its own speed"
        return ", ".join(part for part in (f"T = {self.temperature:g}", sessions, step, self.domain) if part)


def by_condition(benchmark: Benchmark) -> dict[Condition, list[BenchmarkRun]]:
    """Group runs by condition, in order of appearance; within one, by link, mode and sync length."""
    names = [field.name for field in fields(Condition)]
    found = grouped(benchmark.runs, lambda run: Condition(**{name: getattr(run, name) for name in names}))
    return {condition: sorted(runs, key=_order) for condition, runs in found.items()}


def by_link(runs: Sequence[BenchmarkRun]) -> dict[LinkRecord, list[BenchmarkRun]]:
    """Group runs by link, in the order given."""
    return grouped(runs, lambda run: run.link)


def fastest(runs: Sequence[BenchmarkRun], mode: str) -> BenchmarkRun | None:
    """Return the fastest run of a mode, for sync that of the best length; None where no speed is known.

    Runs for latency are preferred to those that save target steps.
    """
    known = [run for run in runs if run.mode == mode and run.tokens_per_second]
    known = [run for run in known if run.goal != "efficiency"] or known
    return max(known, key=lambda run: run.tokens_per_second or 0.0, default=None)


def _down_the_rows(link: LinkRecord, rows: int) -> list[str]:
    """Return [rows] the link's name, one part in each: a table has more height to spare than width."""
    parts = link_parts(link)
    cells = [*parts[: rows - 1], " ".join(parts[rows - 1 :])]
    return [*cells, *[""] * (rows - len(cells))]


def mode_name(run: BenchmarkRun) -> str:
    """Return the mode with its variant: `sync 4`, `colocated 8`, `outrider eff.`."""
    drafts = next((n for n in (run.sync_length, run.drafts_here) if n is not None), None)
    length = f" {drafts}" if drafts is not None else ""
    goal = " eff." if run.goal == "efficiency" else ""
    return run.mode + length + goal


def results(condition: Condition, runs: Sequence[BenchmarkRun]) -> Grid:
    """Return the table of speeds: a row for each run, a block for each link."""
    blocks = []
    for link, over_link in by_link(runs).items():
        cloud, names = fastest(over_link, "cloud"), _down_the_rows(link, len(over_link))
        blocks.append([(name, *_row(run, cloud)) for name, run in zip(names, over_link, strict=True)])
    paced = "A shortest step stands for a larger target: every step takes at least {:g} ms"
    return Grid("Speed", HEADINGS, 2, blocks, paced.format(condition.min_step_ms) if condition.min_step_ms else "")


def work(runs: Sequence[BenchmarkRun]) -> Grid:
    """Return the table of what a token costs: a row for each run, a block for each link."""
    blocks = []
    for link, over_link in by_link(runs).items():
        names = _down_the_rows(link, len(over_link))
        blocks.append([(name, *_work_row(run)) for name, run in zip(names, over_link, strict=True)])
    return Grid("Work", WORK_HEADINGS, 2, blocks)


def ratios(runs: Sequence[BenchmarkRun]) -> Grid | None:
    """Return the table of ratios, a row for each link and run of edges that draft ahead; None: there is none."""
    blocks = []
    for link, over_link in by_link(runs).items():
        sync, colocated = fastest(over_link, "sync"), fastest(over_link, "colocated")
        against = (fastest(over_link, "cloud"), sync, colocated)
        best = UNKNOWN if sync is None or sync.sync_length is None else str(sync.sync_length)
        rows = [
            (mode_name(run), *(_ratio(run, other) for other in against), best, _drafting_share(run, colocated))
            for run in over_link
            if run.mode in ("edge", "outrider")
        ]
        if rows:
            names = (link_name(link), *[""] * (len(rows) - 1))
            blocks.append([(name, *row) for name, row in zip(names, rows, strict=True)])
    headings = ("link", "mode", "/ cloud", "/ best sync", "/ best colocated", "best sync length", "drafting")
    return Grid("Ratios", headings, 2, blocks) if blocks else None


def grids(condition: Condition, runs: Sequence[BenchmarkRun]) -> list[Grid]:
    """Return the tables of one condition."""
    return [grid for grid in (results(condition, runs), work(runs), ratios(runs)) if grid is not None]


def tables(benchmark: Benchmark) -> Group:
    """Return all tables for a terminal of 100 columns."""
    found = [
        replace(grid, title=f"{grid.title}: {condition}")
        for condition, runs in by_condition(benchmark).items()
        for grid in grids(condition, runs)
    ]
    return draw(found, f"{LEGEND}. {RATIO_LEGEND}")


def _order(run: BenchmarkRun) -> tuple[object, ...]:
    link = run.link
    rates = tuple(-1.0 if rate is None else -rate for rate in (link.up_mbit, link.down_mbit))
    return (
        (link.rtt_ms, link.jitter_ms, rates, link.trace or ""),
        MODES.index(run.mode),
        run.goal == "efficiency",
        run.sync_length or run.drafts_here or 0,
    )


def _row(run: BenchmarkRun, cloud: BenchmarkRun | None) -> tuple[str, ...]:
    same = {True: "yes", False: "NO", None: UNKNOWN}[run.identical_to_cloud]
    return (
        mode_name(run),
        number(run.tokens_per_second, 1),
        _ratio(run, cloud),
        number(run.acceptance, 3),
        _milliseconds(run.ttft_ms_p50),
        _milliseconds(run.token_gap_ms_p50),
        _milliseconds(run.token_gap_ms_p99),
        same,
    )


def _work_row(run: BenchmarkRun) -> tuple[str, ...]:
    return (
        mode_name(run),
        number(run.steps_per_token, 3),
        number(run.rows_per_token, 2),
        number(run.cloud_drafting_ms_per_token, 2),
        number(run.edge_drafting_ms_per_token, 2),
        number(run.uplink_bytes_per_token, 1),
        number(run.downlink_bytes_per_token, 1),
        number(run.overhead_ms_p50, 2),
    )


def _milliseconds(value: float | None) -> str:
    return number(value, 0 if value is not None and value >= _EXACT_MS else 1)


def _ratio(run: BenchmarkRun, other: BenchmarkRun | None) -> str:
    if other is None or run.tokens_per_second is None or not other.tokens_per_second:
        return UNKNOWN
    return f"{run.tokens_per_second / other.tokens_per_second:.2f}"


def _drafting_share(run: BenchmarkRun, colocated: BenchmarkRun | None) -> str:
    own = run.cloud_drafting_ms_per_token
    if colocated is None or own is None or not colocated.cloud_drafting_ms_per_token:
        return UNKNOWN
    return f"{100 * own / colocated.cloud_drafting_ms_per_token:.0f} %"
