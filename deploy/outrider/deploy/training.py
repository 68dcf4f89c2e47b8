"""`outrider train` and `outrider export`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from outrider.cloud.models.family_index import find_target
from outrider.cloud.training.training_settings import (
    DrafterShape,
    DrafterTraining,
    SteerTraining,
    TeacherWriting,
    Training,
)
from outrider.deploy.arguments import Given
from outrider.deploy.commands.training_options import ExportSettings, RateSettings
from outrider.deploy.process.progress import waiting
from outrider.deploy.process.termination import StopAtStep
from outrider.proto.errors import ConfigError

HEAD_DIM = 32


def train_drafter(given: Given) -> int:
    """Run `outrider train drafter`."""
    with waiting("starting"):
        from outrider.cloud.training.drafter_training import train_drafter

    rate = given(RateSettings).rate
    common = _common(given, DrafterTraining)
    if (source := given.fields(DrafterTraining)["source"]) is not None:
        common["source"] = find_target(source)
    training = given(
        DrafterTraining,
        shape=_shape(given),
        matrix_lr=rate * DrafterTraining.matrix_lr,
        other_lr=rate * DrafterTraining.other_lr,
        **common,
    )
    with StopAtStep().listening() as stop:
        result = train_drafter(training, on_step=stop.stepped, stopping=stop.stopping)
    print(f"{result.parameters / 1e6:.2f} M parameters after {result.tokens_seen:,} tokens, in {result.folder}")
    _say_next(result.folder, given.values["target"])
    return 0


def train_teacher(given: Given) -> int:
    """Run `outrider train teacher`."""
    with waiting("starting"):
        from outrider.cloud.training.teacher_writing import write_teacher

    writing = given(TeacherWriting, target=find_target(given.values["target"]))
    with StopAtStep().listening() as stop:
        tokens = write_teacher(writing, on_step=stop.stepped, stopping=stop.stopping)
    print(f"{tokens:,} tokens of the target in {writing.output}")
    words = ["outrider", "train", "drafter", "--target", given.values["target"], "--teacher", str(writing.output)]
    print("next:", shlex.join([*words, "--output", "DRAFTER", "--steps", "N"]))
    return 0


def train_steer(given: Given) -> int:
    """Run `outrider train steer`."""
    with waiting("starting"):
        from outrider.cloud.training.steer import train_steering

    target = given.values["target"]
    training = given(SteerTraining, model=target, **_common(given, SteerTraining))
    with StopAtStep().listening() as stop:
        result = train_steering(training, on_step=stop.stepped, stopping=stop.stopping)
    print(f"a steered drafter after {result.tokens_seen:,} tokens, in {result.folder}")
    _say_next(result.folder, target)
    return 0


def _say_next(folder: Path | str, target: str) -> None:
    print("next:", shlex.join(["outrider", "export", str(folder), "PACKAGE", "--name", "NAME", "--target", target]))


def _common(given: Given, kind: type[Training]) -> dict[str, Any]:
    fields = given.fields(kind)
    if (fields["minutes"] is None) == (fields["steps"] is None):
        raise ConfigError("give either --minutes or --steps", field="minutes")
    return {"target": find_target(fields["target"])}


def _shape(given: Given) -> DrafterShape:
    hidden = given.values["hidden"]
    heads, rest = divmod(hidden, HEAD_DIM)
    if rest or not heads:
        raise ConfigError(f"{hidden} is not a multiple of {HEAD_DIM}, the width of a head", field="hidden")
    return given(DrafterShape, heads=heads, kv_heads=1 if heads % 2 else 2, head_dim=HEAD_DIM)


def export(given: Given) -> int:
    """Run `outrider export`."""
    options = given(ExportSettings)
    with waiting("starting"):
        from outrider.cloud.export import export_drafter
    from outrider.cloud.target.projection import PROJECTION_FILE

    manifest = export_drafter(
        options.source,
        options.output,
        name=options.name,
        precision=options.precision,
        kv=options.kv,
        candidates=options.candidates,
        target_id=options.target,
    )
    print(f"{options.output}: {manifest['name']} {manifest['version']}, checked against torch: {manifest['check']}")
    if steering := manifest.get("steering"):
        print(
            f"it is steered by vectors of {steering['rank']} numbers from projection {steering['projection']}: "
            f"a verifier makes them with --steering {options.source / PROJECTION_FILE}; without, it drafts unsteered"
        )
    return 0
