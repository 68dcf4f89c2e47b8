"""Tables of replays for a terminal of 100 columns: a sweep over links and windows, and selectors of a pool."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group

from outrider.bench.links import LinkRecord, link_name
from outrider.bench.table import UNKNOWN, Block, Grid, draw, number
from research.traces.pool_replay import DRAFTER, ORACLE, SELECTOR, Against, Cell, Interval, PoolReplayed, PoolRow
from research.traces.sweep import Replayed, WindowResult, fastest

BESIDE = 5  # drafters in a table
BEST = "*"
HEADINGS = ("link", "drafter", "window", "tok/s", "", "/ cloud", "steps", "accept", "up B", "down B", "mean")
WORDS = 3  # columns of words
LEGEND = (
    "all is computed from recorded hits on a virtual clock. tok/s: tokens a second, from requests to last tokens; "
    "* the most over its link; / cloud: to cloud streaming's; steps: of the target, a token; accept: chance that a "
    "draft is right, given those before it; up B, down B: bytes a token; mean: unverified tokens that the window "
    "policy asked for"
)
POOL_LEGEND = (
    "speed-up over cloud streaming ± half of its 95 % confidence interval over the prompts; * the most, but for the "
    "oracle, which knows in hindsight the best drafter of every text; of {last} alone: oracle: share of its speed; "
    "switches: changes of drafter a thousand tokens"
)


def sweep_tables(replayed: Replayed) -> Group:
    """Return every result of all prompts together, and speed by domain where there are several."""
    blocks = [_block(link, results) for link, results in replayed.by_link.items()]
    grids = [Grid(f"Replayed for {replayed.goal}{paced(replayed.min_step_ms)}", HEADINGS, WORDS, blocks)]
    if replayed.domains:
        window = replayed.windows[0]
        for first in range(0, len(replayed.drafters), BESIDE):
            drafters = replayed.drafters[first : first + BESIDE]
            blocks = [_by_domain(replayed, link, window, drafters) for link in replayed.by_link]
            title = f"Tokens a second over cloud streaming's by domain, window {window}"
            grids.append(Grid(title, ("link", "domain", *drafters), 2, blocks))
    return draw(grids, LEGEND)


def _block(link: LinkRecord, results: Sequence[WindowResult]) -> Block:
    best = fastest(results)
    return [
        (
            link_name(link) if result is results[0] else "",
            result.drafter or "(cloud)",
            result.window or UNKNOWN,
            f"{result.tokens_per_second:.1f}",
            BEST if result is best else "",
            f"{result.ratio:.2f}",
            f"{result.steps_per_token:.3f}",
            number(result.acceptance, 3),
            f"{result.uplink_bytes_per_token:.1f}",
            f"{result.downlink_bytes_per_token:.1f}",
            number(result.window_mean, 1),
        )
        for result in results
    ]


def _by_domain(replayed: Replayed, link: LinkRecord, window: str, drafters: Sequence[str]) -> Block:
    """Return a row a domain, with its best drafter marked."""
    rows = []
    for index, domain in enumerate(replayed.domains):
        cell = (link, domain, window)
        own = {r.drafter: r for r in replayed.results if (r.link, r.domain, r.window) == cell}
        best = fastest(list(own.values()))
        cells = [f"{BEST if own[name] is best else ''} {own[name].ratio:.2f}" for name in drafters]
        rows.append((link_name(link) if index == 0 else "", domain or UNKNOWN, *cells))
    return rows


def pool_tables(replayed: PoolReplayed) -> Group:
    """Return a table a link: a line for each drafter, selector and the oracle, a column for each row of texts."""
    grids = []
    for link, rows in replayed.by_link.items():
        headings = ("", *(row.name or UNKNOWN for row in rows), "oracle", "switches")
        blocks = [block for kind in (DRAFTER, SELECTOR, ORACLE) if (block := _columns(rows, kind))]
        title = f"{link_name(link)}{paced(replayed.min_step_ms)}: {replayed.seeds} runs, window {replayed.window}"
        grids.append(Grid(title, headings, 1, blocks))
        if rows[0].of_kind(DRAFTER):
            grids += _against(rows)
    last = replayed.rows[-1].name or "all"
    return draw(grids, POOL_LEGEND.format(last=last))


def _columns(rows: Sequence[PoolRow], kind: str) -> Block:
    best = [max((cell for cell in row.cells if cell.kind != ORACLE), key=_speed_up, default=None) for row in rows]
    lines = []
    for cells in zip(*(row.of_kind(kind) for row in rows), strict=True):
        last = cells[-1]
        shown = [_cell(cell, cell is most) for cell, most in zip(cells, best, strict=True)]
        lines.append((last.name, *shown, f"{last.of_oracle:.3f}", f"{last.switches:.0f}"))
    return lines


def _against(rows: Sequence[PoolRow]) -> list[Grid]:
    """Return the speeds over those of the row's best drafter alone, and over those of the first drafter alone."""
    others = [cells for cells in zip(*(row.cells for row in rows), strict=True) if cells[0].kind != DRAFTER]
    headings = ("", *(row.name or UNKNOWN for row in rows))
    best = [(cells[0].name, *(_ratio(cell.of_best) for cell in cells)) for cells in others]
    first = [(cells[0].name, *(_ratio(cell.of_first) for cell in cells)) for cells in others]
    name = rows[0].of_kind(DRAFTER)[0].name
    return [
        Grid("Speed over that of the row's best drafter alone", headings, 1, [best]),
        Grid(f"Speed over that of {name} alone", headings, 1, [first]),
    ]


def _ratio(against: Against | None) -> str:
    return UNKNOWN if against is None else f"{against.ratio:.3f}{_spread(against.interval)}"


def _spread(interval: Interval | None) -> str:
    return f"±{(interval.high - interval.low) / 2:.3f}".replace("0.", ".") if interval else ""


def _cell(cell: Cell, is_best: bool) -> str:
    spread = f"±{(cell.interval.high - cell.interval.low) / 2:.2f}".replace("0.", ".") if cell.interval else ""
    return f"{BEST if is_best else ''}{cell.speed_up:.2f}{spread}"


def _speed_up(cell: Cell) -> float:
    return cell.speed_up


def paced(min_step_ms: float) -> str:
    """Return what a title says of the shortest target step; empty where there is none."""
    return f", a target step at least {min_step_ms:g} ms" if min_step_ms else ""
