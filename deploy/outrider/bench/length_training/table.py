"""Verdicts for a terminal of 100 columns."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from outrider.bench.length_training.judge import Verdict
from outrider.bench.tables import Block, draw_blocks

LEGEND = (
    "on held-out prompts; losses in nats a row. one chance: the same for all; network: as trained; least: no network "
    "can go below; chance, outcome: means over tenths of the rows, least chances first; off: mean distance between them"
)


def tables(verdicts: Mapping[str, Verdict]) -> Group:
    """Losses, and calibration tenth by tenth; by what is predicted."""
    losses: list[Block] = [[_losses(name, verdict)] for name, verdict in verdicts.items()]
    parts: list[RenderableType] = [
        draw_blocks(("predicts", "rows", "one chance", "network", "least", "off"), 1, losses),
        draw_blocks(("predicts", "rows", "chance", "outcome"), 1, [_bins(*item) for item in verdicts.items()]),
    ]
    return Group(*parts, Text(LEGEND, style="dim"))


def _losses(name: str, verdict: Verdict) -> tuple[str, ...]:
    losses = (verdict.loss_of_mean, verdict.loss, verdict.loss_of_outcomes, verdict.calibration_error)
    return (name, str(verdict.rows), *(f"{value:.4f}" for value in losses))


def _bins(name: str, verdict: Verdict) -> Block:
    return [
        (name if i == 0 else "", str(b.rows), f"{b.chance:.3f}", f"{b.outcome:.3f}") for i, b in enumerate(verdict.bins)
    ]
