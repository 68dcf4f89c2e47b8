"""`python -m research costs`: the cloud's work for a thousand tokens, by the record of a benchmark."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from outrider.bench.bench_metrics import grouped
from outrider.bench.benchmark.bench_record import Benchmark, BenchmarkRun
from outrider.bench.benchmark.bench_table import by_condition, by_link, fastest, mode_name
from outrider.bench.links import link_name
from outrider.bench.record import from_json
from outrider.bench.table import UNKNOWN, Grid, draw, number
from outrider.deploy.arguments import Given, read_text
from outrider.proto.errors import ConfigError
from research.research_settings import CostSettings

HEADINGS = ("link", "mode", "steps", "rows", "step s", "drafting s", "core s", "/ cloud", "edge s")
TOKENS = 1000
LEGEND = (
    f"for {TOKENS} tokens. steps, rows: of the target; step s, drafting s: core seconds of the cloud in target steps "
    "and in drafting beside the target, and core s both; / cloud: over those of cloud streaming on the same link; "
    "edge s: core seconds of drafting at the edge"
)


def costs(given: Given) -> int:
    """Run `python -m research costs`."""
    options = given(CostSettings)
    record = from_json(Benchmark, read_text(options.record, "record"), "record")
    cores = options.step_cores or record.environment.target_threads
    if not cores:
        raise ConfigError("is not in the record; say how many cores a step takes", field="step_cores")
    Console(width=100, highlight=False).print(draw(cost_grids(record, cores), LEGEND))
    return 0


def cost_grids(record: Benchmark, cores: float) -> list[Grid]:
    """Return a table for each condition: a row for each mode and goal, the fastest of its kind, a block a link.

    Args:
        record: record of `outrider bench`.
        cores: cores that a target step occupies while it lasts.
    """
    grids = []
    for condition, runs in by_condition(record).items():
        blocks = []
        for link, over_link in by_link(runs).items():
            known = grouped((run for run in over_link if run.steps_per_token is not None), lambda r: (r.mode, r.goal))
            chosen = [run for (mode, _), own in known.items() if (run := fastest(own, mode)) is not None]
            cloud = fastest(over_link, "cloud")
            names = (link_name(link), *[""] * (len(chosen) - 1))
            blocks.append([(name, *_row(run, cloud, cores)) for name, run in zip(names, chosen, strict=True)])
        caption = f"A step occupies {cores:g} core{'' if cores == 1 else 's'} while it lasts, and a drafter one"
        grids.append(Grid(f"Cloud work: {condition}", HEADINGS, 2, blocks, caption))
    return grids


def step_s(run: BenchmarkRun) -> float:
    """Return the time of a step in seconds: of its work, or the shortest step that stands for a larger target."""
    parts = (run.forward_ms_p50, run.sample_ms_p50, run.overhead_ms_p50)
    return max(run.min_step_ms, sum(part or 0.0 for part in parts)) / 1e3


def core_s(run: BenchmarkRun, cores: float) -> float:
    """Return the core seconds of the cloud for a token: target steps, and drafting beside the target."""
    return (run.steps_per_token or 0.0) * step_s(run) * cores + (run.cloud_drafting_ms_per_token or 0.0) / 1e3


def _row(run: BenchmarkRun, cloud: BenchmarkRun | None, cores: float) -> Sequence[str]:
    own_s = core_s(run, cores)
    cloud_s = core_s(cloud, cores) if cloud is not None else 0.0
    return (
        mode_name(run),
        _thousand(run.steps_per_token, 0),
        _thousand(run.rows_per_token, 0),
        _thousand((run.steps_per_token or 0.0) * step_s(run) * cores, 2),
        _thousand(run.cloud_drafting_ms_per_token, 2, 1e-3),
        _thousand(own_s, 2),
        f"{own_s / cloud_s:.2f}" if cloud_s else UNKNOWN,
        _thousand(run.edge_drafting_ms_per_token, 2, 1e-3),
    )


def _thousand(value: float | None, digits: int, unit: float = 1.0) -> str:
    return number(None if value is None else TOKENS * unit * value, digits)
