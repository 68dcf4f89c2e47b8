"""`outrider edge`: OpenAI's HTTP API on this machine, decoded in the cloud with drafts from here."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any

from outrider.deploy.arguments import Given
from outrider.deploy.commands.edge_options import LearnHereSettings, ServerSettings
from outrider.deploy.credentials import api_key, serving_tls
from outrider.deploy.process.progress import say, waiting
from outrider.deploy.process.termination import WATCH, has_terminal, on_signals
from outrider.edge import Client, EdgeConfig
from outrider.edge.daemon import DaemonConfig
from outrider.proto.errors import ConfigError
from outrider.proto.plumbing.extras import lacking

if TYPE_CHECKING:
    from outrider.deploy.local.learn_here import LearningHere
    from outrider.edge.daemon.http_server import Daemon


def edge(given: Given) -> int:
    """Run `outrider edge`."""
    return asyncio.run(_edge(given))


async def _edge(given: Given) -> int:
    asked, fields = given(ServerSettings), given.fields(EdgeConfig)
    if not asked.server:
        return await _serve(given, {})
    if fields["coordinator"] or fields["verifier"]:
        raise ConfigError("cannot be given with --coordinator or --verifier; give one", field="server")
    from outrider.deploy.local.server_here import verifier_here

    async with verifier_here(asked, fields["tokenizer"]) as (_, where):
        if fields["chat_template"] is not None:
            where["chat_template"] = fields["chat_template"]
        return await _serve(given, where)


async def _serve(given: Given, where: dict[str, Any]) -> int:
    """Serve with drafts from here; `where` replaces settings of the edge."""
    try:
        from outrider.edge.daemon.http_server import Daemon
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("outrider"):
            raise
        raise ConfigError(lacking("edge", error.name)) from error

    client = Client(given(EdgeConfig, api_key=api_key(given), **where))
    learning = _learning(given, client)
    daemon = Daemon(given(DaemonConfig, tls=serving_tls(given)), client)
    stopping, hurried = asyncio.Event(), daemon.limiter.cut
    in_terminal = has_terminal()

    def stop() -> None:
        (hurried if stopping.is_set() else stopping).set()

    def hang_up() -> None:
        if in_terminal and not has_terminal():
            stop()
        else:
            daemon.reload()

    address = await daemon.start()
    WATCH.leave_alone(signal.SIGHUP)
    on_signals(hang_up, signal.SIGHUP)
    WATCH.leave_to_command()
    on_signals(stop, signal.SIGINT, signal.SIGTERM)
    print(f"edge daemon on {address}", flush=True)
    waits = asyncio.create_task(_until_ready(daemon, client, address))
    learns = asyncio.create_task(learning.run()) if learning is not None else None
    await stopping.wait()
    waits.cancel()
    await asyncio.gather(waits, return_exceptions=True)
    if learns is not None:
        learns.cancel()
        await asyncio.gather(learns, return_exceptions=True)
    await daemon.stop()
    return 0


async def _until_ready(daemon: Daemon, client: Client, address: str) -> None:
    """Say on standard error what is waited for, and what is served then."""
    config = client.config
    where = f"coordinator at {config.coordinator}" if config.coordinator else f"verifier at {config.verifier}"
    with waiting(f"waiting for the {where}"):
        await daemon.cloud.found.wait()
    say(
        f"ready: {client.ready.model if client.ready else ''}, drafter {client.drafter_name}; "
        f"the page: {address}/   OpenAI's API: {address}/v1"
    )


def _learning(given: Given, client: Client) -> LearningHere | None:
    asked = given(LearnHereSettings)
    if not asked.learn_here:
        return None
    from outrider.deploy.local.learn_here import LearningHere, check_packages

    check_packages()
    return LearningHere(client, cpu_share=asked.learn_cpu_share, folder=asked.learn_here_folder, logs=given.logging)
