"""`outrider status` and `outrider drain`: requests of an operator to the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable

from rich.console import Console
from rich.live import Live

from outrider.deploy.arguments import Given
from outrider.deploy.commands.operating import DrainSettings, StatusSettings
from outrider.deploy.credentials import security
from outrider.deploy.status import as_json, tables
from outrider.edge.config import EdgeConfig
from outrider.edge.control import CoordinatorClient
from outrider.edge.security import Security
from outrider.proto.errors import Unavailable
from outrider.proto.types import ClusterStatus


def status(given: Given) -> int:
    """Run `outrider status`."""
    settings, address = given(StatusSettings), given.fields(EdgeConfig)["coordinator"]
    show = _print_json if settings.json else _print_tables
    if settings.watch is None:
        show(asyncio.run(_status(address, security(given))))
    elif settings.json or not Console().is_terminal:
        asyncio.run(_repeat(address, security(given), settings.watch, show))
    else:
        with Live(screen=True, auto_refresh=False) as live:
            live_show = lambda seen: live.update(tables(seen), refresh=True)  # noqa: E731
            asyncio.run(_repeat(address, security(given), settings.watch, live_show))
    return 0


def drain(given: Given) -> int:
    """Run `outrider drain`."""
    name, address = given(DrainSettings).name, given.fields(EdgeConfig)["coordinator"]
    sessions = asyncio.run(_drain(address, name, security(given)))
    print(f"{name} takes no more sessions; {sessions} were asked to move")
    return 0


async def _status(address: str, security: Security) -> ClusterStatus:
    client = CoordinatorClient(address, security=security)
    try:
        return await client.status()
    finally:
        await client.close()


async def _repeat(address: str, security: Security, every_s: float, show: Callable[[ClusterStatus], None]) -> None:
    """Show the status until Ctrl-C; while the coordinator is away, the last one stays on the screen."""
    client = CoordinatorClient(address, security=security)
    seen = await client.status()
    try:
        while True:
            show(seen)
            await asyncio.sleep(every_s)
            with contextlib.suppress(Unavailable):
                seen = await client.status()
    finally:
        await client.close()


async def _drain(address: str, name: str, security: Security) -> int:
    client = CoordinatorClient(address, timeout_s=60.0, security=security)
    try:
        return await client.drain(name)
    finally:
        await client.close()


def _print_json(status: ClusterStatus) -> None:
    print(json.dumps(as_json(status)), flush=True)


def _print_tables(status: ClusterStatus) -> None:
    Console().print(tables(status))
