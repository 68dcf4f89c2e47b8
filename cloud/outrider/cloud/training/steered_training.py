"""A drafter whose MLPs take a vector of the target's hidden states (SD²), as torch trains it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from outrider.cloud.export.steered import STEERING_FILE, adding, biases_by, up_projections
from outrider.cloud.target.projection import Projection
from outrider.cloud.training.drafter_training import SmallLlama
from outrider.cloud.training.training_settings import TrainingArm

SURVIVAL = 0.6  # chance that a draft is right, about: a draft one position further is verified this much less often


class SteeringLayers(nn.Module):
    """U of every layer: what a steering vector adds inside that layer's MLP, [width, rank] each, zero at the start.

    SD² (arXiv 2511.09844): `down((up(a) + U c) * act(gate(a)))`; with W_s = U V, c = V g comes from `Projection`.
    `place` "after" is the paper's ablation: U c is added to the MLP's result instead.
    """

    def __init__(self, drafter: SmallLlama, rank: int, place: str) -> None:
        super().__init__()
        self.rank = rank
        self.file = STEERING_FILE if place == "inside" else f"{place}-{STEERING_FILE}"  # no drafter runs the latter
        mlps = [layer.mlp for layer in drafter.model.layers]
        widths = [mlp.up_proj.out_features if place == "inside" else mlp.down_proj.out_features for mlp in mlps]
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(width, rank)) for width in widths])
        self._steered = up_projections(drafter) if place == "inside" else tuple(mlps)  # the drafter's, not its own

    def by(self, vectors: torch.Tensor | None) -> AbstractContextManager[None]:
        """Steer the drafter's passes inside by `vectors` [rows, positions, rank]; None: not at all."""
        if vectors is None:
            return nullcontext()
        return adding(self._steered, biases_by(list(self.layers), vectors))

    def save(self, folder: Path) -> None:
        """Write `file`: float32 `layers.<l>.weight` [width, rank]."""
        tensors = {f"layers.{i}.weight": weight.detach().float().cpu() for i, weight in enumerate(self.layers)}
        save_file(tensors, folder / self.file)

    def load(self, folder: Path) -> None:
        """Read the file of `save`."""
        tensors = load_file(folder / self.file)
        with torch.no_grad():
            for index, weight in enumerate(self.layers):
                weight.copy_(tensors[f"layers.{index}.weight"])


class SteeredDrafter:
    """A drafter, its steering and the target's projection: what one arm trains."""

    def __init__(self, drafter: SmallLlama, projection: Projection, arm: TrainingArm) -> None:
        self.arm = arm
        self.drafter = drafter
        self.projection = projection.to(drafter.device)
        self.steering = SteeringLayers(drafter, projection.rank, arm.place).to(drafter.device)

    def parameters(self) -> list[nn.Parameter]:
        """Return all parameters, each once."""
        modules = (self.drafter, self.steering, self.projection)
        return list(dict.fromkeys(p for module in modules for p in module.parameters()))

    def hidden(self, tokens: torch.Tensor, taps: torch.Tensor, sources: torch.Tensor | None) -> torch.Tensor:
        """Return the hidden states after the last norm, float32 [rows, positions, hidden].

        Args:
            tokens: int64 [rows, positions].
            taps: float32 [rows, positions, taps * target hidden].
            sources: int64 [rows, positions]: the position whose vector each position gets; negative: none. None: no
                position gets any.
        """
        with self.steering.by(None if sources is None else self.vectors(taps, sources)):
            hidden: torch.Tensor = self.drafter.model(input_ids=tokens, use_cache=False).last_hidden_state
        return hidden

    def vectors(self, taps: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        """Return the vector of every position [rows, positions, rank]; zero where there is none."""
        vectors: torch.Tensor = self.projection(taps)
        index = sources.clamp(min=0)[..., None].expand(*sources.shape, vectors.shape[-1])
        return vectors.gather(1, index) * (sources >= 0)[..., None]


def sources_of(
    arm: TrainingArm, tokens: torch.Tensor, *, max_age: int, unsteered: float, generator: torch.Generator
) -> torch.Tensor:
    """Return int64 [rows, positions]: the position whose vector each of `tokens` gets while an arm trains; -1: none.

    Every sequence begins with a stretch of up to a quarter that has none, as a prompt; a share `unsteered` of the
    sequences has none at all.
    """
    rows, positions = tokens.shape
    position = torch.arange(positions).expand(rows, positions)
    if arm.offset == "likely":
        verified = SURVIVAL ** torch.arange(max_age)
        age = 1 + torch.multinomial(verified, rows * positions, replacement=True, generator=generator).view(rows, -1)
    elif arm.offset == "random":
        age = torch.randint(1, max_age + 1, (rows, positions), generator=generator)
    elif arm.offset == "block":
        phase = torch.randint(max_age, (rows, 1), generator=generator)
        age = (position + phase) % max_age + 1
    else:
        age = torch.ones_like(position)
    prompt = torch.randint(1, max(2, positions // 4), (rows, 1), generator=generator)
    without = torch.rand(rows, 1, generator=generator) < unsteered
    sources = position - age
    return torch.where((position >= prompt) & ~without, sources, -1).clamp(min=-1).to(tokens.device)


def aged_sources(tokens: torch.Tensor, age: int) -> torch.Tensor:
    """Return `sources_of` where every position gets the vector of `age` positions before."""
    return (torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape) - age).clamp(min=-1)
