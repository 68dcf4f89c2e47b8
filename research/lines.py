"""Lines of Python by room, and their budgets: `python -m research lines`.

A line counts whether it holds code, a docstring or nothing; generated code does not.
"""

from __future__ import annotations

import subprocess
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True, slots=True)
class Room:
    """Counts of one room."""

    files: int
    lines: int
    classes: int
    functions: int


def budgets(root: Path) -> tuple[dict[str, int], int]:
    """Return the most lines that each room may have, and that all may have."""
    found = tomllib.loads((root / BUDGETS).read_text(encoding="utf-8"))
    return found["lines"], found["all"]


def counted(root: Path) -> dict[str, Room]:
    """Return the counts of every room, of the files that git knows."""
    listed = ("git", "ls-files", "*.py")
    names = subprocess.run(listed, cwd=root, capture_output=True, text=True, check=True).stdout.split()  # noqa: S603
    files = [name for name in names if not name.startswith(GENERATED) and (root / name).is_file()]
    return {room: _room([root / name for name in files if name.startswith(f"{at}/")]) for room, at in ROOMS.items()}


def _room(files: list[Path]) -> Room:
    lines = [line.lstrip() for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    classes, functions = (sum(line.startswith(word) for line in lines) for word in ("class ", ("def ", "async def ")))
    return Room(len(files), len(lines), classes, functions)


def table(rooms: Mapping[str, Room], limits: Mapping[str, int], limit: int) -> Grid:
    """Return a row for each room, and the sums of what is installed and of all."""
    installed = [room for name, room in rooms.items() if name not in ("research", "tests")]
    rows = [(name, *_cells(room), f"{limits[name]:,}") for name, room in rooms.items()]
    sums = [("installed", *_cells(_sum(installed)), ""), ("all", *_cells(_sum([*rooms.values()])), f"{limit:,}")]
    return Grid("Lines by room", ("room", "files", "lines", "classes", "functions", "budget"), 1, [rows, sums])


def _sum(rooms: list[Room]) -> Room:
    return Room(*(sum(getattr(room, name) for room in rooms) for name in Room.__dataclass_fields__))


def _cells(room: Room) -> tuple[str, ...]:
    return tuple(f"{count:,}" for count in (room.files, room.lines, room.classes, room.functions))


def show(_: Given) -> int:
    """Run `python -m research lines`."""
    root = Path(__file__).parents[1]
    Console(width=100, highlight=False).print(draw([table(counted(root), *budgets(root))]))
    return 0
