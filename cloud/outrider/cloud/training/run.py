"""A training run: steps until the budget is spent, with progress, checkpoints and measurements on the way.

The subclasses in `drafter` and `steer` define what is trained and how it is measured.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tokenizers
import torch
import transformers
from transformers import PreTrainedModel

from outrider.cloud.family_index import load_tokenizer
from outrider.cloud.training.acceptance import Acceptance
from outrider.cloud.training.blocks import BlockSampler
from outrider.cloud.training.checkpoint import STATE, Progress, checkpoints, load_checkpoint, save_checkpoint
from outrider.cloud.training.report import Reporter, acceptance_table, duration, reporter_for_stdout
from outrider.cloud.training.schedule import Budget
from outrider.cloud.training.settings import Training
from outrider.cloud.training.texts import Texts, gather_texts, load_target
from outrider.proto.errors import Cancelled, InvalidArgument

TRAINING_FILE = "training.json"
BEST = "best"
# Settings that may differ between a run and its resumption: they do not change its result.
FREE_ON_RESUME = ("output", "resume", "measure_every_minutes", "checkpoint_every_steps", "checkpoint_every_minutes")


class Run(ABC):
    """A training run: target, optimizers, text and progress."""

    def __init__(
        self,
        config: Training,
        target: PreTrainedModel,
        texts: Texts,
        reporter: Reporter,
        budget: Budget,
        optimizers: list[torch.optim.Optimizer],
    ) -> None:
        """Begin at step 0; the learning rates of `optimizers` are their peaks, which the budget scales."""
        self.config = config
        self.target = target
        self.texts = texts
        self.reporter = reporter
        self.budget = budget
        self.optimizers = optimizers
        self._peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
        self.sampler = BlockSampler(texts.sources, config.block, config.seed)
        self.progress = Progress(0, 0.0, 0, self.sampler.taken, 0, [], [], settings_of_run(config))

    # --- the subclasses' ---

    @property
    @abstractmethod
    def models(self) -> Mapping[str, PreTrainedModel]:
        """Trained drafters by the folder inside `output` that each is written to ("": itself)."""

    @abstractmethod
    def backward(self, tokens: torch.Tensor, *, share: float) -> float:
        """Add the gradient of `share` times the loss on `tokens` (int64 [rows, block]), and return that loss."""

    @abstractmethod
    def clip(self) -> None:
        """Bound the gradients."""

    @abstractmethod
    def measure(self) -> dict[str, Acceptance]:
        """Measure acceptance on held-out text, by name."""

    @abstractmethod
    def held_out_kl(self, acceptance: Mapping[str, Acceptance]) -> float:
        """Return the KL of a measurement by which a run ends early, nats a token."""

    def save_more(self, folder: Path) -> None:
        """Write further files of a checkpoint; by default there are none."""
        del folder

    def load_more(self, folder: Path) -> None:
        """Read the files of `save_more`."""
        del folder

    def facts(self, name: str, acceptance: Mapping[str, Acceptance]) -> dict[str, Any]:
        """Return further entries of the training.json of the drafter `name`."""
        del name
        return {"held_out_acceptance": as_json(acceptance)}

    # --- every run's ---

    def resume(self, checkpoint: Path) -> None:
        """Go on from a checkpoint; raise InvalidArgument where that is another run's."""
        progress = load_checkpoint(checkpoint, self.optimizers)
        for name, value in self.progress.run.items():
            if progress.run.get(name) != value:
                raise InvalidArgument(f"the run to resume had {progress.run.get(name)!r}, not {value!r}", field=name)
        state = torch.get_rng_state()
        self._read_models(checkpoint)
        torch.set_rng_state(state)  # reading the models has drawn from it
        self.progress = progress
        self.sampler.taken, self.sampler.drawn = list(progress.taken), progress.drawn
        self.reporter.say(f"resumed after step {progress.step}")

    def to_the_end(self, on_step: Callable[[int], None], stopping: Callable[[], bool]) -> dict[str, Acceptance]:
        """Train until the budget is spent, publish, and return the last measurement."""
        config, progress = self.config, self.progress
        self.reporter.stage("training")
        self.reporter.say(
            f"{'; '.join(self._describe(name) for name in self.models)}; "
            f"{', '.join(source.name for source in self.texts.sources)}"
        )
        saved = (progress.step, progress.elapsed_s)
        measured = progress.elapsed_s
        while self.budget.spent(progress.step, progress.elapsed_s) < 1:
            began = time.monotonic()
            progress.recent.append(self.step())
            progress.elapsed_s += time.monotonic() - began
            self._report()
            on_step(progress.step)
            if stopping():
                self._save()
                raise Cancelled(f"stopped after step {progress.step}; its checkpoint is kept, go on with --resume")
            if (
                progress.step - saved[0] >= config.checkpoint_every_steps
                or progress.elapsed_s - saved[1] >= 60 * config.checkpoint_every_minutes
            ):
                self._save()
                saved = (progress.step, progress.elapsed_s)
            if progress.elapsed_s - measured >= 60 * config.measure_every_minutes:
                acceptance = self.measure()
                self.reporter.say(f"step {progress.step}\n{acceptance_table(acceptance)}")
                measured = progress.elapsed_s
                if self._has_stopped_learning(acceptance):
                    self.reporter.say(f"no better for {config.patience} measurements: this is the end")
                    break
        return self._finish()

    def _has_stopped_learning(self, acceptance: Mapping[str, Acceptance]) -> bool:
        """Count measurements without a better one, and keep the weights of the best."""
        progress = self.progress
        if not self.config.patience:
            return False
        kl = self.held_out_kl(acceptance)
        progress.stale += 1
        if kl < progress.best_kl:
            progress.best_kl, progress.stale = kl, 0
            best = self.config.output / BEST
            shutil.rmtree(best, ignore_errors=True)
            self._write_models(best)
        return progress.stale >= self.config.patience

    def _finish(self) -> dict[str, Acceptance]:
        """Publish the last weights, or the best where those are kept and better."""
        newest, acceptance = self._save(), self.measure()
        if self.config.patience and self.held_out_kl(acceptance) > self.progress.best_kl:
            newest = self.config.output / BEST
            self._read_models(newest)
            acceptance = self.measure()
        self.reporter.say(f"finished after {self.progress.step} steps\n{acceptance_table(acceptance)}")
        for name in self.models:
            self._publish(newest / name, name, acceptance)
        return acceptance

    def step(self) -> float:
        """Make an optimizer step, and return its loss, nats a token."""
        config, progress = self.config, self.progress
        rate = self.budget.rate(progress.step, progress.elapsed_s)
        for optimizer, peaks in zip(self.optimizers, self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * rate
        blocks = torch.from_numpy(self.sampler.draw(config.blocks_per_step)).to(config.device)
        passes = blocks.split(config.blocks_per_pass)
        loss = 0.0
        for tokens in passes:
            loss += self.backward(tokens, share=1 / len(passes))
        self.clip()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        progress.tokens_seen += blocks.numel()
        return loss

    def parameters(self, name: str) -> int:
        """Return the number of parameters of the drafter `name`, tied ones counted once."""
        return sum(parameter.numel() for parameter in self.models[name].parameters())

    def _describe(self, name: str) -> str:
        return f"{name or 'drafter'} of {self.parameters(name):,} parameters"

    def _report(self) -> None:
        progress = self.progress
        share = self.budget.spent(progress.step, progress.elapsed_s)
        rate = progress.tokens_seen / max(progress.elapsed_s, 1e-9)
        left = progress.elapsed_s / max(share, 1e-9) * (1 - share)
        loss = float(np.mean(progress.recent[-20:]))
        self.reporter.advance(share, f"step {progress.step} loss {loss:.3f} {rate:,.0f} tokens/s {duration(left)} left")
        if len(progress.recent) >= 20:
            progress.losses.append((progress.step, float(np.mean(progress.recent))))
            progress.recent.clear()

    def _save(self) -> Path:
        progress = self.progress
        progress.taken, progress.drawn = self.sampler.taken, self.sampler.drawn
        return save_checkpoint(self.config.output / "checkpoints", self._write_models, self.optimizers, progress)

    def _write_models(self, folder: Path) -> None:
        tokenizer = load_tokenizer(self.config.target)
        for name, model in self.models.items():
            model.save_pretrained(folder / name)
            tokenizer.save_pretrained(folder / name)
        self.save_more(folder)

    def _read_models(self, folder: Path) -> None:
        for name, model in self.models.items():
            saved = type(model).from_pretrained(folder / name, dtype=torch.float32, use_safetensors=True)
            model.load_state_dict(saved.state_dict())
        self.load_more(folder)

    def _publish(self, written: Path, name: str, acceptance: Mapping[str, Acceptance]) -> None:
        """Copy a drafter's files from the folder `written` to the output folder, `training.json` last."""
        progress = self.progress
        record = {
            "config": settings_of_run(self.config),
            "parameters": self.parameters(name),
            "steps": progress.step,
            "tokens_seen": progress.tokens_seen,
            "elapsed_s": round(progress.elapsed_s, 1),
            "loss": "KL(target || drafter), nats a token",
            "losses": [[step, round(loss, 4)] for step, loss in progress.losses],
            **self.facts(name, acceptance),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "tokenizers": tokenizers.__version__,
            },
        }
        output = self.config.output / name
        output.mkdir(parents=True, exist_ok=True)
        (written / TRAINING_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        names = [path.name for path in written.iterdir() if path.is_file() and path.name != STATE]
        for file in sorted(names, key=lambda file: file == TRAINING_FILE):
            shutil.copyfile(written / file, output / f"{file}.unfinished")
            os.replace(output / f"{file}.unfinished", output / file)


SomeRun = TypeVar("SomeRun", bound=Run)


def carry_out(
    config: Training,
    begin: Callable[[PreTrainedModel, Texts, Reporter], SomeRun],
    *,
    on_step: Callable[[int], None] | None,
    stopping: Callable[[], bool] | None,
    reporter: Reporter | None,
) -> tuple[SomeRun, dict[str, Acceptance]]:
    """Take the run that `begin` makes to its end, and return it with its last measurement.

    Args:
        config: settings of the run.
        begin: makes the run, at its first step.
        on_step: called with the number of steps done after each; an exception from it ends the run as a crash
            would, to be resumed from the newest checkpoint.
        stopping: asked after each step; true ends the run there, with a checkpoint of it.
        reporter: where progress goes; the terminal by default.

    Raises:
        InvalidArgument: the settings, target or corpus do not serve, or another run's checkpoints are in the way.
        Cancelled: `stopping` returned true.
    """
    folder = config.output / "checkpoints"
    if checkpoints(folder) and not config.resume:
        raise InvalidArgument(
            f"{config.output} holds checkpoints; resume that run or choose another folder", field="output"
        )
    transformers.utils.logging.disable_progress_bar()  # one bar is enough
    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    torch.manual_seed(config.seed)
    with reporter or reporter_for_stdout() as reporter:
        target = load_target(config)
        run = begin(target, gather_texts(config, target, reporter), reporter)
        if newest := checkpoints(folder)[-1:]:
            run.resume(newest[0])
        return run, run.to_the_end(on_step or (lambda _: None), stopping or (lambda: False))


def as_json(acceptance: Mapping[str, Acceptance]) -> dict[str, dict[str, float]]:
    """Return acceptance in the form of training.json."""
    return {
        name: {key: round(value, 4) for key, value in asdict(measured).items()} for name, measured in acceptance.items()
    }


def settings_of_run(config: Training) -> dict[str, Any]:
    """Return the settings that decide a run's result, as plain JSON values."""
    settings = asdict(config)
    for name in FREE_ON_RESUME:
        del settings[name]
    for field in fields(config):
        value = settings.get(field.name)
        if isinstance(value, Path):
            settings[field.name] = value.name
        elif isinstance(value, tuple):
            settings[field.name] = [part.name if isinstance(part, Path) else part for part in value]
    settings["target"] = Path(config.target).name if Path(config.target).is_dir() else config.target
    settings["domain_weights"] = dict(config.domain_weights)
    return settings


def mean_acceptance(measured: list[Acceptance]) -> Acceptance:
    """Return the mean over several texts, each with the same weight."""

    def mean(name: str) -> float:
        return float(np.mean([getattr(each, name) for each in measured]))

    return Acceptance(
        greedy=mean("greedy"),
        sampled=mean("sampled"),
        overlap=mean("overlap"),
        kl=mean("kl"),
        positions=sum(each.positions for each in measured),
    )


def mean_kl(acceptance: Mapping[str, Acceptance], prefix: str) -> float:
    """Return the KL on the target's text, else on the corpus; its keys begin with `prefix`."""
    kind = "self" if f"{prefix}self/mean" in acceptance else "corpus"
    return acceptance[f"{prefix}{kind}/mean"].kl
