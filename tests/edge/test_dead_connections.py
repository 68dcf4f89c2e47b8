"""Connections that die unsaid, as where a machine changes its network: the next lease is had over another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest

from outrider.edge import Client, EdgeConfig
from outrider.edge.link import control_client
from outrider.edge.link.control_client import CoordinatorClient
from outrider.edge.link.link import Channels
from outrider.proto import codec
from outrider.proto.channel import HEALTH_METHOD, HEALTHY
from outrider.proto.errors import Unavailable
from outrider.proto.session import EdgeStatistics
from outrider.proto.types import Lease, LeaseRequest

HEALTH_SERVICE = HEALTH_METHOD.split("/")[1]
LEASE = Lease(b"token", "v", "127.0.0.1:1", 60.0, "tiny", "")
REQUEST = LeaseRequest("tiny", "session")
SUSPECTED = LeaseRequest("tiny", "session", suspected=True)
UNANSWERED_S = 0.2


class Leasing:
    """Answers after `takes_s`, and counts what it was asked."""

    def __init__(self) -> None:
        self.takes_s, self.asked, self.drops, self.well = 0.0, 0, False, True
        self.server = grpc.aio.server()
        handlers = {
            "OpenLease": grpc.unary_unary_rpc_method_handler(self._open),
            "WatchDrafters": grpc.unary_stream_rpc_method_handler(self._watch),
        }
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(codec.CONTROL_SERVICE, handlers),))
        health = grpc.unary_unary_rpc_method_handler(self._health)
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(HEALTH_SERVICE, {"Check": health}),))
        self.port = self.server.add_insecure_port("127.0.0.1:0")

    async def _open(self, _: bytes, context: Any) -> bytes:
        self.asked += 1
        if self.drops:
            await context.abort(grpc.StatusCode.CANCELLED)
        await asyncio.sleep(self.takes_s)
        return codec.encode_lease(LEASE)

    async def _health(self, _: bytes, __: Any) -> bytes:
        await asyncio.sleep(0 if self.well else 60)
        return HEALTHY

    async def _watch(self, _: bytes, context: Any) -> None:
        await context.write(codec.encode_drafters(()))
        await asyncio.sleep(60)


class Router:
    """Carries connections to a port, until it forgets those that there are: they pass nothing then, and say nothing."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.address = ""
        self.cut = False  # no connection can be made
        self.connections = 0
        self._forgotten: list[asyncio.Event] = []
        self._tasks = set[asyncio.Task[None]]()

    def forget(self) -> None:
        for forgotten in self._forgotten:
            forgotten.set()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        forgotten = asyncio.Event()
        self._forgotten.append(forgotten)
        if self.cut:
            forgotten.set()
        inside_reader, inside_writer = await asyncio.open_connection("127.0.0.1", self.port)
        ways = ((reader, inside_writer), (inside_reader, writer))
        self._tasks |= {asyncio.create_task(self._pump(*way, forgotten)) for way in ways}

    @staticmethod
    async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, forgotten: asyncio.Event) -> None:
        with suppress(OSError):
            while (data := await reader.read(1 << 16)) and not forgotten.is_set():
                writer.write(data)
        if not forgotten.is_set():
            writer.close()

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()


Routed = tuple[Leasing, Router, CoordinatorClient, list[str]]


@asynccontextmanager
async def routed(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Routed]:
    """A coordinator behind a router, a client that has had a lease, and a note of each time that it renewed."""
    monkeypatch.setattr(control_client, "UNANSWERED_S", UNANSWERED_S)
    monkeypatch.setattr(control_client, "SUSPECTED_S", UNANSWERED_S / 2)
    coordinator, renewed = Leasing(), list[str]()
    await coordinator.server.start()
    router = Router(coordinator.port)
    listening = await asyncio.start_server(router.carry, "127.0.0.1", 0)
    client = CoordinatorClient(f"127.0.0.1:{listening.sockets[0].getsockname()[1]}", timeout_s=5.0)
    client.on_renewed = lambda: renewed.append("renewed")
    try:
        assert await client.open_lease(REQUEST) == LEASE
        yield coordinator, router, client, renewed
    finally:
        await client.close()
        listening.close()
        router.end()
        await coordinator.server.stop(None)


@pytest.mark.parametrize("request_", [REQUEST, SUSPECTED])
async def test_a_lease_is_had_over_another_connection_where_the_first_is_dead(request_, monkeypatch) -> None:
    async with routed(monkeypatch) as (coordinator, router, client, renewed):
        router.forget()
        leases = await asyncio.gather(*(client.open_lease(request_) for _ in range(4)))
        assert leases == [LEASE] * 4
        assert (router.connections, renewed) == (2, ["renewed"]), "one for all calls that wait"
        assert coordinator.asked == 5
        assert await client.open_lease(REQUEST) == LEASE
        assert router.connections == 2


