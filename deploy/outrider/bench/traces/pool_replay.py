"""`outrider traces replay --selector`: the recorded drafters as one pool, and who drafts when."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from rich.console import Console

from outrider.bench.benchmark.links import BenchLink
from outrider.bench.outputs import hand_out
from outrider.bench.traces.pool import STATIC, Pool
from outrider.bench.traces.pool_figures import PoolReplayed, Row
from outrider.bench.traces.pool_plots import draw
from outrider.bench.traces.pool_table import tables
from outrider.bench.traces.progress import shown
from outrider.bench.traces.recording import Recording
from outrider.bench.traces.stages import Rounds, Stage
from outrider.bench.traces.stream import Stream
from outrider.bench.traces.windows import policy_of
from outrider.deploy.options import check_once
from outrider.edge.policies.selection import selector_named
from outrider.proto.errors import ConfigError
from outrider.proto.policy.selection import Arm
from outrider.proto.types import Goal

ROUNDS, STREAM = "rounds", "stream"


def replay_pool(options: argparse.Namespace, recording: Recording, links: Sequence[BenchLink]) -> int:
    """`outrider traces replay` where it names selectors."""
    stages = {ROUNDS: _rounds, STREAM: _stream}
    pool = Pool(recording, links, _selectors(options.selector), stages[options.play](options, recording), options.seeds)

    def replayed() -> PoolReplayed:
        return PoolReplayed(
            command=shlex.join(["outrider", *sys.argv[1:]]),
            play=options.play,
            drafts=options.rounds,
            seeds=options.seeds,
            pace_ms=options.pace,
            drafters=tuple(recording.traces),
            costs=asdict(recording.costs),
            rows=_rows(pool),
        )

    hand_out(options, replayed, tables, draw)
    return 0


def _rounds(options: argparse.Namespace, recording: Recording) -> Callable[[BenchLink], Stage]:
    costs = recording.costs.of(next(iter(recording.traces)), pace_s=options.pace / 1e3)
    return lambda link: Rounds(arms_of(recording), link.shape_at, costs, options.rounds)


def _stream(options: argparse.Namespace, recording: Recording) -> Callable[[BenchLink], Stage]:
    costs = [recording.costs.of(name, pace_s=options.pace / 1e3) for name in recording.traces]
    if not options.window:
        raise ConfigError("names no policy; name adaptive, or some N", field="window")
    name, goal = options.window[0], Goal[options.goal.upper()]
    policy_of(name)
    return lambda link: Stream(costs, link.shape_at, lambda: replace(policy_of(name), goal=goal), options.seed)


def arms_of(recording: Recording) -> list[Arm]:
    """The drafters, at what they were measured to cost."""
    return [Arm(name, **asdict(recording.costs.drafters[name])) for name in recording.traces]


def _rows(pool: Pool) -> tuple[Row, ...]:
    console, began = Console(stderr=True, highlight=False), time.monotonic()
    with shown(console, "replaying", len(pool)) as advance:
        rows = tuple(pool.rows(advance))
    console.print(f"{len(pool)} runs of every selector in {time.monotonic() - began:.1f} s", style="dim")
    return rows


def _selectors(names: Sequence[str]) -> Sequence[str]:
    for name in names:
        if name != STATIC:
            selector_named(name)
    check_once(names, "selector")
    return names
