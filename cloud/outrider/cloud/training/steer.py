"""Steering a drafter (SD²): the run from a distilled drafter to one that takes vectors of the target's hidden states.

"Steering Pretrained Drafters during Speculative Decoding" (AAAI 2026, arXiv 2511.09844): the frozen target's
distributions on its own text are the teacher, forward KL the loss, on a cosine; drafter and steering learn
together, with vectors that are up to `max_age` positions old. Muon trains the matrices instead of the paper's AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from outrider.cloud.models.heads import head_terms, tokens_of
from outrider.cloud.target.projection import PROJECTION_FILE, Projection, Taps, default_layers
from outrider.cloud.training.drafter_training import matrices_and_others, read_drafter
from outrider.cloud.training.measured_acceptance import MeanAcceptance, Student
from outrider.cloud.training.optimizers import Muon, adam, cosine_fall
from outrider.cloud.training.run import TrainingResult, TrainingRun, as_json, carry_out
from outrider.cloud.training.same_tokenizer import check_tokenizer_of_folder
from outrider.cloud.training.steered_training import SteeredDrafter, aged_sources, sources_of
from outrider.cloud.training.training_report import Reporter
from outrider.cloud.training.training_settings import ARMS, SteerTraining, TrainingArm
from outrider.cloud.training.training_texts import Texts
from outrider.proto.errors import InvalidArgument

AGES = (1, 2, 4, 8, 16, 32)
ROUND = 8  # drafts in a round, for the gain that is written into training.json


def train_steering(
    config: SteerTraining,
    *,
    on_step: Callable[[int], None] | None = None,
    stopping: Callable[[], bool] | None = None,
) -> TrainingResult:
    """Train every arm of `config` on the same sequences and write each to `config.output`/<its name>.

    Arguments are those of `carry_out`, errors too.

    Raises:
        InvalidArgument: the drafter has another tokenizer than the target.
    """
    check_tokenizer_of_folder(config.drafter, config.target, field="drafter")
    return carry_out(partial(_SteerRun, config), config, on_step, stopping)


class _SteerRun(TrainingRun):
    """The training of all arms; the target runs once for all of them."""

    config: SteerTraining

    def __init__(self, config: SteerTraining, target: PreTrainedModel, texts: Texts, reporter: Reporter) -> None:
        self.arms = {name: _make_arm(config, target, ARMS[name]) for name in config.arms}
        self.taps = Taps(target, next(iter(self.arms.values())).projection.layers)
        students: dict[str, Student] = {}
        for name, steered in self.arms.items():
            for age in (0, *AGES) if steered.arm.steered else (0,):
                students[f"{name}/{age or 'none'}/"] = partial(self._logits, steered, age)
        first = config.arms[0]
        super().__init__(
            config,
            target,
            texts,
            reporter,
            models={name: steered.drafter for name, steered in self.arms.items()},
            students=students,
            decisive=f"{first}/{AGES[0] if ARMS[first].steered else 'none'}/",
            trained=[steered.parameters() for steered in self.arms.values()],
            optimizers=[each for steered in self.arms.values() for each in _optimizers(config, steered)],
            fall=cosine_fall,
        )

    def backward(self, blocks: torch.Tensor, *, share: float) -> float:
        """Train every arm, and return the first arm's loss."""
        config, tokens = self.config, self.texts.tokens_of(blocks)
        with torch.no_grad():
            logits_by_target = self.target(input_ids=tokens, use_cache=False).logits
            taps = self.taps.joined().float()
        losses: list[float] = []
        seed = int(torch.randint(2**62, ()))
        for steered in self.arms.values():
            sources = None
            if steered.arm.steered:
                generator = torch.Generator().manual_seed(seed)  # the same prompts and omissions for all arms
                sources = sources_of(
                    steered.arm, tokens, max_age=config.max_age, unsteered=config.unsteered, generator=generator
                )
            hidden = steered.hidden(tokens, taps, sources)
            known = tokens_of(steered.drafter)
            logits = logits_by_target if known is None else logits_by_target[..., known]
            losses.append(self.learn(*head_terms(steered.drafter.lm_head, hidden), logits, share=share))
        return losses[0]

    def _logits(self, steered: SteeredDrafter, age: int, tokens: torch.Tensor) -> torch.Tensor:
        sources = aged_sources(tokens, age) if age else None
        hidden = steered.hidden(tokens, self.taps.joined().float(), sources)
        logits: torch.Tensor = steered.drafter.lm_head(hidden)
        return logits

    def write_models(self, folder: Path) -> None:
        super().write_models(folder)
        for name, steered in self.arms.items():
            if steered.arm.steered:
                steered.projection.save(folder / name / PROJECTION_FILE)
                steered.steering.save(folder / name)

    def read_models(self, folder: Path) -> None:
        super().read_models(folder)
        for name, steered in self.arms.items():
            if steered.arm.steered:
                steered.projection.load_state_dict(Projection.load(folder / name / PROJECTION_FILE).state_dict())
                steered.steering.load(folder / name)

    def facts(self, name: str, acceptance: Mapping[str, MeanAcceptance]) -> dict[str, Any]:
        """Return the arm's acceptance, and the gain in tokens a round of vectors of each age over none."""
        own = {key.removeprefix(f"{name}/"): a for key, a in acceptance.items() if key.startswith(f"{name}/")}
        facts: dict[str, Any] = {"arm": name, "held_out_acceptance": as_json(own)}
        if ARMS[name].steered:
            without = tokens_a_round(own["none/mean"].sampled)
            facts["steering_gain"] = {
                str(age): round(tokens_a_round(own[f"{age}/mean"].sampled) / without - 1, 4) for age in AGES
            }
        return facts


def tokens_a_round(acceptance: float, drafts: int = ROUND) -> float:
    """Return the committed tokens a target step, (1 - a^(k + 1)) / (1 - a) (Leviathan et al. 2023, equation 1)."""
    return (1 - acceptance ** (drafts + 1)) / (1 - acceptance) if acceptance < 1 else drafts + 1.0


def _make_arm(config: SteerTraining, target: PreTrainedModel, arm: TrainingArm) -> SteeredDrafter:
    drafter = read_drafter(config.drafter, target, field="drafter")
    text = target.config.get_text_config()
    layers = config.layers or default_layers(text.num_hidden_layers)
    if max(layers) >= text.num_hidden_layers:
        raise InvalidArgument(f"the target has layers 0 to {text.num_hidden_layers - 1}", field="layers")
    drafter.requires_grad_(not arm.frozen)
    return SteeredDrafter(drafter, Projection(layers, text.hidden_size, config.rank, config.model), arm)


def _optimizers(config: SteerTraining, steered: SteeredDrafter) -> list[torch.optim.Optimizer]:
    """Return Muon for matrices, and AdamW for the rest where the arm learns any of it."""
    optimizers: list[torch.optim.Optimizer] = []
    by_muon = []
    if not steered.arm.frozen:
        matrices, others = matrices_and_others(steered.drafter)
        by_muon.append({"params": matrices, "lr": config.matrix_lr})
        optimizers.append(adam(others, config.other_lr))
    if steered.arm.steered:
        learnt = [*steered.steering.parameters(), *steered.projection.parameters()]
        by_muon.append({"params": learnt, "lr": config.steering_lr})
    return [Muon(by_muon, lr=config.matrix_lr), *optimizers]
