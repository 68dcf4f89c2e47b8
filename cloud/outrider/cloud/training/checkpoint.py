"""Checkpoints: whole folders, each readable as an ordinary model folder."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

STATE = "state.pt"


@dataclass
class Progress:
    """The state of a run.

    Attributes:
        taken, drawn: the block sampler's state.
        run: settings that must not change between resumes.
        elapsed_s: seconds spent training, over all resumes.
        losses: (step, mean KL in nats a token since the entry before).
        recent: losses of the steps since the last entry of `losses`.
        best_kl: least held-out KL that was measured, nats a token.
        stale: measurements since that one.
    """

    taken: list[int]
    run: dict[str, Any]
    drawn: int = 0
    step: int = 0
    elapsed_s: float = 0.0
    tokens_seen: int = 0
    losses: list[tuple[int, float]] = field(default_factory=list)
    recent: list[float] = field(default_factory=list)
    best_kl: float = math.inf
    stale: int = 0


def save_checkpoint(
    folder: Path,
    write_models: Callable[[Path], None],
    optimizers: Sequence[torch.optim.Optimizer],
    progress: Progress,
) -> Path:
    """Write `folder/step-<n>` with the files that `write_models` puts there, and remove older ones."""
    final = folder / f"step-{progress.step:08d}"
    unfinished = folder / "unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    write_models(unfinished)
    state = {
        "progress": vars(progress),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "torch_rng": torch.get_rng_state(),
    }
    torch.save(state, unfinished / STATE)
    older = checkpoints(folder)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(unfinished, final)
    for stale in older:
        if stale != final:
            shutil.rmtree(stale)
    return final


def checkpoints(folder: Path) -> list[Path]:
    """Return the whole checkpoints in `folder`, oldest first."""
    return sorted(path for path in folder.glob("step-*") if (path / STATE).exists())


def load_checkpoint(checkpoint: Path, optimizers: Sequence[torch.optim.Optimizer]) -> Progress:
    """Put optimizers and torch's random state back as they were; the models' weights are the caller's."""
    state = torch.load(checkpoint / STATE, weights_only=True)
    for optimizer, saved_state in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved_state)
    torch.set_rng_state(state["torch_rng"])
    return Progress(**state["progress"])
