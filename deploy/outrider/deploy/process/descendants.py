"""Processes that this one has started, and those that they have."""

from __future__ import annotations

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
        _send(process, signal.SIGKILL)


def end_descendants() -> None:
    """Kill all processes below this one; each is stopped first, so that none starts another meanwhile."""
    stopped: dict[tuple[int, int], Descendant] = {}
    while more := {(each.pid, each.started): each for each in descendants() if (each.pid, each.started) not in stopped}:
        for process in more.values():
            _send(process, signal.SIGSTOP)
        stopped |= more
    kill(stopped.values())


async def until_gone(name: str) -> None:
    """Wait until a process below this one that has this name ends; for ever where there is none."""
    import asyncio  # here, since every command imports this module, and `outrider --help` is to be quick

    found = [process for process in descendants() if process.name == name]
    while not found or all(_runs(process) for process in found):  # noqa: ASYNC110 - it is nobody's event
        await asyncio.sleep(LOOK_EVERY_S)


def _send(process: Descendant, number: int) -> None:
    if _runs(process):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)


def _runs(process: Descendant) -> bool:
    now = _read(Path("/proc") / str(process.pid))
    return now is not None and now.started == process.started and now.state != _ZOMBIE


def _read(path: Path) -> Descendant | None:
    try:
        name, _, fields = (path / "stat").read_text().partition(" (")[2].rpartition(") ")
    except OSError:
        return None  # it has ended meanwhile
    state, parent, *rest = fields.split()
    return Descendant(int(path.name), int(parent), name, int(rest[17]), state)
