"""`outrider traces replay`: a recording over every link, with every window and drafter, or selectors of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from rich.console import Console

from outrider.bench.commands import ReplaySettings, check_once
from outrider.bench.environment import command_line
from outrider.bench.links import BenchLink, links_of
from outrider.bench.outputs import check_plot_folder, hand_out, progress
from outrider.bench.replay.optimum import synchronous
from outrider.bench.replay.traced import Policy
from outrider.bench.traces.plots import draw_pool, draw_sweep
from outrider.bench.traces.pool import STATIC, Pool
from outrider.bench.traces.pool_results import PoolReplayed, Row
from outrider.bench.traces.recording import Recording, load_recording
from outrider.bench.traces.stages import Stage
from outrider.bench.traces.sweep import Replayed, Sweep, WindowResult, policy_of
from outrider.bench.traces.tables import pool_tables, sweep_tables
from outrider.deploy.arguments import Given
from outrider.edge.policies.selection import selector_named
from outrider.proto.errors import ConfigError

ROUNDS, STREAM = "rounds", "stream"


def replay(given: Given) -> int:
    """Run `outrider traces replay`."""
    options = given(ReplaySettings)
    recording, links = load_recording(options.traces).only(options.drafter), _links(options)
    if options.selector:
        _replay_pool(options, recording, links)
    else:
        _replay_windows(options, recording, links)
    return 0


def _replay_windows(options: ReplaySettings, recording: Recording, links: Sequence[BenchLink]) -> None:
    sweep = Sweep(recording, links, _windows(options.window), options.goal, options.min_step / 1e3, options.seed)

    def replayed() -> Replayed:
        return Replayed(
            command=command_line(),
            goal=options.goal.name.lower(),
            min_step_ms=options.min_step,
            seed=options.seed,
            costs=asdict(recording.costs),
            results=_results(sweep),
        )

    hand_out(options.json, options.plot, replayed, sweep_tables, draw_sweep, check_plot=check_plot_folder)


def _replay_pool(options: ReplaySettings, recording: Recording, links: Sequence[BenchLink]) -> None:
    stages = {ROUNDS: _rounds, STREAM: _stream}
    pool = Pool(recording, links, _selectors(options.selector), stages[options.play](options, recording), options.seeds)

    def replayed() -> PoolReplayed:
        return PoolReplayed(
            command=command_line(),
            play=options.play,
            drafts=options.rounds,
            seeds=options.seeds,
            min_step_ms=options.min_step,
            drafters=tuple(recording.traces),
            costs=asdict(recording.costs),
            rows=_rows(pool),
        )

    hand_out(options.json, options.plot, replayed, pool_tables, draw_pool, check_plot=check_plot_folder)


def _results(sweep: Sweep) -> tuple[WindowResult, ...]:
    console, began = Console(stderr=True, highlight=False), time.monotonic()
    results: list[WindowResult] = []
    with progress(console, "replaying", len(sweep)) as advance:
        for cell in sweep.cells():
            results += cell
            advance()
    texts, seconds = len(sweep.recording.texts), time.monotonic() - began
    console.print(f"{len(sweep)} replays of {texts} texts in {seconds:.1f} s", style="dim")
    return tuple(results)


def _links(options: ReplaySettings) -> list[BenchLink]:
    for name in ("up", "down", "jitter"):
        if not getattr(options, name):
            raise ConfigError("is empty; give one number, or as many as --rtt has", field=name)
    links = links_of(options)
    if not links:
        raise ConfigError("names no link, nor does --trace; name a round trip", field="rtt")
    check_once([link.record for link in links], "rtt")
    return links


def _windows(names: Sequence[str]) -> Sequence[str]:
    if not names:
        raise ConfigError("names no policy; name adaptive, or some N", field="window")
    for name in names:
        policy_of(name)
    check_once(names, "window")
    return names


def _rounds(options: ReplaySettings, recording: Recording) -> Callable[[BenchLink], Stage]:
    return _stage(options, recording, lambda: synchronous(options.rounds))


def _stream(options: ReplaySettings, recording: Recording) -> Callable[[BenchLink], Stage]:
    if not options.window:
        raise ConfigError("names no policy; name adaptive, or some N", field="window")
    name, goal = options.window[0], options.goal
    policy_of(name)
    return _stage(options, recording, lambda: replace(policy_of(name), goal=goal))


def _stage(options: ReplaySettings, recording: Recording, policy: Callable[[], Policy]) -> Callable[[BenchLink], Stage]:
    costs = [recording.costs.of(name, min_step_s=options.min_step / 1e3) for name in recording.traces]
    return lambda link: Stage(costs, link.shape_at, policy, options.seed)


def _rows(pool: Pool) -> tuple[Row, ...]:
    console, began = Console(stderr=True, highlight=False), time.monotonic()
    with progress(console, "replaying", len(pool)) as advance:
        rows = tuple(pool.rows(advance))
    console.print(f"{len(pool)} runs of every selector in {time.monotonic() - began:.1f} s", style="dim")
    return rows


def _selectors(names: Sequence[str]) -> Sequence[str]:
    for name in names:
        if name != STATIC:
            selector_named(name)
    check_once(names, "selector")
    return names
