"""`outrider traces replay`: a recording over every link, with every window and drafter, or selectors of them."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console

from outrider.bench.benchmark.links import BenchLink, links_of
from outrider.bench.outputs import hand_out
from outrider.bench.traces.figures import Figure, Replayed
from outrider.bench.traces.grid import Grid
from outrider.bench.traces.plots import draw
from outrider.bench.traces.pool_replay import replay_pool
from outrider.bench.traces.progress import shown
from outrider.bench.traces.recording import load_recording
from outrider.bench.traces.table import tables
from outrider.bench.traces.windows import policy_of
from outrider.deploy.options import check_once
from outrider.proto.errors import ConfigError
from outrider.proto.types import Goal


def replay(options: argparse.Namespace) -> int:
    """`outrider traces replay`."""
    recording, links = load_recording(options.traces).only(options.drafter), _links(options)
    if options.selector:
        return replay_pool(options, recording, links)
    grid = Grid(
        recording,
        links,
        _windows(options.window),
        Goal[options.goal.upper()],
        options.pace / 1e3,
        options.seed,
    )

    def replayed() -> Replayed:
        return Replayed(
            command=shlex.join(["outrider", *sys.argv[1:]]),
            goal=options.goal,
            pace_ms=options.pace,
            seed=options.seed,
            costs=asdict(grid.recording.costs),
            figures=_figures(grid),
        )

    hand_out(options, replayed, tables, draw)
    return 0


def _figures(grid: Grid) -> tuple[Figure, ...]:
    console, began = Console(stderr=True, highlight=False), time.monotonic()
    figures: list[Figure] = []
    with shown(console, "replaying", len(grid)) as advance:
        for cell in grid.cells():
            figures += cell
            advance()
    texts, seconds = len(grid.recording.texts), time.monotonic() - began
    console.print(f"{len(grid)} replays of {texts} texts in {seconds:.1f} s", style="dim")
    return tuple(figures)


def _links(options: argparse.Namespace) -> list[BenchLink]:
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
