"""Selectors of a pool as tables for a terminal of 100 columns: a line for each, a column for each row of texts."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from outrider.bench.benchmark.table import link_name
from outrider.bench.tables import Block, draw_blocks
from outrider.bench.traces.pool_figures import DRAFTER, ORACLE, SELECTOR, Cell, PoolReplayed, Row
from outrider.bench.traces.tally import SETTLED_TOKENS

UNKNOWN, BEST = "-", "*"
KINDS = (DRAFTER, SELECTOR, ORACLE)
LEGEND = (
    "speed-up over cloud streaming ± half of its 95 % confidence interval over the prompts; * the most, but for the "
    "oracle, which knows in hindsight the best drafter of every stretch; of {last} alone: oracle: share of its speed; "
    "turns: switches of drafter a thousand tokens; after: share of the oracle's speed from {settled} tokens after a "
    "change of domain on"
)


def tables(replayed: PoolReplayed) -> Group:
    """A table a link."""
    parts: list[RenderableType] = []
    pace = f", a target step at least {replayed.pace_ms:g} ms" if replayed.pace_ms else ""
    for link in replayed.links:
        rows = replayed.over(link)
        headings = ("", *(row.name or UNKNOWN for row in rows), "oracle", "turns", "after")
        blocks = [block for kind in KINDS if (block := _block(rows, kind))]
        parts += [_title(f"{link_name(link)}{pace}: {replayed.seeds} runs in {replayed.play}")]
        parts += [draw_blocks(headings, 1, blocks)]
        if any(cell.kind == DRAFTER for cell in rows[0].cells):
            parts += [_title("Speed over that of the row's best drafter alone"), _against_best(rows)]
    last = replayed.rows[-1].name or "all"
    return Group(*parts, Text(LEGEND.format(last=last, settled=SETTLED_TOKENS), style="dim"))


def _block(rows: Sequence[Row], kind: str) -> Block:
    columns = [column for column in rows[0].columns if column[0] == kind]
    best = [max((cell for cell in row.cells if cell.kind != ORACLE), key=_speed_up, default=None) for row in rows]
    lines = []
    for column in columns:
        cells = [row.of(*column) for row in rows]
        last = cells[-1]
        shown = [_cell(cell, cell is most) for cell, most in zip(cells, best, strict=True)]
        settled = UNKNOWN if last.settled is None else f"{last.settled:.3f}"
        lines.append((column[1], *shown, f"{last.of_oracle:.3f}", f"{last.switches:.0f}", settled))
    return lines


def _against_best(rows: Sequence[Row]) -> RenderableType:
    best = [max(cell.speed_up for cell in row.cells if cell.kind == DRAFTER) for row in rows]
    lines = [
        (name, *(f"{row.of(kind, name).speed_up / most:.3f}" for row, most in zip(rows, best, strict=True)))
        for kind, name in rows[0].columns
        if kind != DRAFTER
    ]
    return draw_blocks(("", *(row.name or UNKNOWN for row in rows)), 1, [lines])


def _cell(cell: Cell, is_best: bool) -> str:
    spread = f"±{(cell.interval.high - cell.interval.low) / 2:.2f}".replace("0.", ".") if cell.interval else ""
    return f"{BEST if is_best else ''}{cell.speed_up:.2f}{spread}"


def _speed_up(cell: Cell) -> float:
    return cell.speed_up


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="italic")
