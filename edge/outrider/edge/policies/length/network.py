"""The small network of the trained rules, and its weights in a JSON file that `outrider train policy` writes."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from outrider.edge.policies.length.features import BLOCK_INPUTS, DRAFT_INPUTS
from outrider.proto.errors import ConfigError, InvalidArgument

FORMAT = "outrider-window-weights/1"
_SHIPPED = Path(__file__).parent / "weights" / "embedded.json"
_DIGITS = 6  # of each number in the file
_NETWORKS = {"head": DRAFT_INPUTS, "block": BLOCK_INPUTS}
_AGAIN = "write the file again with `outrider train policy`"
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
        chances: np.ndarray = 1 / (1 + np.exp(-self.output_bias - hidden @ self.output))
        return chances

    @functools.cached_property
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


@dataclass(frozen=True, slots=True)
class Trained:
    """The weights of both networks.

    Attributes:
        head: SpecDec++'s network, from `DRAFT_INPUTS` to the chance of a draft.
        block: SpecKV's network, from `BLOCK_INPUTS` to the accepted share of a block.
        made: traces and settings of the training; for people.
    """

    head: Network
    block: Network
    made: Mapping[str, Any] = field(default_factory=dict)


def save_trained(trained: Trained, path: Path) -> str:
    """Write the file and return the version, which is a hash of the weights; OSError where that fails."""
    networks = {name: _numbers(getattr(trained, name)) for name in _NETWORKS}
    version = hashlib.sha256(json.dumps(networks).encode()).hexdigest()[:12]
    page = {"format": FORMAT, "version": version, "made": dict(trained.made), **networks}
    path.write_text(json.dumps(page, separators=(",", ":"), allow_nan=False) + "\n", encoding="utf-8")
    return version


def load_trained(path: Path) -> Trained:
    """Load a file that `save_trained` wrote.

    Raises:
        ConfigError: the file cannot be read, or a field is missing or wrong; file and field are named.
    """
    try:
        page = json.loads(path.expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", field="weights") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}", field="weights") from error
    if not isinstance(page, dict) or page.get("format") != FORMAT:
        raise ConfigError(f"{path} is not of the format {FORMAT}; {_AGAIN}", field="weights.format")
    made = page.get("made", {})
    if not isinstance(made, dict):
        raise ConfigError(f"{path} must hold an object here; {_AGAIN}", field="weights.made")
    networks = {name: _network(page.get(name), inputs, name, path) for name, inputs in _NETWORKS.items()}
    return Trained(**networks, made=made)


@functools.cache
def shipped() -> Trained:
    """Return the networks of the embedded family."""
    return load_trained(_SHIPPED)


def _numbers(network: Network) -> dict[str, Any]:
    values = {entry.name: getattr(network, entry.name) for entry in fields(Network)}
    return {name: list(value) if name == "inputs" else _rounded(value) for name, value in values.items()}


def _rounded(value: Any) -> Any:
    return [_rounded(entry) for entry in value] if np.ndim(value) else float(f"{value:.{_DIGITS}g}")


def _network(values: Any, inputs: tuple[str, ...], name: str, path: Path) -> Network:
    where = f"weights.{name}"
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold an object here; {_AGAIN}", field=where)
    if values.get("inputs") != list(inputs):
        raise ConfigError(f"{path} has other inputs than {', '.join(inputs)}; {_AGAIN}", field=f"{where}.inputs")
    numbers = {}
    for entry in (entry.name for entry in fields(Network) if entry.name != "inputs"):
        try:
            numbers[entry] = np.array(values[entry], dtype=float)
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"{path} must hold numbers here; {_AGAIN}", field=f"{where}.{entry}") from None
    try:
        bias = numbers.pop("output_bias")
        return Network(inputs, **numbers, output_bias=bias)  # type: ignore[arg-type]  # a shape of () is checked there
    except InvalidArgument as error:
        raise ConfigError(f"{path} {error.message}; {_AGAIN}", field=f"{where}.{error.field}") from error
