"""`outrider edge`: OpenAI's HTTP API on this machine, decoded in the cloud with drafts from here."""

from __future__ import annotations

import argparse
import asyncio
import signal

from outrider.deploy.options import connection, drafting, serving_tls
from outrider.edge import Client, EdgeConfig
from outrider.proto.errors import ConfigError


def edge(options: argparse.Namespace) -> int:
    """Run `outrider edge`."""
    return asyncio.run(_edge(options))


async def _edge(options: argparse.Namespace) -> int:
    try:
        from outrider.edge.daemon.config import DaemonConfig
        from outrider.edge.daemon.server import Daemon
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("outrider"):
            raise
        raise ConfigError(f"needs the package {error.name}; pip install 'outrider[edge]'") from error

    config = DaemonConfig(
        listen=options.listen,
        insecure_listen=options.insecure_listen,
        tls=serving_tls(options),
        api_keys=options.api_keys,
        max_requests=options.max_requests,
        request_timeout_s=options.request_timeout,
        grace_s=options.grace,
    )
    daemon = Daemon(config, Client(edge_config(options)))
    stopping, hurried = asyncio.Event(), daemon.limiter.cut
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: hurried.set() if stopping.is_set() else stopping.set())
    loop.add_signal_handler(signal.SIGHUP, daemon.reload)
    print(f"edge daemon on {await daemon.start()}", flush=True)
    await stopping.wait()
    await daemon.stop()
    return 0


def edge_config(options: argparse.Namespace) -> EdgeConfig:
    """Return the settings of the edge itself."""
    return EdgeConfig(
        coordinator=options.coordinator,
        verifier=options.verifier,
        tokenizer=options.tokenizer,
        chat_template=options.chat_template,
        model=options.model,
        cache=options.cache,
        window=options.window,
        battery=options.battery,
        **drafting(options),
        trace_endpoint=options.trace_endpoint,
        trace_ratio=options.trace_ratio,
        **connection(options, "cloud-"),
    )
