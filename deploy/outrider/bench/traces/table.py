"""A replayed grid as tables for a terminal of 100 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from outrider.bench.benchmark.record import LinkRecord
from outrider.bench.benchmark.table import link_name
from outrider.bench.tables import Block, draw_blocks
from outrider.bench.traces.figures import Figure, Replayed, fastest

UNKNOWN, CLOUD, BEST = "-", "(cloud)", "*"
BESIDE = 5  # drafters in a table
HEADINGS = ("link", "drafter", "window", "tok/s", "", "/ cloud", "steps", "accept", "up B", "down B", "mean")
WORDS = 3  # of these headings are of words
LEGEND = (
    "all is computed from recorded hits on a virtual clock. tok/s: tokens a second, from requests to last tokens; "
    "* the most over its link; / cloud: to cloud streaming's; steps: of the target, a token; accept: chance that a "
    "draft is right, given those before it; up B, down B: bytes a token; mean: unverified tokens that the window "
    "policy wished for"
)


def tables(replayed: Replayed) -> Group:
    """All tables: every figure of all prompts together, and speed by domain where there are several."""
    parts: list[RenderableType] = []
    pace = f", a target step at least {replayed.pace_ms:g} ms" if replayed.pace_ms else ""
    blocks = [_block(link, replayed.over(link)) for link in replayed.links]
    parts += [_title(f"Replayed for {replayed.goal}{pace}"), draw_blocks(HEADINGS, WORDS, blocks)]
    if replayed.domains:
        window = replayed.windows[0]
        for first in range(0, len(replayed.drafters), BESIDE):
            drafters = replayed.drafters[first : first + BESIDE]
            blocks = [_by_domain(replayed, link, window, drafters) for link in replayed.links]
            parts.append(_title(f"Tokens a second over cloud streaming's by domain, window {window}"))
            parts.append(draw_blocks(("link", "domain", *drafters), 2, blocks))
    return Group(*parts, Text(LEGEND, style="dim"))


def _block(link: LinkRecord, figures: Sequence[Figure]) -> Block:
    best = fastest(figures)
    names = (link_name(link), *[""] * (len(figures) - 1))
    return [_row(name, figure, BEST if figure is best else "") for name, figure in zip(names, figures, strict=True)]


def _row(name: str, figure: Figure, mark: str) -> tuple[str, ...]:
    return (
        name,
        figure.drafter or CLOUD,
        figure.window or UNKNOWN,
        f"{figure.tokens_per_second:.1f}",
        mark,
        f"{figure.ratio:.2f}",
        f"{figure.steps_per_token:.3f}",
        _number(figure.acceptance, 3),
        f"{figure.uplink_bytes_per_token:.1f}",
        f"{figure.downlink_bytes_per_token:.1f}",
        _number(figure.window_mean, 1),
    )


def _by_domain(replayed: Replayed, link: LinkRecord, window: str, drafters: Sequence[str]) -> Block:
    """The best drafter of each domain is marked."""
    rows = []
    for index, domain in enumerate(replayed.domains):
        own = {f.drafter: f for f in replayed.over(link, domain) if f.window == window}
        best = fastest(list(own.values()))
        cells = [f"{BEST if own[name] is best else ''} {own[name].ratio:.2f}" for name in drafters]
        rows.append((link_name(link) if index == 0 else "", domain or UNKNOWN, *cells))
    return rows


def _number(value: float | None, digits: int) -> str:
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="italic")
