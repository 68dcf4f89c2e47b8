"""Calibration of a network on rows that it has not seen, with tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from rich.console import Group

from outrider.bench.length_training.rows import Rows
from outrider.bench.table import Block, Grid, draw
from outrider.edge.policies.length.network import Network

_BINS = 10
_SURE = 1e-6
LEGEND = (
    "on held-out prompts; losses in nats a row. one chance: the same for all; network: as trained; least: no network "
    "can go below; chance, outcome: means over tenths of the rows, least chances first; off: mean distance between them"
)


@dataclass(frozen=True, slots=True)
class Bin:
    """Rows of similar chance: their number, mean chance and mean outcome."""

    rows: int
    chance: float
    outcome: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Losses and calibration of one network, in nats a row.

    Attributes:
        rows: number of rows.
        loss: cross-entropy of the network's chances.
        loss_of_mean: loss of one chance for all, the mean outcome of the rows that were learnt from.
        loss_of_outcomes: least loss that any chances can have; 0 if outcomes are yes or no.
        bins: tenths of the rows, least chances first.
    """

    rows: int
    loss: float
    loss_of_mean: float
    loss_of_outcomes: float
    bins: tuple[Bin, ...]

    @property
    def calibration_error(self) -> float:
        """Mean distance between chance and outcome over the bins (expected calibration error)."""
        return sum(b.rows * abs(b.chance - b.outcome) for b in self.bins) / self.rows if self.rows else math.nan


def evaluate(network: Network, learnt: Rows, unseen: Rows) -> Evaluation:
    """Evaluate the network on `unseen`; `learnt`: what it was trained on."""
    chances, outcomes = network.chances(unseen.inputs), unseen.outcomes
    order = np.argsort(chances, kind="stable")
    tenths = [tenth for tenth in np.array_split(order, _BINS) if len(tenth)]
    return Evaluation(
        rows=len(unseen),
        loss=_loss(chances, outcomes),
        loss_of_mean=_loss(np.full(len(unseen), learnt.outcomes.mean()), outcomes),
        loss_of_outcomes=_loss(outcomes, outcomes),
        bins=tuple(Bin(len(t), float(chances[t].mean()), float(outcomes[t].mean())) for t in tenths),
    )


def _loss(chances: np.ndarray, outcomes: np.ndarray) -> float:
    if not len(outcomes):
        return math.nan
    bounded = np.minimum(np.maximum(chances, _SURE), 1 - _SURE)
    return float(-(outcomes * np.log(bounded) + (1 - outcomes) * np.log(1 - bounded)).mean())


def tables(evaluations: Mapping[str, Evaluation]) -> Group:
    """Return losses, and calibration tenth by tenth, by what is predicted, for a terminal of 100 columns."""
    losses: list[Block] = [[_losses(name, evaluation)] for name, evaluation in evaluations.items()]
    grids = (
        Grid("", ("predicts", "rows", "one chance", "network", "least", "off"), 1, losses),
        Grid("", ("predicts", "rows", "chance", "outcome"), 1, [_bins(*item) for item in evaluations.items()]),
    )
    return draw(grids, LEGEND)


def _losses(name: str, evaluation: Evaluation) -> tuple[str, ...]:
    losses = (evaluation.loss_of_mean, evaluation.loss, evaluation.loss_of_outcomes, evaluation.calibration_error)
    return (name, str(evaluation.rows), *(f"{value:.4f}" for value in losses))


def _bins(name: str, evaluation: Evaluation) -> Block:
    return [
        (name if i == 0 else "", str(b.rows), f"{b.chance:.3f}", f"{b.outcome:.3f}")
        for i, b in enumerate(evaluation.bins)
    ]
