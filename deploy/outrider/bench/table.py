"""Tables for a terminal of 100 columns: blocks of rows with space between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

UNKNOWN = "-"

Block = Sequence[Sequence[str]]  # rows [r][c]


@dataclass(frozen=True, slots=True)
class Grid:
    """A table before it is drawn.

    Attributes:
        title: text above it; empty: none.
        headings: [c] headings of the columns.
        words: number of columns, from the left, that hold words; the others hold numbers.
        blocks: blocks of rows [r][c].
        caption: text below it.
    """

    title: str
    headings: Sequence[str]
    words: int
    blocks: Sequence[Block]
    caption: str = ""


def draw(grids: Iterable[Grid], legend: str = "") -> Group:
    """Return the tables one below the other, and the legend of their headings."""
    parts: list[RenderableType] = []
    for grid in grids:
        if grid.title:
            parts.append(Text(f"\n{grid.title}", style="italic"))
        parts.append(_table(grid))
        if grid.caption:
            parts.append(Text(grid.caption, style="dim"))
    return Group(*parts, *([Text(legend, style="dim")] if legend else []))


def _table(grid: Grid) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for heading in grid.headings[: grid.words]:
        table.add_column(Text(heading), overflow="fold")
    for heading in grid.headings[grid.words :]:
        table.add_column(Text(heading), justify="right", no_wrap=True, overflow="fold")
    for block in grid.blocks:
        for row in block:
            table.add_row(*map(Text, row))
        table.add_section()
    return table


def number(value: float | None, digits: int = 3) -> str:
    """Return the number with `digits` after the point; `-` where it is not known."""
    return UNKNOWN if value is None else f"{value:.{digits}f}"
