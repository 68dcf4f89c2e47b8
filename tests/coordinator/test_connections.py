"""Connections that nobody uses: few enough for a coordinator to go on, and not for long."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.coordinator import connections
from outrider.coordinator.testing import ScriptedCluster, ready
from outrider.edge.control import CoordinatorClient
from outrider.proto.address import split_address
from outrider.proto.errors import OutriderError

Serve = Callable[..., None]
MOST = 8


async def ended(reader: asyncio.StreamReader) -> None:
    """Wait until the coordinator closes a connection, whatever it says before."""
    with contextlib.suppress(ConnectionError):
        while await reader.read(4096):
            pass


def test_silent_connections_beyond_the_limit_are_closed_at_once_and_the_others_soon(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", MOST)
    monkeypatch.setattr(connections, "HANDSHAKE_S", 3.0)

    async def scenario(call: Any) -> None:
        host, port = split_address(call.address, "address")
        await call("Status", None)  # the one connection that is used
        opened = [await asyncio.open_connection(host, port) for _ in range(3 * MOST)]
        waiting = [asyncio.create_task(ended(reader)) for reader, _ in opened]
        done = 0
        while done < 2 * MOST + 1:
            finished, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            done, waiting = done + len(finished), [task for task in waiting if not task.done()]
        await call("Status", None)
        if waiting:
            await asyncio.wait(waiting)
        another = CoordinatorClient(call.address)
        while True:  # the places of the others are free again
            try:
                await another.status()
                break
            except OutriderError:
                await asyncio.sleep(0.1)
        await another.close()
        for _, writer in opened:
            writer.close()

    serve(scenario, ScriptedCluster(ready("a")))


def test_a_connection_without_a_call_is_closed_and_made_again_for_the_next(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "IDLE_S", 0.5)

    async def scenario(call: Any) -> None:
        await call("Status", None)
        while call.channel.get_state() is grpc.ChannelConnectivity.READY:  # noqa: ASYNC110 - gRPC has no event for it
            await asyncio.sleep(0.05)
        watch = call.stream("WatchDrafters", "")
        await anext(watch)
        await asyncio.sleep(1.5)
        assert call.channel.get_state() is grpc.ChannelConnectivity.READY, "a call keeps it"
        await watch.aclose()
        await call("Status", None)

    serve(scenario, ScriptedCluster(ready("a")))


@pytest.mark.parametrize(("descriptors", "room"), [(1024, 768), (300, 150), (20_000, 8192), (-1, 8192)])
def test_a_coordinator_keeps_descriptors_for_itself(
    descriptors: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (descriptors, descriptors))
    assert connections.connection_limits()["grpc.max_allowed_incoming_connections"] == room
