"""Commands that make models: train, export."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.cloud.training.training_settings import (
    DrafterShape,
    DrafterTraining,
    SteerTraining,
    TeacherWriting,
)
from outrider.deploy.arguments import Command, part
from outrider.proto.settings import REQUIRED, Settings, above, at_least, option

TRAINING = (
    "target",
    "teacher",
    "output",
    "minutes",
    "steps",
    "resume",
    "threads",
    "device",
    "seed",
)
BEGINNING = ("start", "source", "keep_layers", "vocabulary")
PACE = ("block", "blocks_per_step", "blocks_per_pass", "positions_per_chunk")
DEFAULTS = {"target": "reference", "threads": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class RateSettings(Settings):
    """Learning rates of a drafter."""

    rate: float = option(1.0, "factor of all learning rates", check=above(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSettings(Settings):
    """A model to export, and its package."""

    source: Path = option(
        REQUIRED,
        "folder of a transformers model, such as `outrider train` writes; a folder of `outrider train steer` makes a "
        "steered drafter",
        metavar="FOLDER",
        positional=True,
    )
    output: Path = option(REQUIRED, "folder of the new package", metavar="PACKAGE", positional=True)
    name: str = option(REQUIRED, "name of the drafter, by which edges ask for it", metavar="NAME")
    target: str = option("reference", "target that it drafts for", metavar="NAME")
    precision: str = option("float32", "precision of the weights", choices=("float32", "int8"))
    kv: str = option("float32", "precision of the KV cache, int8 for long texts", choices=("float32", "int8"))
    candidates: int = option(64, "number of most likely tokens that it returns", metavar="K", check=at_least(1))


TRAIN_DRAFTER = Command(
    "outrider.deploy.training:train_drafter",
    (
        part(DrafterTraining, *TRAINING, *BEGINNING, *PACE, defaults=DEFAULTS),
        part(RateSettings),
        part(DrafterShape, "hidden", "layers", "mlp", "window"),
    ),
)
TRAIN_TEACHER = Command(
    "outrider.deploy.training:train_teacher", (part(TeacherWriting, defaults={"target": "reference"}),)
)
TRAIN_STEER = Command(
    "outrider.deploy.training:train_steer",
    (part(SteerTraining, *TRAINING, *PACE, "drafter", "rank", "layers", defaults=DEFAULTS),),
)
EXPORT = Command("outrider.deploy.training:export", (part(ExportSettings),))
