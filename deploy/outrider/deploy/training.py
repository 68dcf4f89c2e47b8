"""`outrider train` and `outrider export`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from outrider.cloud.family_index import resolve_target
from outrider.cloud.training.settings import DrafterShape, DrafterTraining, SteerTraining
from outrider.deploy.termination import StopAtStep
from outrider.proto.errors import ConfigError

HEAD_DIM = 32


def train_drafter(options: argparse.Namespace) -> int:
    """`outrider train drafter`."""
    from outrider.cloud.training.drafter import train_drafter

    training = DrafterTraining(
        start=options.start,
        shape=_shape(options),
        matrix_lr=options.rate * DrafterTraining.matrix_lr,
        other_lr=options.rate * DrafterTraining.other_lr,
        **_common(options),
    )
    with _stopping() as stop:
        result = train_drafter(training, on_step=stop.stepped, stopping=stop.told)
    print(f"{result.parameters / 1e6:.2f} M parameters after {result.tokens_seen:,} tokens, in {result.folder}")
    print(f"next: outrider export {result.folder} PACKAGE --name NAME --target {options.target}")
    return 0


def train_steer(options: argparse.Namespace) -> int:
    """`outrider train steer`."""
    from outrider.cloud.training.steer import train_steering

    training = SteerTraining(
        drafter=options.drafter,
        model=options.target,
        arms=tuple(options.arms),
        rank=options.rank,
        layers=tuple(options.tap_layers),
        oldest=options.oldest,
        **_common(options),
    )
    with _stopping() as stop:
        result = train_steering(training, on_step=stop.stepped, stopping=stop.told)
    print(f"{', '.join(result.folders)} after {result.tokens_seen:,} tokens each, in {training.output}")
    for folder in result.folders.values():
        print(f"next: outrider export {folder} PACKAGE --name NAME --target {options.target}")
    return 0


@contextmanager
def _stopping() -> Iterator[StopAtStep]:
    stop = StopAtStep()
    with stop.listening():
        yield stop


def _common(options: argparse.Namespace) -> dict[str, Any]:
    if (options.minutes is None) == (options.steps is None):
        raise ConfigError("give either --minutes or --steps", field="minutes")
    return {
        "target": resolve_target(options.target),
        "corpus": tuple(options.corpus),
        "output": options.output,
        "self_text_tokens": options.self_text,
        "self_text_fraction": 0.5 if options.self_text else 0.0,
        "self_text_greedy": options.self_text_greedy,
        "minutes": options.minutes,
        "steps": options.steps,
        "patience": options.patience,
        "threads": options.threads or os.cpu_count() or 1,
        "device": options.device,
        "seed": options.seed,
        "resume": options.resume,
    }


def _shape(options: argparse.Namespace) -> DrafterShape:
    heads, rest = divmod(options.hidden, HEAD_DIM)
    if rest or not heads:
        raise ConfigError(f"{options.hidden} is not a multiple of {HEAD_DIM}, the width of a head", field="hidden")
    return DrafterShape(
        hidden=options.hidden,
        layers=options.layers,
        mlp=options.mlp,
        heads=heads,
        kv_heads=1 if heads % 2 else 2,
        head_dim=HEAD_DIM,
        window=options.window,
    )


def export(options: argparse.Namespace) -> int:
    """`outrider export`."""
    from outrider.cloud.export import export_drafter
    from outrider.cloud.steering import PROJECTION_FILE

    manifest = export_drafter(
        options.source,
        options.output,
        name=options.name,
        precision=options.precision,
        candidates=options.candidates,
        target_id=options.target,
    )
    print(f"{options.output}: {manifest['name']} {manifest['version']}, checked against torch: {manifest['check']}")
    if steering := manifest.get("steering"):
        print(
            f"it is steered by codes of {steering['rank']} numbers from projection {steering['projection']}; "
            f"a verifier makes them with --steering {options.source / PROJECTION_FILE}, "
            "and without it the drafter drafts unsteered"
        )
    return 0
