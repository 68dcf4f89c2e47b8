"""A training run: steps until the budget is spent, with progress, checkpoints and measurements on the way.

The subclasses in `drafter_training` and `steer` define what is trained.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from transformers import PreTrainedModel

from outrider.cloud.models.family_index import load_causal_lm, load_tokenizer
from outrider.cloud.models.heads import head_terms, tokens_of
from outrider.cloud.training.measured_acceptance import HeldOutText, MeanAcceptance, Student, compare_students
from outrider.cloud.training.optimizers import Budget
from outrider.cloud.training.teacher import CachedTeacher, TeacherFolder
from outrider.cloud.training.training_report import Reporter, acceptance_table, duration
from outrider.cloud.training.training_settings import Training
from outrider.cloud.training.training_texts import BlockSampler, Texts, gather_texts, load_target, save_tokenizer
from outrider.proto.errors import Cancelled, InvalidArgument
from outrider.proto.plumbing.cores import available_cores

TRAINING_FILE = "training.json"
STATE = "state.pt"  # of a checkpoint, beside the drafter
MAX_GRADIENT_NORM = 1.0
MEASURE_EVERY_S = 600.0
SAVE_EVERY_S = 300.0
STEPS_PER_LOSS = 20  # whose mean is one entry of the record
MODELS = {"target", "start", "source", "parent"}  # settings that are a model's name or its folder
FREE_ON_RESUME = ("output", "resume")  # settings that may differ between a run and its resumption


@dataclass(frozen=True)
class TrainingResult:
    """The results of a finished run.

    Attributes:
        folder: an ordinary transformers folder of the drafter, with `training.json`.
        parameters: number in the drafter, tied ones counted once.
        tokens_seen: tokens trained on.
        losses: (step, mean KL in nats a token since the entry before).
        acceptance: results on held-out text, by student.
        elapsed_s: seconds of training, over all resumes.
    """

    folder: Path
    parameters: int
    steps: int
    tokens_seen: int
    losses: Sequence[tuple[int, float]]
    acceptance: Mapping[str, MeanAcceptance]
    elapsed_s: float


@dataclass
class Progress:
    """The state of a run.

    Attributes:
        run: settings that must not change between resumes.
        drawn: blocks that were read.
        elapsed_s: seconds spent training, over all resumes.
        losses: as in `TrainingResult`.
        recent: losses of the steps since the last entry of `losses`.
    """

    run: dict[str, Any]
    drawn: int = 0
    step: int = 0
    elapsed_s: float = 0.0
    tokens_seen: int = 0
    losses: list[tuple[int, float]] = field(default_factory=list)
    recent: list[float] = field(default_factory=list)


class TrainingRun(ABC):
    """A training run: target, drafter, optimizers, text and progress.

    Args:
        config: settings of the run.
        target: model to learn from.
        texts: text to train and to measure on.
        drafter: model to train.
        students: what is measured, by name.
        optimizers: those of all that is trained, whose learning rates are their peaks.
        fall: course of the learning rates, see `Budget`.
    """

    def __init__(
        self,
        config: Training,
        target: PreTrainedModel,
        texts: Texts,
        *,
        drafter: PreTrainedModel,
        students: Mapping[str, Student],
        optimizers: Sequence[torch.optim.Optimizer],
        fall: Callable[[float], float],
    ) -> None:
        self.config = config
        self.target = target
        self.texts = texts
        self.reporter = Reporter()
        self.drafter: Any = drafter
        self.students = students
        self.optimizers = optimizers
        self.budget = Budget(config.steps, config.minutes, config.warm_up_steps, fall)
        self._peaks = [group["lr"] for group in self._groups]
        self.sampler = BlockSampler(texts.places, config.block, config.seed)
        self.teacher = CachedTeacher(
            texts.rows,
            TeacherFolder(config.teacher).best(),
            vocab=target.config.get_text_config().vocab_size,
            known=tokens_of(drafter),
            device=target.device,
        )
        self.progress = Progress(settings_of_run(config))

    # --- the subclasses' ---

    @abstractmethod
    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the drafter's states after the last norm, [rows, block, hidden] of tokens [rows, block]."""

    def write_models(self, folder: Path) -> None:
        """Write the drafter of a checkpoint."""
        self.drafter.save_pretrained(folder)
        load_tokenizer(self.config.target).save_pretrained(folder)
        save_tokenizer(self.config.target, folder)

    def read_models(self, folder: Path) -> None:
        """Read the files of `write_models`."""
        saved = load_causal_lm(folder, "the checkpoint holds no drafter", field="output")
        self.drafter.load_state_dict(saved.state_dict())

    def facts(self, acceptance: Mapping[str, MeanAcceptance]) -> dict[str, Any]:  # noqa: ARG002 - a subclass uses it
        """Return further entries of the drafter's training.json."""
        return {}

    # --- every run's ---

    @property
    def parameters(self) -> int:
        """Number of the drafter's parameters, tied ones counted once."""
        return sum(parameter.numel() for parameter in self.drafter.parameters())

    @property
    def _groups(self) -> list[dict[str, Any]]:
        """Groups of parameters that are trained, those of one optimizer after another's."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def resume(self, checkpoint: Path) -> None:
        """Go on from a checkpoint; raise InvalidArgument where that is another run's."""
        state = torch.load(checkpoint / STATE, weights_only=True)
        progress = Progress(**{each.name: state["progress"][each.name] for each in fields(Progress)})
        for name, value in self.progress.run.items():
            if progress.run.get(name) != value:
                raise InvalidArgument(f"the run to resume had {progress.run.get(name)!r}, not {value!r}", field=name)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.read_models(checkpoint)
        torch.set_rng_state(state["torch_rng"])  # last, since reading the models draws from it
        self.progress, self.sampler.drawn = progress, progress.drawn
        self.reporter.say(f"resumed after step {progress.step}")

    def to_the_end(self, on_step: Callable[[int], None], stopping: Callable[[], bool]) -> TrainingResult:
        """Train until the budget is spent, measure, and publish."""
        progress = self.progress
        self.reporter.stage("training")
        self.reporter.say(f"drafter of {self.parameters:,} parameters; {len(self.texts.places):,} tokens to learn from")
        saved_s = measured_s = progress.elapsed_s
        while self.budget.spent(progress.step, progress.elapsed_s) < 1:
            began = time.monotonic()
            progress.recent.append(self.step())
            progress.elapsed_s += time.monotonic() - began
            self._report()
            on_step(progress.step)
            if stopping():
                self._save()
                raise Cancelled(f"stopped after step {progress.step}; its checkpoint is kept, go on with --resume")
            if progress.elapsed_s - saved_s >= SAVE_EVERY_S:
                self._save()
                saved_s = progress.elapsed_s
            if progress.elapsed_s - measured_s >= MEASURE_EVERY_S:
                self.reporter.say(f"step {progress.step}\n{acceptance_table(self.measure())}")
                measured_s = progress.elapsed_s
        written, acceptance = self._save(), self.measure()
        self.reporter.say(f"finished after {progress.step} steps\n{acceptance_table(acceptance)}")
        self._publish(written, acceptance)
        return TrainingResult(
            folder=self.config.output,
            parameters=self.parameters,
            steps=progress.step,
            tokens_seen=progress.tokens_seen,
            losses=progress.losses,
            acceptance=acceptance,
            elapsed_s=progress.elapsed_s,
        )

    def step(self) -> float:
        """Make an optimizer step, and return its loss, nats a token."""
        config, progress = self.config, self.progress
        rate = self.budget.rate(progress.step, progress.elapsed_s)
        for group, peak in zip(self._groups, self._peaks, strict=True):
            group["lr"] = peak * rate
        places = torch.from_numpy(self.sampler.draw(config.blocks_per_step)).to(config.device)
        passes = places.split(config.blocks_per_pass)
        total = 0.0
        for part in passes:
            loss = self._loss(part) / len(passes)
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_([each for group in self._groups for each in group["params"]], MAX_GRADIENT_NORM)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        progress.tokens_seen += places.numel()
        return total

    def _loss(self, places: torch.Tensor) -> torch.Tensor:
        device, chunk = places.device.type, self.config.positions_per_chunk
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            hidden = self.hidden(self.texts.tokens_of(places))
            return self.teacher.loss(places, *head_terms(self.drafter.lm_head, hidden), positions_per_chunk=chunk)

    def measure(self) -> dict[str, MeanAcceptance]:
        """Measure all students on the same held-out text, at T = 0 on what the target wrote at T = 0, if any."""

        def compared(rows: list[HeldOutText]) -> dict[str, MeanAcceptance]:
            return compare_students(self.target, self.students, rows, seed=self.config.seed)

        self.drafter.eval()
        rows, greedy_rows = self.texts.held_out
        measured = compared(rows or greedy_rows)
        if rows and greedy_rows:
            greedy = compared(greedy_rows)
            measured = {name: replace(each, greedy=greedy[name].greedy) for name, each in measured.items()}
        self.drafter.train()
        return measured

    def _report(self) -> None:
        progress = self.progress
        share = self.budget.spent(progress.step, progress.elapsed_s)
        rate = progress.tokens_seen / max(progress.elapsed_s, 1e-9)
        left = progress.elapsed_s / max(share, 1e-9) * (1 - share)
        loss = float(np.mean(progress.recent))
        self.reporter.advance(share, f"step {progress.step} loss {loss:.3f} {rate:,.0f} tokens/s {duration(left)} left")
        if len(progress.recent) >= STEPS_PER_LOSS:
            progress.losses.append((progress.step, loss))
            progress.recent.clear()

    def _save(self) -> Path:
        """Write a checkpoint, an ordinary model folder with `STATE`, whole or not at all, and remove older ones."""
        progress, older = self.progress, checkpoints(self.config.output)
        progress.drawn = self.sampler.drawn
        final = self.config.output / "checkpoints" / f"step-{progress.step:08d}"
        unfinished = final.with_name("unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        self.write_models(unfinished)
        state = {
            "progress": vars(progress),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "torch_rng": torch.get_rng_state(),
        }
        torch.save(state, unfinished / STATE)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(unfinished, final)
        for stale in older:
            if stale != final:
                shutil.rmtree(stale)
        return final

    def _publish(self, written: Path, acceptance: Mapping[str, MeanAcceptance]) -> None:
        """Copy the drafter's files from the folder `written` to the output folder, `training.json` last."""
        progress = self.progress
        record = {
            "config": settings_of_run(self.config),
            "parameters": self.parameters,
            "steps": progress.step,
            "tokens_seen": progress.tokens_seen,
            "elapsed_s": round(progress.elapsed_s, 1),
            "loss": "KL(target || drafter), nats a token",
            "losses": [[step, round(loss, 4)] for step, loss in progress.losses],
            "held_out_acceptance": {
                name: {key: round(value, 4) for key, value in asdict(measured).items()}
                for name, measured in acceptance.items()
            },
            **self.facts(acceptance),
            "versions": {
                "python": platform.python_version(),
                **{module.__name__: module.__version__ for module in (torch, transformers, tokenizers)},
            },
        }
        output = self.config.output
        (written / TRAINING_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        names = [path.name for path in written.iterdir() if path.is_file() and path.name != STATE]
        for file in sorted(names, key=lambda file: file == TRAINING_FILE):
            shutil.copyfile(written / file, output / f"{file}.unfinished")
            os.replace(output / f"{file}.unfinished", output / file)


def checkpoints(output: Path) -> list[Path]:
    """Return the whole checkpoints of a run's output folder, oldest first."""
    return sorted(path for path in output.glob("checkpoints/step-*") if (path / STATE).exists())


def carry_out(
    begin: Callable[[PreTrainedModel, Texts], TrainingRun],
    config: Training,
    on_step: Callable[[int], None] = lambda _: None,
    stopping: Callable[[], bool] = lambda: False,
) -> TrainingResult:
    """Take the run that `begin` makes at its first step to its end.

    Args:
        begin: makes the run.
        config: settings of the run.
        on_step: called with the number of steps done after each; an exception from it ends the run as a crash
            would, to be resumed from the newest checkpoint.
        stopping: asked after each step; true ends the run there, with a checkpoint of it.

    Raises:
        InvalidArgument: the settings, target or teacher do not serve, or another run's checkpoints are in the way.
        Cancelled: `stopping` returned true.
    """
    found = checkpoints(config.output)
    if found and not config.resume:
        raise InvalidArgument(
            f"{config.output} holds checkpoints; resume that run or choose another folder", field="output"
        )
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(config.threads or available_cores())
    torch.manual_seed(config.seed)
    torch.set_float32_matmul_precision("high")  # on a GPU its tensor cores; nothing changes on a CPU
    target = load_target(config)
    run = begin(target, gather_texts(config, target))
    if found:
        run.resume(found[-1])
    return run.to_the_end(on_step, stopping)


def settings_of_run(config: Training) -> dict[str, Any]:
    """Return the settings that decide a run's result, as plain JSON values."""
    settings = asdict(config)
    for name in FREE_ON_RESUME:
        del settings[name]
    for each in fields(config):
        value = settings.get(each.name)
        if isinstance(value, Path):
            settings[each.name] = value.name
        elif isinstance(value, tuple):
            settings[each.name] = list(value)
    for name in MODELS & settings.keys():
        if settings[name] is not None and Path(settings[name]).is_dir():
            settings[name] = Path(settings[name]).name
    return settings
