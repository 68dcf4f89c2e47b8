"""The small network of one hidden layer that the trained rules use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from outrider.proto.errors import InvalidArgument

_WIDEST = 4.0  # scales from the mean; beyond what was trained on, a network only guesses


@dataclass(frozen=True, eq=False)
class Network:
    """chance = logistic(output . tanh(hidden z + hidden_bias) + output_bias), of f inputs and h hidden units.

    z [2 f] are the standardised inputs and after them a mark for each that is not known. An unknown input is at its
    mean, and so is one that never varied in training, since nothing can have been learnt from it.

    Attributes:
        inputs: [f] names.
        means: [f] mean of each in training.
        scales: [f] standard deviation of each in training; 0: it never varied, or was never known.
        hidden: [2 f, h] weights.
        hidden_bias: [h] biases.
        output: [h] weights.
        output_bias: bias of the log odds.

    Raises:
        InvalidArgument: a shape is wrong, or a number is not finite; the field is named.
    """

    inputs: tuple[str, ...]
    means: np.ndarray
    scales: np.ndarray
    hidden: np.ndarray
    hidden_bias: np.ndarray
    output: np.ndarray
    output_bias: float

    def __post_init__(self) -> None:
        f, h = len(self.inputs), len(np.atleast_1d(self.hidden_bias))
        shapes = {"means": (f,), "scales": (f,), "hidden": (2 * f, h), "hidden_bias": (h,), "output": (h,)}
        for name, shape in (shapes | {"output_bias": ()}).items():
            value = np.asarray(getattr(self, name))
            if value.shape != shape:
                wanted = " x ".join(map(str, shape)) or "one"
                raise InvalidArgument(f"must hold {wanted} numbers, and has the shape {value.shape}", field=name)
            if not np.isfinite(value).all():
                raise InvalidArgument("must hold finite numbers", field=name)
        if (self.scales < 0).any():
            raise InvalidArgument("must be 0 or more", field="scales")

    def standardised(self, inputs: np.ndarray) -> np.ndarray:
        """Return z [n, 2 f] for inputs [n, f], NaN where not known."""
        known = ~np.isnan(inputs) & (self.scales > 0)
        scaled = (inputs - self.means) / np.where(self.scales > 0, self.scales, 1.0)
        z = np.empty((len(inputs), 2 * len(self.means)))
        z[:, : len(self.means)] = np.where(known, np.minimum(np.maximum(scaled, -_WIDEST), _WIDEST), 0.0)
        z[:, len(self.means) :] = ~known
        return z

    def chances(self, inputs: np.ndarray) -> np.ndarray:
        """Return chances [n] for inputs [n, f], NaN where not known."""
        low, high, of_value, of_mark, bias = self._folded
        unknown = np.isnan(inputs)
        if unknown.any():
            inputs, bias = np.where(unknown, self.means, inputs), bias + unknown.astype(float) @ of_mark
        hidden = np.tanh(np.minimum(np.maximum(inputs, low), high) @ of_value + bias)
        return 1 / (1 + np.exp(-self.output_bias - hidden @ self.output))

    @cached_property
    def _folded(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Standardising as part of the weights: half the time of each call, which is all in numpy's calls.

        Least and greatest value of each input, weights of values and of marks, bias.
        """
        f = len(self.inputs)
        varies = self.scales > 0
        of_value = np.where(varies, 1 / np.where(varies, self.scales, 1.0), 0.0)[:, None] * self.hidden[:f]
        of_mark = np.where(varies[:, None], self.hidden[f:], 0.0)
        bias = self.hidden_bias - self.means @ of_value + (~varies) @ self.hidden[f:]
        reach = _WIDEST * self.scales
        return self.means - reach, self.means + reach, of_value, of_mark, bias
