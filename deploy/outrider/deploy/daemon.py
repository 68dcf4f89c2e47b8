"""`outrider edge`: OpenAI's HTTP API on this machine, decoded in the cloud with drafts from here."""

from __future__ import annotations

import asyncio
import signal

from outrider.deploy.arguments import Given
from outrider.deploy.credentials import api_key, serving_tls
from outrider.edge import Client, EdgeConfig
from outrider.edge.daemon import DaemonConfig
from outrider.proto.errors import ConfigError


def edge(given: Given) -> int:
    """Run `outrider edge`."""
    return asyncio.run(_edge(given))


async def _edge(given: Given) -> int:
    try:
        from outrider.edge.daemon.server import Daemon
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("outrider"):
            raise
        raise ConfigError(f"needs the package {error.name}; pip install 'outrider[edge]'") from error

    daemon = Daemon(given(DaemonConfig, tls=serving_tls(given)), Client(given(EdgeConfig, api_key=api_key(given))))
    stopping, hurried = asyncio.Event(), daemon.limiter.cut
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: hurried.set() if stopping.is_set() else stopping.set())
    loop.add_signal_handler(signal.SIGHUP, daemon.reload)
    print(f"edge daemon on {await daemon.start()}", flush=True)
    await stopping.wait()
    await daemon.stop()
    return 0
