"""The weights of the trained rules: a small JSON file that `outrider train policy` writes."""

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
from outrider.edge.policies.length.network import Network
from outrider.proto.errors import ConfigError, InvalidArgument

FORMAT = "outrider-window-weights/1"
_SHIPPED = Path(__file__).parent / "weights" / "embedded.json"
_DIGITS = 6  # of each number in the file
_NETWORKS = {"head": DRAFT_INPUTS, "block": BLOCK_INPUTS}
_AGAIN = "write the file again with `outrider train policy`"


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
