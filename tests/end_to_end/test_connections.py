"""Connections that nobody uses, to coordinator and verifier: few of each address and in all, and not for long."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.cloud.config import VerifierConfig
from outrider.cloud.server import VerifierServer
from outrider.cloud.testing import save_tiny_target
from outrider.coordinator.config import CoordinatorConfig
from outrider.coordinator.server import CoordinatorServer
from outrider.coordinator.testing import ScriptedCluster, ready
from outrider.proto.address import split_address
from outrider.proto.plumbing import connections

torch.set_num_threads(1)

SECRET = b"0123456789abcdef"
OTHER = "127.0.0.2"
MOST = 32
OF_ADDRESS = MOST // connections.SHARE_OF_ADDRESS
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # and empty SETTINGS
Server = Callable[..., Any]
Connected = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=["coordinator", "verifier"])
def server(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Make a server of either kind, whose connections are looked at often and are not too slow for anything."""
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", MOST)
    monkeypatch.setattr(connections, "LOOK_S", 0.05)
    for name in ("HANDSHAKE_S", "FIRST_CALL_S", "IDLE_S"):
        monkeypatch.setattr(connections, name, 600.0)

    def make(**options: Any) -> Any:
        listen = "127.0.0.1:0"
        if request.param == "coordinator":
            config = CoordinatorConfig(listen=listen, lease_secret=SECRET, **options)
            return CoordinatorServer(config, ScriptedCluster(ready("a")))
        return VerifierServer(VerifierConfig(target=str(folder), listen=listen, threads=1, **options), SECRET)

    return make


def run(server: Any, scenario: Callable[[str], Any]) -> None:
    """Run a scenario with the address of a server, for two minutes at most."""

    async def whole() -> None:
        address = await server.start()
        try:
            await scenario(address)
        finally:
            await server.stop(0.1)

    asyncio.run(asyncio.wait_for(whole(), 120))


@asynccontextmanager
async def client(address: str) -> AsyncIterator[grpc.aio.Channel]:
    """A client with a connection of its own, which has been used."""
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        await call(channel)
        yield channel


async def call(channel: grpc.aio.Channel) -> None:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def watch(channel: grpc.aio.Channel) -> Any:
    """Begin a call that goes on."""
    running = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    await running.read()
    return running


async def connect(address: str, number: int, source: str = OTHER, said: bytes = b"") -> list[Connected]:
    host, port = split_address(address, "address")
    opened = [await asyncio.open_connection(host, port, local_addr=(source, 0)) for _ in range(number)]
    for _, writer in opened:
        writer.write(said)
    return opened


async def ended(reader: asyncio.StreamReader) -> None:
    """Wait until the server closes a connection, whatever it says before."""
    with contextlib.suppress(ConnectionError):
        while await reader.read(4096):
            pass


async def until_ended(opened: Iterable[Connected], number: int) -> list[asyncio.Task[None]]:
    """Wait until so many are closed, and return the tasks that wait for the others."""
    waiting = [asyncio.create_task(ended(reader)) for reader, _ in opened]
    while sum(task.done() for task in waiting) < number:
        await asyncio.wait([task for task in waiting if not task.done()], return_when=asyncio.FIRST_COMPLETED)
    return [task for task in waiting if not task.done()]


def is_up(channel: grpc.aio.Channel) -> bool:
    return channel.get_state() is grpc.ChannelConnectivity.READY


