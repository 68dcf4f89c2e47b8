"""Lines of Python by room, and their budgets: `python -m research lines`.

A line counts whether it holds code, a docstring or nothing; generated code does not.
"""

from __future__ import annotations

import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from outrider.bench.table import Grid, draw
from outrider.deploy.arguments import Given

ROOMS = {
    "proto": "proto/outrider/proto",
    "drafters": "edge/outrider/drafters",
    "edge": "edge/outrider/edge",
    "cloud": "cloud/outrider/cloud",
    "coordinator": "coordinator/outrider/coordinator",
    "deploy": "deploy/outrider/deploy",
    "bench": "deploy/outrider/bench",
    "research": "research",
    "tests": "tests",
}
GENERATED = "proto/outrider/proto/v1/"
BUDGETS = "research/budgets.toml"


class Room(NamedTuple):
    """Counts of one room."""

    files: int
    lines: int


def budgets(root: Path) -> tuple[dict[str, int], int]:
    """Return the most lines that each room may have, and that all may have."""
    found = tomllib.loads((root / BUDGETS).read_text(encoding="utf-8"))
    return found["lines"], found["all"]


def counted(root: Path) -> dict[str, Room]:
    """Return the counts of every room, of the files that git knows."""
    listed = ("git", "ls-files", "*.py")
    names = subprocess.run(listed, cwd=root, capture_output=True, text=True, check=True).stdout.split()  # noqa: S603
    files = [name for name in names if not name.startswith(GENERATED) and (root / name).is_file()]
    lines = {name: len((root / name).read_text(encoding="utf-8").splitlines()) for name in files}
    own = {room: [count for name, count in lines.items() if name.startswith(f"{at}/")] for room, at in ROOMS.items()}
    return {room: Room(len(counts), sum(counts)) for room, counts in own.items()}


def table(rooms: Mapping[str, Room], limits: Mapping[str, int], limit: int) -> Grid:
    """Return a row for each room, and the sums of what is installed and of all."""
    installed = [room for name, room in rooms.items() if name not in ("research", "tests")]
    rows = [_row(name, [room], f"{limits[name]:,}") for name, room in rooms.items()]
    sums = [_row("installed", installed, ""), _row("all", [*rooms.values()], f"{limit:,}")]
    return Grid("Lines by room", ("room", "files", "lines", "budget"), 1, [rows, sums])


def _row(name: str, rooms: Sequence[Room], budget: str) -> tuple[str, ...]:
    return name, f"{sum(room.files for room in rooms):,}", f"{sum(room.lines for room in rooms):,}", budget


def show(_: Given) -> int:
    """Run `python -m research lines`."""
    root = Path(__file__).parents[1]
    Console(width=100, highlight=False).print(draw([table(counted(root), *budgets(root))]))
    return 0
