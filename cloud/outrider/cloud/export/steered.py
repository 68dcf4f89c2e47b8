"""A steered drafter's folder, and the drafter in torch: `down((up(a) + U c) * act(gate(a)))`.

"Steering Pretrained Drafters during Speculative Decoding" (AAAI 2026, arXiv 2511.09844), section 3, with W_s = U V.
V and what comes before it are the cloud's, see `outrider.cloud.target.projection`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from outrider.cloud.target.projection import PROJECTION_FILE, Projection, decoder_layers, projection_id
from outrider.proto.errors import InvalidArgument, NotFound

STEERING_FILE = "steering.safetensors"
TRAINING_FILE = "training.json"
GAIN = "steering_gain"  # training.json's key
FUSED = "gate_up_proj"  # transformers' name where gate and up projection, or those of all experts, are one matrix


@dataclass(frozen=True)
class SteeringWeights:
    """The steering of one drafter.

    Attributes:
        matrices: U of every layer, float32 [mlp, rank].
        projection: makes the vectors that U was trained with.
        projection_id: id of the projection.
        gain: relative gain in tokens per round against none, by age of the vector in positions; may be empty.
    """

    matrices: tuple[torch.Tensor, ...]
    projection: Projection
    projection_id: str
    gain: dict[str, float]

    @property
    def mlp(self) -> int:
        """Width of the biases."""
        return int(self.matrices[0].shape[0])

    @property
    def rank(self) -> int:
        """Numbers in a steering vector."""
        return int(self.matrices[0].shape[1])


def steering_of(folder: Path) -> SteeringWeights | None:
    """Return the steering that a drafter's folder holds; None: the drafter is not steered.

    Raises:
        InvalidArgument: there is only half of it, or the halves belong to different drafters.
        ModelRefused: the projection's file holds none.
    """
    halves = {name: (folder / name).is_file() for name in (STEERING_FILE, PROJECTION_FILE)}
    if not any(halves.values()):
        return None
    if not all(halves.values()):
        there, missing = sorted(halves, key=lambda name: not halves[name])
        raise InvalidArgument(
            f"{folder} has {there} but no {missing}: copy both from one `outrider train steer`, or take both away",
            field="source_folder",
        )
    matrices = load_steering(folder)
    projection = Projection.load(folder / PROJECTION_FILE)
    rank = int(matrices[0].shape[1])
    if projection.rank != rank:
        raise InvalidArgument(
            f"{STEERING_FILE} takes {rank} numbers and {PROJECTION_FILE} makes {projection.rank}: "
            "copy both from one `outrider train steer`",
            field="source_folder",
        )
    return SteeringWeights(matrices, projection, projection_id(folder / PROJECTION_FILE), _gain(folder))


def load_steering(folder: Path) -> tuple[torch.Tensor, ...]:
    """Load U of every layer, float32 [mlp, rank], from a drafter's folder.

    Raises:
        NotFound: the folder has none: the drafter is not steered.
        InvalidArgument: a tensor is missing, misshapen or not finite.
    """
    path = folder / STEERING_FILE
    if not path.is_file():
        raise NotFound(f"there is no {path}; `outrider train steer` writes one", field="source_folder")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise InvalidArgument(f"{path} is no safetensors file: {error}", field="source_folder") from error
    names = [f"layers.{layer}.weight" for layer in range(len(tensors))]
    if not names or set(names) != set(tensors):
        raise InvalidArgument(
            f"{path} has {', '.join(sorted(tensors)) or 'nothing'} where layers.0.weight and so on are wanted",
            field="source_folder",
        )
    matrices = tuple(tensors[name].float() for name in names)
    for name, matrix in zip(names, matrices, strict=True):
        if matrix.ndim != 2 or matrix.shape != matrices[0].shape or not matrix.numel():
            raise InvalidArgument(
                f"{path}: {name} has the shape {list(matrix.shape)}, not one [mlp, rank] for all layers",
                field="source_folder",
            )
        if not matrix.isfinite().all():
            raise InvalidArgument(f"{path}: {name} has numbers that are not finite", field="source_folder")
    return matrices


def _gain(folder: Path) -> dict[str, float]:
    path = folder / TRAINING_FILE
    gain: Any = json.loads(path.read_text(encoding="utf-8")).get(GAIN, {}) if path.is_file() else {}
    if not isinstance(gain, dict) or not all(
        age.isdecimal() and age == str(int(age)) and type(value) in (int, float) and math.isfinite(value)
        for age, value in gain.items()
    ):
        raise InvalidArgument(
            f'{path}: {GAIN} must be like {{"1": 0.12, "8": 0.08}}: relative gains by age in positions',
            field="source_folder",
        )
    return {age: float(gain[age]) for age in sorted(gain, key=int)}


def up_projections(model: Any) -> tuple[nn.Module, ...]:
    """Return the module in each decoder layer whose output the gate multiplies, first layer first.

    Raises:
        InvalidArgument: a layer has not just one `up_proj` with a `gate_proj` beside it, so it cannot be steered.
    """
    found = []
    for index, layer in enumerate(decoder_layers(model)):
        parts = dict(layer.named_modules())
        gated = [parts[f"{name}.up_proj"] for name in parts if {f"{name}.up_proj", f"{name}.gate_proj"} <= set(parts)]
        fused = any(FUSED in name.split(".") for name, _ in layer.named_parameters())
        if len(gated) != 1 or fused:
            raise InvalidArgument(
                f"a steered drafter needs one up_proj beside one gate_proj in every layer's MLP; layer {index} of this "
                f"{type(model).__name__} has {f'a {FUSED}' if fused else len(gated) or 'none'}: "
                "train one of another architecture, as Llama or Qwen3",
                field="source_folder",
            )
        found.append(gated[0])
    return tuple(found)


def biases_by(matrices: Sequence[torch.Tensor], vectors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return U c of every layer, [..., mlp] each, of `vectors` [..., rank]."""
    return tuple(vectors @ matrix.T for matrix in matrices)


@contextmanager
def steered_by(model: Any, biases: Sequence[torch.Tensor]) -> Iterator[None]:
    """Add `biases`, one of every layer, [mlp] or [n, mlp] of n positions, to the up projections of each forward pass.

    Any model works that `up_projections` accepts; a bias of zero changes nothing.
    """
    with ExitStack() as hooks:
        for module, bias in zip(up_projections(model), biases, strict=True):
            handle = module.register_forward_hook(lambda _module, _inputs, output, bias=bias: output + bias)
            hooks.callback(handle.remove)
        yield


def check_fit(model: Any, steering: SteeringWeights) -> None:
    """Raise InvalidArgument, naming what differs, unless `steering` has the model's layers and its MLP's width."""
    widths = [int(module.get_parameter("weight").shape[0]) for module in up_projections(model)]
    wanted = [steering.mlp] * len(steering.matrices)
    if widths != wanted:
        raise InvalidArgument(
            f"{STEERING_FILE} is for {len(wanted)} layers {steering.mlp} wide, the model has {len(widths)} layers "
            f"{', '.join(map(str, sorted(set(widths))))} wide: copy both from one `outrider train steer`",
            field="source_folder",
        )
