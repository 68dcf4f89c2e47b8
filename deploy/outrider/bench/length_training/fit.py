"""Fit of a network to rows: cross-entropy by Adam (Kingma and Ba 2015), in numpy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from outrider.bench.length_training.rows import TrainingRows
from outrider.edge.policies.length.features import BLOCK_INPUTS, DRAFT_INPUTS
from outrider.edge.policies.length.network import Network
from outrider.proto.errors import ConfigError

OPTIONAL_INPUTS = frozenset((*DRAFT_INPUTS, *BLOCK_INPUTS)) - {"temperature", "depth", "known", "length"}
_FADES, _EPSILON = (0.9, 0.999), 1e-8
_MIN_SCALE = 1e-9  # smallest deviation of an input that varies


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Settings of a fit.

    Attributes:
        hidden: number of hidden units.
        steps: number of steps, of one batch each; the rows are repeated.
        rate: first learning rate; falls to 0 as half a cosine.
        batch: rows in a step.
        decay: weight decay of each step, times the rate.
        forgotten: chance that an optional input of a row is hidden, and that all of them are, so that the network
            learns to do without them.
        seed: seed of everything random.
    """

    hidden: int = 16
    steps: int = 4000
    rate: float = 0.01
    batch: int = 256
    decay: float = 1e-3
    forgotten: float = 0.1
    seed: int = 0

    def network(self, names: tuple[str, ...], rows: TrainingRows) -> Network:
        """Fit a network with inputs of these names [f].

        Raises:
            ConfigError: there are no rows.
        """
        if not len(rows):
            raise ConfigError("hold too few tokens to learn from; record more or longer texts", field="traces")
        rng = np.random.default_rng(self.seed)
        means, scales = _moments(rows.inputs)
        f, h = len(names), self.hidden
        inward, outward = rng.normal(0, 1 / math.sqrt(2 * f), (2 * f, h)), rng.normal(0, 1 / math.sqrt(h), h)
        blank = Network(names, means, scales, inward, np.zeros(h), outward, 0.0)
        optional = np.array([name in OPTIONAL_INPUTS for name in names])
        weights = [blank.hidden, blank.hidden_bias, blank.output, np.zeros(1)]
        first, second = ([np.zeros_like(w) for w in weights] for _ in range(2))
        for step, chosen in enumerate(self._batches(len(rows), rng), 1):
            inputs = rows.inputs[chosen]
            one, all_of_them = rng.random(inputs.shape), rng.random((len(inputs), 1))
            forgotten = optional & ((one < self.forgotten) | (all_of_them < self.forgotten))
            z = blank.standardised(np.where(forgotten, np.nan, inputs))
            rate = self.rate * (1 + math.cos(math.pi * step / self.steps)) / 2
            for i, gradient in enumerate(_gradients(weights, z, rows.outcomes[chosen])):
                first[i] += (1 - _FADES[0]) * (gradient - first[i])
                second[i] += (1 - _FADES[1]) * (gradient**2 - second[i])
                mean, square = (m / (1 - f**step) for m, f in zip((first[i], second[i]), _FADES, strict=True))
                kept = 1 - rate * self.decay * (weights[i].ndim > 1)
                weights[i] = kept * weights[i] - rate * mean / (np.sqrt(square) + _EPSILON)
        hidden, hidden_bias, output, output_bias = weights
        return Network(names, means, scales, hidden, hidden_bias, output, float(output_bias[0]))

    def _batches(self, rows: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
        """Yield the rows of each step: all in a random order, then all in another."""
        orders = (rng.permutation(rows) for _ in itertools.count())
        batches = (order[i : i + self.batch] for order in orders for i in range(0, rows, self.batch))
        return itertools.islice(batches, self.steps)


def _moments(inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of each column's known values; 0 where there are none, or all are equal."""
    columns = [column[~np.isnan(column)] for column in inputs.T]
    means = np.array([column.mean() if len(column) else 0.0 for column in columns])
    scales = np.array([column.std() if len(column) else 0.0 for column in columns])
    return means, np.where(scales > _MIN_SCALE, scales, 0.0)


def _gradients(weights: list[np.ndarray], z: np.ndarray, outcomes: np.ndarray) -> list[np.ndarray]:
    """Return the gradients of the mean cross-entropy, for each of the weights."""
    hidden, hidden_bias, output, output_bias = weights
    units = np.tanh(z @ hidden + hidden_bias)
    chances = 1 / (1 + np.exp(-(units @ output + output_bias)))
    error = (chances - outcomes) / len(outcomes)
    hidden_error = np.outer(error, output) * (1 - units**2)
    return [z.T @ hidden_error, hidden_error.sum(axis=0), units.T @ error, np.array([error.sum()])]
