"""`outrider status` and `outrider drain`: an operator's questions to the coordinator."""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from outrider.edge.control import CoordinatorClient
from outrider.proto.types import ClusterStatus


def status(options: argparse.Namespace) -> int:
    """`outrider status`."""
    shown = asyncio.run(_status(options.coordinator))
    if options.json:
        print(json.dumps(asdict(shown)))
    else:
        _print(shown)
    return 0


def drain(options: argparse.Namespace) -> int:
    """`outrider drain`."""
    sessions = asyncio.run(_drain(options.coordinator, options.name))
    print(f"{options.name} takes no more sessions; {sessions} were asked to move")
    return 0


async def _status(address: str) -> ClusterStatus:
    client = CoordinatorClient(address)
    try:
        return await client.status()
    finally:
        await client.close()


async def _drain(address: str, name: str) -> int:
    client = CoordinatorClient(address, timeout_s=60.0)
    try:
        return await client.drain(name)
    finally:
        await client.close()


def _print(status: ClusterStatus) -> None:
    console = Console()
    verifiers = Table("verifier", "state", "model", "address", "sessions", "step ms", "restarts", "free KV pages")
    for v in status.verifiers:
        step = f"{1000 * v.step_s:.1f}" if v.step_s else "-"
        numbers = (str(v.sessions), step, str(v.restarts), str(v.kv_pages_free))
        verifiers.add_row(v.name, v.state, v.model, v.address or "-", *numbers)
    drafters = Table("drafter", "version", "made for", "MB")
    for d in status.drafters:
        drafters.add_row(d.name, d.version, d.target, f"{sum(file.bytes for file in d.files) / 1e6:.1f}")
    console.print(verifiers, drafters, f"{status.leases_granted} leases granted")