def test_silent_connections_beyond_the_limit_are_closed_at_once_and_the_others_soon(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_S", 3.0)

    async def scenario(address: str) -> None:
        async with client(address) as used:
            opened = await connect(address, 3 * MOST)
            waiting = await until_ended(opened, 2 * MOST + 1)
            await call(used)
            await asyncio.gather(*waiting)
            async with client(address):  # the places of the others are free again
                pass

    run(server(connections_per_address=0), scenario)


def test_a_connection_without_a_call_is_closed_and_made_again_for_the_next(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "IDLE_S", 0.5)

    async def scenario(address: str) -> None:
        async with client(address) as channel:
            while is_up(channel):  # noqa: ASYNC110 - gRPC has no event for it
                await asyncio.sleep(0.05)
            running = await watch(channel)
            await asyncio.sleep(1.5)
            assert is_up(channel), "a call keeps it"
            running.cancel()
            await call(channel)

    run(server(), scenario)


@pytest.mark.parametrize("said", [b"", HELLO], ids=["silent", "hello"])
def test_one_address_has_a_part_of_all_connections(server: Server, said: bytes) -> None:
    async def scenario(address: str) -> None:
        async with client(address) as used:
            running = await watch(used)
            for _ in range(3):
                opened = await connect(address, MOST - OF_ADDRESS, said=said)
                assert len(await until_ended(opened, MOST - 2 * OF_ADDRESS)) <= OF_ADDRESS
                async with client(address):
                    pass
            assert is_up(used)
            assert not running.done()

    run(server(), scenario)


def test_a_connection_that_says_hello_and_nothing_else_is_closed_soon(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "FIRST_CALL_S", 0.2)

    async def scenario(address: str) -> None:
        async with client(address) as used, client(address) as busy:
            running = await watch(busy)
            await until_ended(await connect(address, OF_ADDRESS, said=HELLO), OF_ADDRESS)
            assert is_up(used)
            assert is_up(busy)
            assert not running.done()

    run(server(), scenario)


def test_a_client_may_connect_ahead_beside_a_connection_that_it_uses(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "FIRST_CALL_S", 0.2)

    async def scenario(address: str) -> None:
        async with client(address) as used:
            opened = await connect(address, 3, "127.0.0.1", HELLO)  # kept, or else this end closes them
            [ahead] = await until_ended(opened, 2)
            await until_ended(await connect(address, 1, said=HELLO), 1)
            assert is_up(used)
            assert not ahead.done()
            ahead.cancel()

    run(server(), scenario)


def test_no_connection_is_closed_while_a_call_runs_on_it(server: Server) -> None:
    async def scenario(address: str) -> None:
        async with client(address) as first, client(address) as second, client(address) as third:
            running = [await watch(channel) for channel in (first, second)]
            for _ in range(3):
                await until_ended(await connect(address, 2, "127.0.0.1", HELLO), 2)
            while is_up(third):  # noqa: ASYNC110 - gRPC has no event for it
                await asyncio.sleep(0.05)
            assert is_up(first)
            assert is_up(second)
            assert not any(each.done() for each in running)

    run(server(connections_per_address=1), scenario)


def test_a_limit_of_0_is_none(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "FIRST_CALL_S", 0.2)

    async def scenario(address: str) -> None:
        async with contextlib.AsyncExitStack() as clients:
            used = [await clients.enter_async_context(client(address)) for _ in range(2 * OF_ADDRESS)]
            await until_ended(await connect(address, 1, said=HELLO), 1)
            assert all(map(is_up, used))

    run(server(connections_per_address=0), scenario)


def test_a_connection_that_cannot_be_looked_at_once_is_looked_at_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "FIRST_CALL_S", 0.2)
    seen: set[int] = set()
    look = connections._connection

    def without_descriptors(descriptor: int, port: int, now_s: float) -> Any:
        if descriptor not in seen:
            seen.add(descriptor)
            raise OSError(24, "too many open files")
        return look(descriptor, port, now_s)

    monkeypatch.setattr(connections, "_connection", without_descriptors)

    async def scenario(address: str) -> None:
        opened = await connect(address, OF_ADDRESS, said=HELLO)
        await until_ended(opened, OF_ADDRESS)

    run(server(), scenario)


@pytest.mark.parametrize(("descriptors", "room"), [(1024, 768), (300, 150), (20_000, 8192), (-1, 8192)])
def test_a_server_keeps_descriptors_for_itself(descriptors: int, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (descriptors, descriptors))
    assert dict(connections.connection_options())["grpc.max_allowed_incoming_connections"] == room


@pytest.mark.parametrize(
    ("host", "network"),
    [("192.0.2.7", "192.0.2.7"), ("2001:db8:0:1:a::b", "2001:db8:0:1::/64"), ("2001:db8:0:2::1", "2001:db8:0:2::/64")],
)
def test_a_network_of_64_bits_counts_as_one_address(host: str, network: str) -> None:
    assert connections.network_of(host) == network