async def test_a_connection_that_dies_soon_after_another_is_left_as_soon(monkeypatch) -> None:
    """A device may change its network twice."""
    async with routed(monkeypatch) as (_, router, client, renewed):
        for number in (1, 2, 3):
            router.forget()
            assert await client.open_lease(REQUEST) == LEASE
            assert (router.connections, len(renewed)) == (1 + number, number)


async def test_a_connection_that_dies_under_the_same_call_is_left_as_well(monkeypatch) -> None:
    async with routed(monkeypatch) as (coordinator, router, client, renewed):
        router.forget()
        client.on_renewed = lambda: (renewed.append("renewed"), len(renewed) == 1 and router.forget())
        began = time.monotonic()
        assert await client.open_lease(REQUEST) == LEASE
        assert time.monotonic() - began < 4.0, "it does not wait for its deadline"
        assert len(renewed) == 2
        assert coordinator.asked == 2


async def test_a_connection_that_was_begun_while_nothing_passed_is_begun_again(monkeypatch) -> None:
    async with routed(monkeypatch) as (_, router, client, renewed):
        router.forget()
        router.cut = True
        waiting = asyncio.create_task(client.open_lease(SUSPECTED))
        while router.connections < 2:  # noqa: ASYNC110 - the router has no event
            await asyncio.sleep(0.01)
        router.cut = False
        began = time.monotonic()
        assert await waiting == LEASE
        assert time.monotonic() - began < 3.0, "not once the first has been given up after 5 s"
        assert renewed == ["renewed"]


async def test_a_watch_ends_with_an_error_where_its_connection_is_given_up(
    monkeypatch,
) -> None:
    async with routed(monkeypatch) as (_, router, client, renewed):
        client._timeout_s = 1.0
        updates = client.watch_drafters()
        assert await anext(updates) == ()
        router.forget()
        await client.open_lease(REQUEST)
        assert renewed
        with pytest.raises(Unavailable, match="watch again"):
            await anext(updates)
        assert await anext(client.watch_drafters()) == ()


async def test_a_watch_that_is_cancelled_is_cancelled(monkeypatch) -> None:
    async with routed(monkeypatch) as (_, _, client, _):
        updates = client.watch_drafters()
        assert await anext(updates) == ()
        waiting = asyncio.ensure_future(anext(updates))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


@pytest.mark.parametrize("request_", [REQUEST, SUSPECTED])
async def test_a_slow_coordinator_that_says_its_health_is_waited_for(request_, monkeypatch) -> None:
    """Another connection, and a call at the end of its line, would make it slower."""
    async with routed(monkeypatch) as (coordinator, router, client, renewed):
        coordinator.takes_s = 3 * UNANSWERED_S
        assert await asyncio.gather(*(client.open_lease(request_) for _ in range(3))) == [LEASE] * 3
        assert (router.connections, coordinator.asked, renewed) == (1, 1 + 3, [])


async def test_a_coordinator_that_says_nothing_at_all_is_asked_over_another_connection(monkeypatch) -> None:
    async with routed(monkeypatch) as (coordinator, router, client, renewed):
        coordinator.takes_s, coordinator.well = 3 * UNANSWERED_S, False
        assert await client.open_lease(REQUEST) == LEASE
        assert (router.connections, coordinator.asked, len(renewed)) == (3, 1 + 3, 2), "and not again and again"


async def test_a_coordinator_that_drops_calls_of_too_long_a_line_is_asked_again(monkeypatch) -> None:
    async with routed(monkeypatch) as (coordinator, _, client, _):
        coordinator.drops = True
        with pytest.raises(Unavailable, match="too many calls") as refusal:
            await client.open_lease(REQUEST)
        assert 0.0 < refusal.value.retry_after_s < 2.0, "a text waits, and does not fail"
        assert refusal.value.field == "", "it is there"


async def test_a_link_that_passes_nothing_is_said_to_answer_nothing(monkeypatch) -> None:
    async with routed(monkeypatch) as (_, router, client, renewed):
        router.forget()
        router.cut = True
        client._timeout_s = 1.0
        began = time.monotonic()
        with pytest.raises(Unavailable, match="does not answer"):
            await client.open_lease(REQUEST)
        assert time.monotonic() - began < 4.0
        assert renewed == []


async def test_a_client_that_finds_its_connection_dead_doubts_those_to_verifiers() -> None:
    client = Client(EdgeConfig(coordinator="127.0.0.1:1"))
    verifier = Channels.connect(client._channels, LEASE)
    assert client._coordinator is not None
    client._coordinator.on_renewed()
    stream = client._channels.open_stream(LEASE, EdgeStatistics())
    assert verifier.retired
    assert stream.connection is not verifier
    await client._channels.close_stream(stream)
    await client.close()
