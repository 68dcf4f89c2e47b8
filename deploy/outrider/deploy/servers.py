"""`outrider up`, `outrider coordinator`, `outrider verifier`: processes that stay until they are told to go."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.cloud.config import VerifierConfig
from outrider.deploy.cluster import embedded_drafters, local_cluster
from outrider.deploy.options import lease_secret, metrics, serving_tls
from outrider.proto.address import is_local_address
from outrider.proto.errors import ConfigError
from outrider.proto.plumbing.tls import ClientTls
from outrider.proto.types import Goal

logger = logging.getLogger(__name__)


def up(options: argparse.Namespace) -> int:
    """`outrider up`."""
    return asyncio.run(_up(options))


async def _up(options: argparse.Namespace) -> int:
    verifier_metrics = "127.0.0.1:0" if options.metrics_listen else ""
    logs = {"log_level": options.log_level, "log_format": options.log_format}
    cluster = local_cluster(
        replace(verifier_config(options), metrics_listen=verifier_metrics, **logs),
        verifiers=options.verifiers,
        listen=options.listen,
        insecure_listen=options.insecure_listen,
        lease_seconds=options.lease_seconds,
        access=_access(options) | metrics(options),
        drafters=tuple(options.drafters),
    )
    if not (options.relay or is_local_address(options.listen, "listen")):
        logger.warning("the verifiers listen on 127.0.0.1: edges on other machines need --relay")
    async with cluster as running:
        print(f"coordinator on {running.coordinator}, {options.verifiers} verifier(s) of {options.target}")
        needs = (" --tls-ca FILE" if options.tls_cert else "") + (" --api-key-file FILE" if options.api_keys else "")
        print(f"try: outrider generate --coordinator {running.coordinator}{needs} 'Once upon a time'", flush=True)
        _tell_metrics("the coordinator", options.metrics_listen)
        for name, address in (await asyncio.to_thread(_metrics_addresses, running.actors)).items():
            _tell_metrics(name, address)
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
            StaticVerifier(
                name,
                address,
                options.model,
                _read(options.tokenizer),
                tls=options.verifier_tls_ca is not None,
                tls_name=options.verifier_tls_name,
                chat_template_json=_read_chat_template(options.chat_template),
            )
            for name, address in map(_named_address, options.verifier)
        ),
        state=options.state,
        verifier_tls=ClientTls.from_options(options.verifier_tls_ca, options.tls_cert, options.tls_key)
        if options.verifier_tls_ca is not None
        else None,
        **_access(options),
        **metrics(options),
    )
    server = CoordinatorServer(config)
    print(f"coordinator on {await server.start()}", flush=True)
    _tell_metrics("coordinator", server.metrics_address)
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
        tls=serving_tls(options),
        drain_grace_s=options.drain_grace,
        trace_endpoint=options.trace_endpoint,
        **metrics(options),
    )
    secret = lease_secret(options.lease_secret_file)
    if options.ray_address:
        config = replace(config, log_level=options.log_level, log_format=options.log_format)
        return _verifier_actor(options, config, secret)
    return asyncio.run(_verifier(config, secret, options.drain_grace))


async def _verifier(config: VerifierConfig, secret: bytes, drain_grace_s: float) -> int:
    from outrider.cloud.server import VerifierServer

    server = VerifierServer(config, secret)
    print(f"verifier {config.name} of {config.model_id} on {await server.start()}", flush=True)
    _tell_metrics(config.name, server.metrics_address)
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
    from outrider.deploy.fleet import ray_options

    connect_ray(options.ray_address)
    actor = start_verifier_actor(config.name, config, lease_secret=secret, ray_options=ray_options(options))
    wait_until_loaded(config.name, actor)
    info = ray.get(actor.info.remote())
    print(f"verifier {config.name} of {config.model_id} on {info['address']}", flush=True)
    _tell_metrics(config.name, info["metrics_address"])
    return 0


def _metrics_addresses(actors: dict[str, Any]) -> dict[str, str]:
    import ray

    return {name: ray.get(actor.info.remote())["metrics_address"] for name, actor in actors.items()}


def _tell_metrics(name: str, address: str) -> None:
    if address:
        print(f"metrics of {name} on http://{address}/metrics", flush=True)


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
        keep_s=options.keep,
        batch_invariant=options.batch_invariant,
        max_sessions=options.max_sessions,
        goal=Goal[options.goal.upper()],
        steering=tuple(str(path.expanduser().absolute()) for path in options.steering),
    )


def _access(options: argparse.Namespace) -> dict[str, Any]:
    """What the options of `add_tls` and `add_access` say of a coordinator."""
    return {
        "tls": serving_tls(options),
        "api_keys": options.api_keys,
        "remote_drain": options.remote_drain,
        "relay": options.relay,
        "relay_streams": options.relay_streams,
    }


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


def _read_chat_template(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", field="chat-template") from error


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
