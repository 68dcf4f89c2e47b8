"""Blocks of rows as a table that fits a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

Block = Sequence[Sequence[str]]  # rows [r][c]


def draw_blocks(headings: Sequence[str], words: int, blocks: Sequence[Block]) -> Table:
    """A table of `blocks` with space between them; the first `words` columns are of words, the others of numbers."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for index, heading in enumerate(headings):
        word = index < words  # those alone may be long
        table.add_column(Text(heading), justify="left" if word else "right", no_wrap=not word, overflow="fold")
    for block in blocks:
        for row in block:
            table.add_row(*map(Text, row))
        table.add_section()
    return table
