"""`python -m research traces ends`: who drafts, replayed on a recording with emulated times of a drafted token."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from rich.console import Console

from outrider.bench.bench_settings import check_once
from outrider.bench.benchmark.bench_record import Benchmark, BenchmarkRun
from outrider.bench.benchmark.bench_table import tables
from outrider.bench.environment import environment_of_replay
from outrider.bench.links import BenchLink, link_name, links_of
from outrider.bench.record import check_file, save
from outrider.cloud.verifier_config import VerifierConfig
from outrider.deploy.arguments import Given
from outrider.proto.errors import ConfigError
from outrider.proto.types import Goal
from research.outputs import progress
from research.recording import load_recording
from research.replay.lengths import colocated
from research.replays import Replays
from research.research_settings import EndsSettings


def ends(given: Given) -> int:
    """Run `python -m research traces ends`."""
    options, price = given(EndsSettings), given.fields(VerifierConfig)["draft_price"]
    recording = load_recording(options.traces)
    drafter, traces = recording.one(options.drafter)
    made_in = environment_of_replay(recording.costs.environment)
    links = links_of(options)
    names = [link_name(link.record) for link in links]
    for name, entries in (("rtt", names), ("drafting", options.drafting), ("goal", options.goal)):
        if not entries:
            raise ConfigError("is empty; give one or more", field=name)
        check_once(entries, name)
    if options.json:
        check_file(options.json, "json")
    replays = Replays(traces, recording.costs.of(drafter), Goal.LATENCY, price)
    common = {"min_step_ms": options.min_step, "temperature": traces[0].temperature}
    goals = [Goal[name.upper()] for name in options.goal]
    cells = list(itertools.product(options.drafting, links))
    runs: list[BenchmarkRun] = []
    with progress(Console(stderr=True, highlight=False), "replaying", len(cells)) as advance:
        for drafting, link in cells:
            runs += _runs(replays, goals, drafting, link, common)
            advance()
    benchmark = Benchmark(replace(made_in, drafter=drafter, prompts=len(traces)), tuple(runs))
    Console(width=100, highlight=False).print(tables(benchmark))
    if options.json:
        save(benchmark, options.json)
    return 0


def _runs(
    replays: Replays,
    goals: Sequence[Goal],
    drafting: str,
    link: BenchLink,
    common: Mapping[str, float],
) -> Iterator[BenchmarkRun]:
    """Yield a run of each mode, for each goal where it has one; co-located drafting has its best length."""
    here_ms, edge_ms = map(float, drafting.split(":"))
    costs = replays.costs.with_drafting(edge_ms / 1e3, here_ms / 1e3)
    emulated = replace(replays, costs=replace(costs, min_step_s=common["min_step_ms"] / 1e3))
    length = emulated.best_length(colocated, link)
    common = {**common, "drafting_ms": edge_ms, "drafting_here_ms": here_ms}
    for goal in goals:
        for run in replace(emulated, goal=goal).modes(link, length, common):
            if goal is goals[0] or run.goal is not None:
                yield _short(run)


def _short(run: BenchmarkRun) -> BenchmarkRun:
    """Return the run with few digits and without quantiles: a record has many runs."""
    values = {field.name: getattr(run, field.name) for field in fields(run)}
    digits: dict[str, Any] = {name: float(f"{value:.6g}") for name, value in values.items() if isinstance(value, float)}
    return replace(run, token_gaps_ms=None, **digits)
