"""Steering a drafter (SD²): the run from a distilled drafter to one that takes vectors of the target's hidden states.

"Steering Pretrained Drafters during Speculative Decoding" (AAAI 2026, arXiv 2511.09844): the frozen target's
distributions on its own text are the teacher, forward KL the loss, on a cosine; drafter and steering learn
together, with vectors that are up to `max_age` positions old. Muon trains the matrices instead of the paper's AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from outrider.cloud.steering import PROJECTION_FILE, Projection, Taps, default_layers
from outrider.cloud.training.acceptance import Acceptance, Row, Student, compare_students
from outrider.cloud.training.drafter import matrices_and_others, read_drafter
from outrider.cloud.training.loss import forward_kl
from outrider.cloud.training.muon import Muon
from outrider.cloud.training.report import Reporter
from outrider.cloud.training.run import Run, as_json, carry_out, mean_acceptance, mean_kl
from outrider.cloud.training.schedule import CosineBudget
from outrider.cloud.training.settings import ARMS, Arm, SteerTraining
from outrider.cloud.training.steered import SteeredDrafter, aged_sources, sources_of
from outrider.cloud.training.texts import Texts
from outrider.proto.errors import InvalidArgument

AGES = (1, 2, 4, 8, 16, 32)
ROUND = 8  # drafts in a round, for the gain that is written into training.json


@dataclass(frozen=True)
class SteerTrainingResult:
    """The results of a finished run.

    Attributes:
        folders: folder of each arm's drafter, by its name.
        steps: optimizer steps.
        tokens_seen: tokens trained on, the same for every arm.
        acceptance: results on held-out text; keys `<arm>/<none or age>/<text>`.
        elapsed_s: seconds of training, over all resumes.
    """

    folders: Mapping[str, Path]
    steps: int
    tokens_seen: int
    acceptance: Mapping[str, Acceptance]
    elapsed_s: float


def train_steering(
    config: SteerTraining,
    *,
    on_step: Callable[[int], None] | None = None,
    stopping: Callable[[], bool] | None = None,
    reporter: Reporter | None = None,
) -> SteerTrainingResult:
    """Train every arm of `config` on the same sequences and write each to `config.output`/<its name>.

    Arguments and errors are those of `carry_out`.
    """
    run, acceptance = carry_out(
        config, partial(_SteerRun, config), on_step=on_step, stopping=stopping, reporter=reporter
    )
    progress = run.progress
    return SteerTrainingResult(
        {name: config.output / name for name in config.arms},
        progress.step,
        progress.tokens_seen,
        acceptance,
        progress.elapsed_s,
    )


class _SteerRun(Run):
    """The training of all arms; the target runs once for all of them."""

    config: SteerTraining

    def __init__(self, config: SteerTraining, target: PreTrainedModel, texts: Texts, reporter: Reporter) -> None:
        self.arms = {name: _make_arm(config, target, ARMS[name]) for name in config.arms}
        self.taps = Taps(target, next(iter(self.arms.values())).projection.layers)
        budget = CosineBudget(config.steps, config.minutes, config.warm_up_steps)
        optimizers = [each for name, arm in self.arms.items() for each in _optimizers(config, ARMS[name], arm)]
        super().__init__(config, target, texts, reporter, budget, optimizers)

    @property
    def models(self) -> Mapping[str, PreTrainedModel]:
        return {name: steered.drafter for name, steered in self.arms.items()}

    def backward(self, tokens: torch.Tensor, *, share: float) -> float:
        """Train every arm, and return the first arm's loss."""
        config = self.config
        with torch.no_grad():
            logits_by_target = self.target(input_ids=tokens, use_cache=False).logits.flatten(0, 1)
            taps = self.taps.joined().float()
        losses: list[float] = []
        seed = int(torch.randint(2**62, ()))
        for name, steered in self.arms.items():
            arm = ARMS[name]
            sources = None
            if arm.steered:
                generator = torch.Generator().manual_seed(seed)  # the same prompts and omissions for all arms
                sources = sources_of(
                    arm, tokens, max_age=config.max_age, unsteered=config.unsteered, generator=generator
                )
            hidden = steered.hidden(tokens, taps, sources)
            loss = share * forward_kl(
                hidden.flatten(0, 1),
                steered.drafter.lm_head.weight,
                logits_by_target,
                positions_per_chunk=config.positions_per_chunk,
            )
            loss.backward()
            losses.append(float(loss.detach()))
        return losses[0]

    def clip(self) -> None:
        for steered in self.arms.values():
            torch.nn.utils.clip_grad_norm_(steered.parameters(), self.config.clip)

    def measure(self) -> dict[str, Acceptance]:
        """Measure every arm on the same held-out text, without steering and with vectors of each age."""
        for steered in self.arms.values():
            steered.drafter.eval()
        measured: dict[str, dict[str, Acceptance]] = {}
        for text in self.texts.sampled_rows:
            for name, acceptance in self._measure_text(text).items():
                measured.setdefault(name, {})[text] = acceptance
        for by_text in measured.values():
            for kind in ("corpus", "self"):
                if of_kind := [a for text, a in by_text.items() if text.startswith(f"{kind}/")]:
                    by_text[f"{kind}/mean"] = mean_acceptance(of_kind)
        for steered in self.arms.values():
            steered.drafter.train()
        return {f"{name}/{text}": a for name, by_text in measured.items() for text, a in by_text.items()}

    def _measure_text(self, text: str) -> dict[str, Acceptance]:
        """Measure on one text, by `<arm>/<none or age>`; T = 0 acceptance on text written at T = 0."""
        students: dict[str, Student] = {}
        for name, steered in self.arms.items():
            for age in (0, *AGES) if ARMS[name].steered else (0,):
                students[f"{name}/{age or 'none'}"] = partial(self._logits, steered, age)

        def compare(rows: list[Row]) -> dict[str, Acceptance]:
            return compare_students(self.target, students, rows, seed=self.config.seed)

        sampled = compare(self.texts.sampled_rows[text])
        if (greedy_rows := self.texts.greedy_rows[text]) is self.texts.sampled_rows[text] or not greedy_rows:
            return sampled
        greedy = compare(greedy_rows)
        return {name: replace(sampled[name], greedy=greedy[name].greedy) for name in students}

    def _logits(self, steered: SteeredDrafter, age: int, tokens: torch.Tensor) -> torch.Tensor:
        sources = aged_sources(tokens, age) if age else None
        hidden = steered.hidden(tokens, self.taps.joined().float(), sources)
        logits: torch.Tensor = steered.drafter.lm_head(hidden)
        return logits

    def held_out_kl(self, acceptance: Mapping[str, Acceptance]) -> float:
        """Return the first arm's KL with fresh vectors."""
        first = self.config.arms[0]
        return mean_kl(acceptance, f"{first}/{AGES[0] if ARMS[first].steered else 'none'}/")

    def save_more(self, folder: Path) -> None:
        for name, steered in self.arms.items():
            if ARMS[name].steered:
                steered.projection.save(folder / name / PROJECTION_FILE)
                steered.steering.save(folder / name)

    def load_more(self, folder: Path) -> None:
        for name, steered in self.arms.items():
            if ARMS[name].steered:
                steered.projection.load_state_dict(Projection.load(folder / name / PROJECTION_FILE).state_dict())
                steered.steering.load(folder / name)

    def facts(self, name: str, acceptance: Mapping[str, Acceptance]) -> dict[str, Any]:
        """Return the arm's acceptance, and the gain in tokens a round of vectors of each age over none."""
        own = {key.removeprefix(f"{name}/"): a for key, a in acceptance.items() if key.startswith(f"{name}/")}
        facts: dict[str, Any] = {"arm": name, "held_out_acceptance": as_json(own)}
        text = "self/mean" if "none/self/mean" in own else "corpus/mean"
        if ARMS[name].steered:
            without = tokens_a_round(own[f"none/{text}"].sampled)
            facts["steering_gain"] = {
                str(age): round(tokens_a_round(own[f"{age}/{text}"].sampled) / without - 1, 4) for age in AGES
            }
        return facts


