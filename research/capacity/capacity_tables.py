"""Tables of capacities for a terminal of 100 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group

from outrider.bench.bench_metrics import grouped
from outrider.bench.table import UNKNOWN, Block, Grid, draw
from research.capacity.capacity_record import Capacities, HeldSessions
from research.research_settings import CROWD_MODES


def capacity_tables(found: Capacities) -> Group:
    """Return a table for each step model: sessions by round trip, a block for each time of a drafted token."""
    rtts = sorted({result.rtt_ms for result in found.results if result.rtt_ms is not None})
    headings = ("drafting", "mode", "threads", *(f"{rtt:g} ms" for rtt in rtts))
    grids = []
    for model in found.models:
        own = [result for result in found.results if result.steps == model.name]
        blocks = [_block(drafting_ms, cells, rtts) for drafting_ms, cells in _by_drafting(own).items()]
        step = f"{model.step_ms:.3g} ms + {model.row_ms:.2g} ms a row"
        title = f"Sessions, {model.name} steps: {step}, at least {model.min_step_ms:g} ms"
        grids.append(Grid(title, headings, 2, blocks))
    pace = f", and at most {found.pace_ms:g} ms a token on average" if found.pace_ms else ""
    searches = f": the median of {found.seeds} searches, and their range" if found.seeds > 1 else ""
    legend = (
        f"most sessions of one verifier with a 95th percentile of the gaps between tokens of {found.gap_ms:g} ms or "
        f"less{pace}{searches}; {found.max_sessions} were the most tried. "
        "threads: of the verifier, that draft. All is replayed on recorded hits; edges draft on machines of their own"
    )
    return draw(grids, legend)


def _by_drafting(results: Sequence[HeldSessions]) -> dict[float, list[HeldSessions]]:
    return grouped(results, lambda result: result.drafting_ms)


def _block(drafting_ms: float, cells: Sequence[HeldSessions], rtts: Sequence[float]) -> Block:
    lines = grouped(cells, lambda cell: (CROWD_MODES.index(cell.mode), cell.threads))
    rows: list[tuple[str, ...]] = []
    for key in sorted(lines):
        own = {cell.rtt_ms: cell for cell in lines[key]}
        first = lines[key][0]
        length = f" {first.drafts_here}" if first.drafts_here is not None else ""
        shown = [own.get(rtt) or own.get(None) for rtt in rtts]
        numbers = [UNKNOWN if cell is None else _sessions(cell) for cell in shown]
        name = f"{drafting_ms:g} ms" if not rows else ""
        rows.append((name, first.mode + length, str(first.threads) if first.threads else "", *numbers))
    return rows


def _sessions(cell: HeldSessions) -> str:
    """Return the capacity, with its range where searches differ."""
    return str(cell.sessions) if cell.low == cell.high else f"{cell.sessions} {cell.low}-{cell.high}"
