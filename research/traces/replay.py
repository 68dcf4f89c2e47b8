"""`traces replay`: a recording over every link, with every window and drafter, or selectors of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from rich.console import Console, RenderableType

from outrider.bench.bench_settings import check_once
from outrider.bench.environment import command_line
from outrider.bench.links import BenchLink, link_name, links_of
from outrider.bench.record import check_file, save
from outrider.deploy.arguments import Given
from outrider.deploy.process.progress import stage
from outrider.edge.selectors import selector_named
from outrider.proto.errors import ConfigError
from research.research_settings import ReplaySettings
from research.traces.pool_replay import STATIC, Pool, PoolReplayed, Stage, pool_tables
from research.traces.recordings import Recording, load_recording
from research.traces.sweep import Replayed, Sweep, policy_of, sweep_tables

Made = tuple[RenderableType, Replayed | PoolReplayed]  # the tables of a result, and it


def replay(given: Given) -> int:
    """Run `python -m research traces replay`."""
    options = given(ReplaySettings)
    recording, links = load_recording(options.traces).only(options.drafter), _links(options)
    tables, made = (_replay_pool if options.selector else _replay_windows)(options, recording, links)
    Console(width=100, highlight=False).print(tables)
    if options.json:
        save(made, options.json)
    return 0


def _replay_windows(options: ReplaySettings, recording: Recording, links: Sequence[BenchLink]) -> Made:
    windows = _windows(options.window)
    sweep = Sweep(recording, links, windows, options.goal, options.min_step / 1e3, options.seed)
    _check_output(options)
    with stage(f"replaying {len(recording.texts)} texts with every window"):
        results = tuple(sweep.results())
    made = Replayed(
        command=command_line(),
        goal=options.goal.name.lower(),
        min_step_ms=options.min_step,
        seed=options.seed,
        costs=asdict(recording.costs),
        results=results,
    )
    return sweep_tables(made), made


def _replay_pool(options: ReplaySettings, recording: Recording, links: Sequence[BenchLink]) -> Made:
    for name in options.selector:
        if name != STATIC:
            selector_named(name)
    check_once(options.selector, "selector")
    [window] = _windows(options.window[:1])
    policy = replace(policy_of(window), goal=options.goal)
    costs = [recording.costs.of(name, min_step_s=options.min_step / 1e3) for name in recording.traces]
    stages = {link.record: Stage(costs, link.shape_at, policy, options.seed) for link in links}
    pool = Pool(recording, stages, options.selector, options.seeds, options.row)
    _check_output(options)
    with stage(f"replaying {options.seeds} runs of every selector"):
        rows = tuple(pool.rows())
    made = PoolReplayed(
        command=command_line(),
        window=window,
        seeds=options.seeds,
        min_step_ms=options.min_step,
        drafters=tuple(recording.traces),
        costs=asdict(recording.costs),
        rows=rows,
    )
    return pool_tables(made), made


def _check_output(options: ReplaySettings) -> None:
    """Find a file that cannot be written before the work."""
    if options.json:
        check_file(options.json, "json")


def _links(options: ReplaySettings) -> list[BenchLink]:
    for name in ("up", "down", "jitter"):
        if not getattr(options, name):
            raise ConfigError("is empty; give one number, or as many as --rtt has", field=name)
    links = links_of(options)
    if not links:
        raise ConfigError("names no link, nor does --trace; name a round trip", field="rtt")
    check_once([link_name(link.record) for link in links], "rtt")
    return links


def _windows(names: Sequence[str]) -> Sequence[str]:
    if not names:
        raise ConfigError("names no policy; name adaptive, or some N", field="window")
    for name in names:
        policy_of(name)
    check_once(names, "window")
    return names
