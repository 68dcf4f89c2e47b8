"""`outrider up`, `outrider coordinator`, `outrider verifier`: processes that stay until they are told to go."""

from __future__ import annotations

import argparse
import asyncio
import signal
from dataclasses import replace
from pathlib import Path

from outrider.cloud.config import VerifierConfig
from outrider.deploy.cluster import embedded_drafters, local_cluster
from outrider.deploy.options import lease_secret
from outrider.proto.errors import ConfigError
from outrider.proto.types import Goal


def up(options: argparse.Namespace) -> int:
    """`outrider up`."""
    return asyncio.run(_up(options))


async def _up(options: argparse.Namespace) -> int:
    cluster = local_cluster(
        verifier_config(options),
        verifiers=options.verifiers,
        listen=options.listen,
        insecure_listen=options.insecure_listen,
        lease_seconds=options.lease_seconds,
        drafters=tuple(options.drafters),
    )
    async with cluster as running:
        print(f"coordinator on {running.coordinator}, {options.verifiers} verifier(s) of {options.target}")
        print(f"try: outrider generate --coordinator {running.coordinator} 'Once upon a time'", flush=True)
        await until_told_to_go()
    return 0


def coordinator(options: argparse.Namespace) -> int:
    """`outrider coordinator`."""
    return asyncio.run(_coordinator(options))


async def _coordinator(options: argparse.Namespace) -> int:
    from outrider.coordinator.config import CoordinatorConfig, StaticVerifier
    from outrider.coordinator.server import CoordinatorServer

    config = CoordinatorConfig(
        lease_secret=_required_secret(options.lease_secret_file),
        listen=options.listen,
        insecure_listen=options.insecure_listen,
        lease_seconds=options.lease_seconds,
        drafters=(embedded_drafters(), *options.drafters),
        ray_address="" if options.verifier else options.ray_address,
        verifiers=tuple(
            StaticVerifier(name, address, options.model, _read(options.tokenizer))
            for name, address in map(_named_address, options.verifier)
        ),
        state=options.state,
    )
    server = CoordinatorServer(config)
    print(f"coordinator on {await server.start()}", flush=True)
    await until_told_to_go()
    await server.stop()
    return 0


def verifier(options: argparse.Namespace) -> int:
    """`outrider verifier`."""
    config = replace(
        verifier_config(options),
        name=options.name,
        listen=options.listen,
        advertise=options.advertise,
        insecure_listen=options.insecure_listen,
    )
    secret = lease_secret(options.lease_secret_file)
    if options.ray_address:
        return _verifier_actor(options, config, secret)
    return asyncio.run(_verifier(config, secret, options.drain_grace))


async def _verifier(config: VerifierConfig, secret: bytes, drain_grace_s: float) -> int:
    from outrider.cloud.server import VerifierServer

    server = VerifierServer(config, secret)
    print(f"verifier {config.name} of {config.model_id} on {await server.start()}", flush=True)
    await until_told_to_go()
    await server.drain(drain_grace_s)
    await server.stop()
    return 0


def _verifier_actor(options: argparse.Namespace, config: VerifierConfig, secret: bytes) -> int:
    """Start a detached actor in a running Ray cluster, and leave it there."""
    import ray

    from outrider.cloud.actor import start_verifier_actor
    from outrider.coordinator.ray_cluster import connect_ray
    from outrider.deploy.cluster import wait_until_loaded

    connect_ray(options.ray_address)
    ray_options = {"lifetime": "detached", "num_cpus": options.num_cpus, "num_gpus": options.num_gpus}
    actor = start_verifier_actor(config.name, config, lease_secret=secret, ray_options=ray_options)
    wait_until_loaded(config.name, actor)
    print(f"verifier {config.name} of {config.model_id} on {ray.get(actor.info.remote())['address']}", flush=True)
    return 0


def verifier_config(options: argparse.Namespace) -> VerifierConfig:
    """What the options of `add_target` say of a verifier."""
    return VerifierConfig(
        target=options.target,
        dtype=options.dtype,
        device=options.device,
        threads=options.target_threads,
        kv_tokens=options.kv_tokens,
        context_length=options.context_length,
        patience=options.patience,
        batch_invariant=options.batch_invariant,
        max_sessions=options.max_sessions,
        goal=Goal[options.goal.upper()],
    )


def _named_address(text: str) -> tuple[str, str]:
    name, equals, address = text.partition("=")
    if not (name and equals and address):
        raise ConfigError(f"{text!r} is not NAME=HOST:PORT; leases are bound to the name", field="verifier")
    return name, address


def _required_secret(path: Path | None) -> bytes:
    if path is None:
        raise ConfigError(
            "is missing; make one with `openssl rand -hex 32 > FILE` and give it to the verifiers too",
            field="lease-secret-file",
        )
    return lease_secret(path)


def _read(path: Path | None) -> str:
    if path is None:
        raise ConfigError("is missing; fixed verifiers need the target's tokenizer.json", field="tokenizer")
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", field="tokenizer") from error


async def until_told_to_go() -> None:
    """Until SIGINT or SIGTERM."""
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told.set)
    await told.wait()
