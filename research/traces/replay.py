"""`traces replay`: a recording over every link, with every window and drafter, or selectors of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace

from rich.console import Console

from outrider.bench.bench_settings import check_once
from outrider.bench.environment import command_line
from outrider.bench.links import BenchLink, link_name, links_of
from outrider.deploy.arguments import Given
from outrider.edge.selectors import selector_named
from outrider.proto.errors import ConfigError
from research.outputs import hand_out, progress
from research.research_settings import ReplaySettings
from research.traces.pool_replay import STATIC, Pool, PoolReplayed, Stage, pool_tables
from research.traces.recordings import Recording, load_recording
from research.traces.sweep import Replayed, Sweep, WindowResult, policy_of, sweep_tables


def replay(given: Given) -> int:
    """Run `python -m research traces replay`."""
    options = given(ReplaySettings)
    recording, links = load_recording(options.traces).only(options.drafter), _links(options)
    if options.selector:
        _replay_pool(options, recording, links)
    else:
        _replay_windows(options, recording, links)
    return 0


def _replay_windows(options: ReplaySettings, recording: Recording, links: Sequence[BenchLink]) -> None:
    windows = _windows(options.window)
    sweep = Sweep(recording, links, windows, options.goal, options.min_step / 1e3, options.seed)

    def replayed() -> Replayed:
        results: list[WindowResult] = []
        with _timed(f"{len(sweep)} replays of {len(recording.texts)} texts", len(sweep)) as advance:
            for cell in sweep.cells():
                results += cell
                advance()
        return Replayed(
            command=command_line(),
            goal=options.goal.name.lower(),
            min_step_ms=options.min_step,
            seed=options.seed,
            costs=asdict(recording.costs),
            results=tuple(results),
        )

    hand_out(options.json, replayed, sweep_tables)


def _replay_pool(options: ReplaySettings, recording: Recording, links: Sequence[BenchLink]) -> None:
    for name in options.selector:
        if name != STATIC:
            selector_named(name)
    check_once(options.selector, "selector")
    [window] = _windows(options.window[:1])
    policy = replace(policy_of(window), goal=options.goal)
    costs = [recording.costs.of(name, min_step_s=options.min_step / 1e3) for name in recording.traces]
    stages = {link.record: Stage(costs, link.shape_at, policy, options.seed) for link in links}
    pool = Pool(recording, stages, options.selector, options.seeds, options.row)

    def replayed() -> PoolReplayed:
        with _timed(f"{len(pool)} runs of every selector", len(pool)) as advance:
            rows = tuple(pool.rows(advance))
        return PoolReplayed(
            command=command_line(),
            window=window,
            seeds=options.seeds,
            min_step_ms=options.min_step,
            drafters=tuple(recording.traces),
            costs=asdict(recording.costs),
            rows=rows,
        )

    hand_out(options.json, replayed, pool_tables)


@contextmanager
def _timed(work: str, parts: int) -> Iterator[Callable[[], None]]:
    """Show the progress of `work`, whose parts call what is yielded, and at its end the time that it took."""
    console, began = Console(stderr=True, highlight=False), time.monotonic()
    with progress(console, "replaying", parts) as advance:
        yield advance
    console.print(f"{work} in {time.monotonic() - began:.1f} s", style="dim")


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
