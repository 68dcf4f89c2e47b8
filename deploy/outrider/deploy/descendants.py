"""Processes that this one has started, and those that they have."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

LOOK_EVERY_S = 0.5
_ZOMBIE = "Z"


class Descendant(NamedTuple):
    """A process; `started` tells it from a later one of the same number."""

    pid: int
    parent: int
    name: str
    started: int
    state: str


def descendants() -> tuple[Descendant, ...]:
    """Return the processes below this one that run."""
    found = [each for path in Path("/proc").glob("[0-9]*") if (each := _read(path)) is not None]
    below = {os.getpid()}
    while more := {each.pid for each in found if each.parent in below} - below:
        below |= more
    return tuple(each for each in found if each.pid in below - {os.getpid()} and each.state != _ZOMBIE)


def kill(processes: Iterable[Descendant]) -> None:
    """Kill those of the processes that still run, wherever they belong by now."""
    for process in processes:
        now = _read(Path("/proc") / str(process.pid))
        if now is not None and (now.started, now.name) == (process.started, process.name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


async def until_gone(name: str) -> None:
    """Wait until no process below this one has this name, for ever where there has been none."""
    there = False
    while True:
        running = any(process.name == name for process in descendants())
        if there and not running:
            return
        there = running
        await asyncio.sleep(LOOK_EVERY_S)


def _read(path: Path) -> Descendant | None:
    try:
        name, _, fields = (path / "stat").read_text().partition(" (")[2].rpartition(") ")
    except OSError:
        return None  # it has ended meanwhile
    state, parent, *rest = fields.split()
    return Descendant(int(path.name), int(parent), name, int(rest[17]), state)
