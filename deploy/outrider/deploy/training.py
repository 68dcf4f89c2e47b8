"""`outrider train` and `outrider export`."""

from __future__ import annotations

import argparse
import os

from outrider.cloud.family_index import resolve_target
from outrider.cloud.training.settings import DrafterShape, DrafterTraining
from outrider.deploy.termination import StopAtStep
from outrider.proto.errors import ConfigError

HEAD_DIM = 32


def train(options: argparse.Namespace) -> int:
    """`outrider train drafter`."""
    from outrider.cloud.training.drafter import train_drafter

    if (options.minutes is None) == (options.steps is None):
        raise ConfigError("give either --minutes or --steps", field="minutes")
    training = DrafterTraining(
        target=resolve_target(options.target),
        corpus=tuple(options.corpus),
        output=options.output,
        shape=_shape(options),
        self_text_tokens=options.self_text,
        self_text_fraction=0.5 if options.self_text else 0.0,
        minutes=options.minutes,
        steps=options.steps,
        threads=options.threads or os.cpu_count() or 1,
        device=options.device,
        seed=options.seed,
        resume=options.resume,
    )
    stop = StopAtStep()
    with stop.listening():
        result = train_drafter(training, on_step=stop.stepped, stopping=stop.told)
    print(f"{result.parameters / 1e6:.2f} M parameters after {result.tokens_seen:,} tokens, in {result.folder}")
    print(f"next: outrider export {result.folder} PACKAGE --name NAME --target {options.target}")
    return 0


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
    )


def export(options: argparse.Namespace) -> int:
    """`outrider export`."""
    from outrider.cloud.export import export_drafter

    manifest = export_drafter(
        options.source,
        options.output,
        name=options.name,
        precision=options.precision,
        candidates=options.candidates,
        target_id=options.target,
    )
    print(f"{options.output}: {manifest['name']} {manifest['version']}, checked against torch: {manifest['check']}")
    return 0
