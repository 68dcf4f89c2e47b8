"""`outrider status` and `outrider drain`: requests of an operator to the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from rich.console import Console
from rich.live import Live

from outrider.deploy.arguments import Given
from outrider.deploy.commands.operating import DrainSettings, StatusSettings
from outrider.deploy.credentials import security
from outrider.deploy.status import as_json, tables
from outrider.edge.edge_config import EdgeConfig
from outrider.edge.link.control_client import CoordinatorClient
from outrider.proto.address import address_of_server
from outrider.proto.errors import Unavailable
from outrider.proto.status import ClusterStatus


def status(given: Given) -> int:
    """Run `outrider status`."""
    return asyncio.run(_status(given))


async def _status(given: Given) -> int:
    """Show the status, repeatedly with `--watch`; while the coordinator is away, the last one stays."""
    settings = given(StatusSettings)
    show: Callable[[ClusterStatus], None] = _print_json if settings.json else _print_tables
    async with _coordinator(given) as client:
        seen = await client.status()
        with contextlib.ExitStack() as stack:
            if settings.watch and not settings.json and Console().is_terminal:
                live = stack.enter_context(Live(screen=True, auto_refresh=False))
                show = lambda seen: live.update(tables(seen), refresh=True)  # noqa: E731
            show(seen)
            while settings.watch:
                await asyncio.sleep(settings.watch)
                with contextlib.suppress(Unavailable):
                    seen = await client.status()
                show(seen)
    return 0


def drain(given: Given) -> int:
    """Run `outrider drain`."""
    return asyncio.run(_drain(given))


async def _drain(given: Given) -> int:
    name = given(DrainSettings).name
    async with _coordinator(given, timeout_s=60.0) as client:
        sessions = await client.drain(name)
    print(f"{name} takes no more sessions; {sessions} were asked to move")
    return 0


@contextlib.asynccontextmanager
async def _coordinator(given: Given, **options: Any) -> AsyncIterator[CoordinatorClient]:
    fields = given.fields(EdgeConfig)
    address = address_of_server(fields["coordinator"], "coordinator", has_tls=fields["tls_ca"] is not None)
    client = CoordinatorClient(address, security=security(given), **options)
    try:
        yield client
    finally:
        await client.close()


def _print_json(status: ClusterStatus) -> None:
    print(json.dumps(as_json(status)), flush=True)


def _print_tables(status: ClusterStatus) -> None:
    Console().print(tables(status))
