"""Calibration of a network on rows that it was not trained on, with tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from rich.console import Group

from outrider.bench.length_training.rows import TrainingRows
from outrider.bench.table import Block, Grid, draw
from outrider.edge.policies.length.network import Network

_BINS = 10
_SURE = 1e-6
LEGEND = (
    "on held-out prompts; losses in nats a row. one chance: the same for all; network: as trained; least: no network "
    "can go below; chance, outcome: means over tenths of the rows, least chances first; off: mean distance between them"
)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Losses of one network in nats a row, and its calibration.

    Attributes:
        rows: number of rows.
        loss: cross-entropy of the network's chances.
        loss_of_mean: loss of one chance for all, the mean outcome in training.
        loss_of_outcomes: smallest loss that any chances can have; 0 if outcomes are yes or no.
        bins: rows, mean chance and mean outcome of each tenth of the rows, smallest chances first.
    """

    rows: int
    loss: float
    loss_of_mean: float
    loss_of_outcomes: float
    bins: tuple[tuple[int, float, float], ...]

    @property
    def calibration_error(self) -> float:
        """Mean distance between chance and outcome over the bins (expected calibration error)."""
        distances = (rows * abs(chance - outcome) for rows, chance, outcome in self.bins)
        return sum(distances) / self.rows if self.rows else math.nan


def evaluate(network: Network, known: TrainingRows, unseen: TrainingRows) -> Evaluation:
    """Evaluate the network, which was trained on `known`, on `unseen` rows."""
    chances, outcomes = network.chances(unseen.inputs), unseen.outcomes
    order = np.argsort(chances, kind="stable")
    tenths = [tenth for tenth in np.array_split(order, _BINS) if len(tenth)]
    return Evaluation(
        rows=len(unseen),
        loss=_loss(chances, outcomes),
        loss_of_mean=_loss(np.full(len(unseen), known.outcomes.mean()), outcomes),
        loss_of_outcomes=_loss(outcomes, outcomes),
        bins=tuple((len(t), float(chances[t].mean()), float(outcomes[t].mean())) for t in tenths),
    )


def _loss(chances: np.ndarray, outcomes: np.ndarray) -> float:
    if not len(outcomes):
        return math.nan
    bounded = np.clip(chances, _SURE, 1 - _SURE)
    return float(-(outcomes * np.log(bounded) + (1 - outcomes) * np.log(1 - bounded)).mean())


def tables(evaluations: Mapping[str, Evaluation]) -> Group:
    """Return losses, and calibration tenth by tenth, by what is predicted, for a terminal of 100 columns."""
    losses: list[Block] = []
    tenths: list[Block] = []
    for name, e in evaluations.items():
        values = (e.loss_of_mean, e.loss, e.loss_of_outcomes, e.calibration_error)
        losses.append([(name, str(e.rows), *(f"{value:.4f}" for value in values))])
        cells = [(str(rows), f"{chance:.3f}", f"{outcome:.3f}") for rows, chance, outcome in e.bins]
        tenths.append([("" if i else name, *row) for i, row in enumerate(cells)])
    grids = (
        Grid("", ("predicts", "rows", "one chance", "network", "least", "off"), 1, losses),
        Grid("", ("predicts", "rows", "chance", "outcome"), 1, tenths),
    )
    return draw(grids, LEGEND)
