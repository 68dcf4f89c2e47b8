"""Steering a drafter (SD²): the run from a distilled drafter to one that takes vectors of the target's hidden states.

"Steering Pretrained Drafters during Speculative Decoding" (AAAI 2026, arXiv 2511.09844): the frozen target's
distributions on its own text are the teacher, forward KL the loss, on a cosine; drafter and steering learn
together, with vectors that are up to `max_age` positions old. Muon trains the matrices instead of the paper's AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from outrider.cloud.export.steered import STEERING_FILE, biases_by, steered_by, up_projections
from outrider.cloud.target.projection import PROJECTION_FILE, Projection, Taps, default_layers
from outrider.cloud.training.drafter_training import SmallLlama, matrices_and_others, read_drafter
from outrider.cloud.training.measured_acceptance import MeanAcceptance
from outrider.cloud.training.optimizers import Muon, adam, cosine_fall
from outrider.cloud.training.run import TrainingResult, TrainingRun, carry_out
from outrider.cloud.training.training_settings import SteerTraining
from outrider.cloud.training.training_texts import Texts, check_tokenizer_of_folder
from outrider.proto.errors import InvalidArgument

AGES = (1, 2, 4, 8, 16, 32)  # positions, of the vectors that acceptance is measured with
ROUND = 8  # drafts in a round, for the gain that is written into training.json
SURVIVAL = 0.6  # chance that a draft is right, about: a draft one position further is verified this much less often


def train_steering(
    config: SteerTraining,
    *,
    on_step: Callable[[int], None] = lambda _: None,
    stopping: Callable[[], bool] = lambda: False,
) -> TrainingResult:
    """Train a drafter and its steering and write both to `config.output`, with the arguments and errors of `carry_out`.

    Raises:
        InvalidArgument: the drafter has another tokenizer than the target.
    """
    check_tokenizer_of_folder(config.drafter, config.target, field="drafter")
    return carry_out(partial(_SteerRun, config), config, on_step, stopping)


class SteeredDrafter(nn.Module):
    """A drafter, the target's projection, and U of every layer: what a vector adds inside that layer's MLP.

    SD² (arXiv 2511.09844): `down((up(a) + U c) * act(gate(a)))`; with W_s = U V, c = V g comes from `Projection`.

    Attributes:
        layers: U of every layer, [width, rank] each, zero at the start.
    """

    def __init__(self, drafter: SmallLlama, projection: Projection) -> None:
        super().__init__()
        self.drafter = drafter
        self.projection = projection
        widths = [module.get_parameter("weight").shape[0] for module in up_projections(drafter)]
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(width, projection.rank)) for width in widths])
        self.to(drafter.device)

    def hidden(self, tokens: torch.Tensor, taps: torch.Tensor, sources: torch.Tensor | None) -> torch.Tensor:
        """Return the hidden states after the last norm, float32 [rows, positions, hidden].

        Args:
            tokens: int64 [rows, positions].
            taps: float32 [rows, positions, taps * target hidden].
            sources: int64 [rows, positions]: the position whose vector each position gets; negative: none. None: no
                position gets any.
        """
        with nullcontext() if sources is None else self._steered(self.vectors(taps, sources)):
            hidden: torch.Tensor = self.drafter.model(input_ids=tokens, use_cache=False).last_hidden_state
        return hidden

    def _steered(self, vectors: torch.Tensor) -> AbstractContextManager[None]:
        return steered_by(self.drafter, biases_by(list(self.layers), vectors))

    def vectors(self, taps: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        """Return the vector of every position [rows, positions, rank]; zero where there is none."""
        vectors: torch.Tensor = self.projection(taps)
        index = sources.clamp(min=0)[..., None].expand(*sources.shape, vectors.shape[-1])
        return vectors.gather(1, index) * (sources >= 0)[..., None]

    def save_steering(self, folder: Path) -> None:
        """Write the projection and U, float32 `layers.<l>.weight` [width, rank]."""
        self.projection.save(folder / PROJECTION_FILE)
        tensors = {f"layers.{i}.weight": weight.detach().float().cpu() for i, weight in enumerate(self.layers)}
        save_file(tensors, folder / STEERING_FILE)

    def load_steering(self, folder: Path) -> None:
        """Read the files of `save_steering`."""
        self.projection.load_state_dict(Projection.load(folder / PROJECTION_FILE).state_dict())
        tensors = load_file(folder / STEERING_FILE)
        with torch.no_grad():
            for index, weight in enumerate(self.layers):
                weight.copy_(tensors[f"layers.{index}.weight"])


class _SteerRun(TrainingRun):
    """The training of a drafter with its steering."""

    config: SteerTraining

    def __init__(self, config: SteerTraining, target: PreTrainedModel, texts: Texts) -> None:
        drafter = read_drafter(config.drafter, target, field="drafter")
        text = target.config.get_text_config()
        layers = config.layers or default_layers(text.num_hidden_layers)
        if max(layers) >= text.num_hidden_layers:
            raise InvalidArgument(f"the target has layers 0 to {text.num_hidden_layers - 1}", field="layers")
        self.steered = SteeredDrafter(drafter, Projection(layers, text.hidden_size, config.rank, config.model))
        self.taps = Taps(target, layers)
        matrices, others = matrices_and_others(drafter)
        steering = [*self.steered.layers, *self.steered.projection.parameters()]
        by_muon = [{"params": matrices, "lr": config.matrix_lr}, {"params": steering, "lr": config.steering_lr}]
        super().__init__(
            config,
            target,
            texts,
            drafter=drafter,
            students={str(age or "none"): partial(self._logits, age) for age in (0, *AGES)},
            optimizers=[Muon(by_muon, lr=config.matrix_lr), adam(others, config.other_lr)],
            fall=cosine_fall,
        )

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.target(input_ids=tokens, use_cache=False, logits_to_keep=1)
            taps = self.taps.joined().float()
        sources = sources_of(tokens, max_age=self.config.max_age, unsteered=self.config.unsteered)
        return self.steered.hidden(tokens, taps, sources)

    def _logits(self, age: int, tokens: torch.Tensor) -> torch.Tensor:
        sources = aged_sources(tokens, age) if age else None
        logits: torch.Tensor = self.drafter.lm_head(self.steered.hidden(tokens, self.taps.joined().float(), sources))
        return logits

    def write_models(self, folder: Path) -> None:
        super().write_models(folder)
        self.steered.save_steering(folder)

    def read_models(self, folder: Path) -> None:
        super().read_models(folder)
        self.steered.load_steering(folder)

    def facts(self, acceptance: Mapping[str, MeanAcceptance]) -> dict[str, Any]:
        """Return the gain in tokens a round of vectors of each age over none."""
        without = tokens_a_round(acceptance["none"].sampled)
        gains = {age: tokens_a_round(acceptance[str(age)].sampled) / without - 1 for age in AGES}
        return {"steering_gain": {str(age): round(gain, 4) for age, gain in gains.items()}}


def tokens_a_round(acceptance: float, drafts: int = ROUND) -> float:
    """Return the committed tokens a target step, (1 - a^(k + 1)) / (1 - a) (Leviathan et al. 2023, equation 1)."""
    return (1 - acceptance ** (drafts + 1)) / (1 - acceptance) if acceptance < 1 else drafts + 1.0


def sources_of(tokens: torch.Tensor, *, max_age: int, unsteered: float) -> torch.Tensor:
    """Return int64 [rows, positions]: the position whose vector each of `tokens` gets in training; -1: none.

    Vectors are of each age as often as drafts of that age are verified. Every sequence begins with a stretch of up to a
    quarter that has none, as a prompt; a share `unsteered` of the sequences has none at all.
    """
    rows, positions = tokens.shape
    verified = SURVIVAL ** torch.arange(max_age)
    age = 1 + torch.multinomial(verified, rows * positions, replacement=True).view(rows, -1)
    prompt = torch.randint(1, max(2, positions // 4), (rows, 1))
    position = torch.arange(positions).expand(rows, positions)
    steered = (position >= prompt) & (torch.rand(rows, 1) >= unsteered)
    return torch.where(steered, position - age, -1).clamp(min=-1).to(tokens.device)


def aged_sources(tokens: torch.Tensor, age: int) -> torch.Tensor:
    """Return `sources_of` where every position gets the vector of `age` positions before."""
    return (torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape) - age).clamp(min=-1)