def tokens_a_round(acceptance: float, drafts: int = ROUND) -> float:
    """Return the committed tokens a target step, (1 - a^(k + 1)) / (1 - a) (Leviathan et al. 2023, equation 1)."""
    return (1 - acceptance ** (drafts + 1)) / (1 - acceptance) if acceptance < 1 else drafts + 1.0


def _make_arm(config: SteerTraining, target: PreTrainedModel, arm: Arm) -> SteeredDrafter:
    drafter = read_drafter(config.drafter, target, field="drafter")
    text = target.config.get_text_config()
    layers = config.layers or default_layers(text.num_hidden_layers)
    if max(layers) >= text.num_hidden_layers:
        raise InvalidArgument(f"the target has layers 0 to {text.num_hidden_layers - 1}", field="layers")
    drafter.to(torch.device(config.device))  # type: ignore[arg-type]
    drafter.requires_grad_(not arm.frozen)
    return SteeredDrafter(drafter, Projection(layers, text.hidden_size, config.rank, config.model), arm)


def _optimizers(config: SteerTraining, arm: Arm, steered: SteeredDrafter) -> list[torch.optim.Optimizer]:
    """Return Muon for matrices, and AdamW for the rest where the arm learns any of it."""
    optimizers: list[torch.optim.Optimizer] = []
    by_muon = []
    if not arm.frozen:
        matrices, others = matrices_and_others(steered.drafter)
        by_muon.append({"params": matrices, "lr": config.matrix_lr})
        optimizers.append(torch.optim.AdamW(others, lr=config.other_lr, betas=(0.9, 0.95), weight_decay=0.0))
    if arm.steered:
        learnt = [*steered.steering.parameters(), *steered.projection.parameters()]
        by_muon.append({"params": learnt, "lr": config.steering_lr})
    return [Muon(by_muon, lr=config.matrix_lr), *optimizers]
