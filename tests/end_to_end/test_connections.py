"""Connections and calls that are not used, to coordinator and verifier: few of an address and in all, and not long."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import torch
from fake_cluster import ScriptedCluster, ready
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.verifier_config import VerifierConfig
from outrider.coordinator import coordinator_server
from outrider.coordinator.coordinator_config import CoordinatorConfig
from outrider.coordinator.coordinator_server import CoordinatorServer
from outrider.proto.address import split_address
from outrider.proto.plumbing import connections

torch.set_num_threads(1)

SECRET = b"0123456789abcdef"
OTHER = "127.0.0.2"
MOST = 32
OF_ADDRESS = MOST // connections.SHARE_OF_ADDRESS
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # and empty SETTINGS
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
DATA, HEADERS, SETTINGS, PING = 0, 1, 4, 6
MAX_STREAMS, WINDOW = 3, 4  # settings
END_STREAM, END_HEADERS = 1, 4  # flags
MOST_CALLS = 8
Server = Callable[..., Any]
Connected = tuple[asyncio.StreamReader, asyncio.StreamWriter]


BOTH = pytest.mark.parametrize("server", ["coordinator", "verifier"], indirect=True)


@pytest.fixture
def server(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Make a coordinator, or a server of a kind, whose connections are looked at often and not too slow for anything.

    What watches connections and calls is one code: that both have it, tests marked `BOTH` show.
    """
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", MOST)
    monkeypatch.setattr(connections, "LOOK_S", 0.05)
    for name in ("HANDSHAKE_S", "FIRST_CALL_S", "IDLE_S"):
        monkeypatch.setattr(connections, name, 600.0)

    def make(**options: Any) -> Any:
        listen = "127.0.0.1:0"
        if getattr(request, "param", "coordinator") == "coordinator":
            config = CoordinatorConfig(listen=listen, lease_secret=SECRET, **options)
            return CoordinatorServer(config, ScriptedCluster(ready("a")))
        return VerifierServer(VerifierConfig(target=str(folder), listen=listen, threads=1, **options), SECRET)

    return make


@asynccontextmanager
async def started(server: Any) -> AsyncIterator[str]:
    """Start a server, and yield its address."""
    try:
        yield await server.start()
    finally:
        await server.stop(0.1)


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


def frame(kind: int, flags: int = 0, stream: int = 0, body: bytes = b"") -> bytes:
    """A frame of HTTP/2."""
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


def headers_of_call(stream: int, method: str = CHECK) -> bytes:
    named = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "a", "te": "trailers"}
    named["content-type"] = "application/grpc"
    fields = (bytes([len(field)]) + field.encode() for field in itertools.chain.from_iterable(named.items()))
    names_and_values = zip(*[fields] * 2, strict=True)
    return frame(HEADERS, END_HEADERS, stream, b"".join(b"\0" + b"".join(pair) for pair in names_and_values))


async def frames(reader: asyncio.StreamReader) -> AsyncIterator[tuple[int, int, int, bytes]]:
    """Yield kind, flags, stream and body of each frame from a server."""
    while True:
        head = await reader.readexactly(9)
        yield head[3], head[4], int.from_bytes(head[5:]), await reader.readexactly(int.from_bytes(head[:3]))


async def code_of(channel: grpc.aio.Channel, method: str, messages: Iterable[bytes] | None) -> grpc.StatusCode:
    """Make a call with these messages, or with its headers alone, and return its status."""
    call = channel.stream_stream(method)(messages)
    if messages is None:
        await call.wait_for_connection()
    with contextlib.suppress(grpc.RpcError):  # the status comes after all answers
        async for _ in call:
            pass
    return await call.code()


def is_up(channel: grpc.aio.Channel) -> bool:
    return channel.get_state() is grpc.ChannelConnectivity.READY


@BOTH
async def test_silent_connections_beyond_the_limit_are_closed_at_once_and_the_others_soon(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_S", 1.0)
    async with started(server(connections_per_address=0)) as address, client(address) as used:
        opened = await connect(address, 3 * MOST)
        waiting = await until_ended(opened, 2 * MOST + 1)
        await call(used)
        await asyncio.gather(*waiting)
        async with client(address):  # the slots of the others are free again
            pass


async def test_a_connection_without_a_call_is_closed_and_made_again_for_the_next(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "IDLE_S", 0.2)
    async with started(server()) as address, client(address) as channel:
        while is_up(channel):  # noqa: ASYNC110 - gRPC has no event for it
            await asyncio.sleep(0.05)
        running = await watch(channel)
        await asyncio.sleep(0.6)
        assert is_up(channel), "a call keeps it"
        running.cancel()
        await call(channel)


@pytest.mark.parametrize("said", [b"", HELLO], ids=["silent", "hello"])
async def test_one_address_has_a_part_of_all_connections(server: Server, said: bytes) -> None:
    async with started(server()) as address, client(address) as used:
        running = await watch(used)
        for _ in range(3):
            opened = await connect(address, MOST - OF_ADDRESS, said=said)
            assert len(await until_ended(opened, MOST - 2 * OF_ADDRESS)) <= OF_ADDRESS
            async with client(address):
                pass
        assert is_up(used)
        assert not running.done()


async def test_a_connection_that_says_hello_and_nothing_else_is_closed_soon(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "FIRST_CALL_S", 0.2)
    async with started(server()) as address, client(address) as used, client(address) as busy:
        running = await watch(busy)
        await until_ended(await connect(address, OF_ADDRESS, said=HELLO), OF_ADDRESS)
        assert is_up(used)
        assert is_up(busy)
        assert not running.done()


async def test_a_client_may_connect_ahead_beside_a_connection_that_it_uses(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "FIRST_CALL_S", 0.2)
    async with started(server()) as address, client(address) as used:
        opened = await connect(address, 3, "127.0.0.1", HELLO)  # kept, or else this end closes them
        [ahead] = await until_ended(opened, 2)
        await until_ended(await connect(address, 1, said=HELLO), 1)
        assert is_up(used)
        assert not ahead.done()
        ahead.cancel()


@BOTH
async def test_no_connection_is_closed_while_a_call_runs_on_it(server: Server) -> None:
    async with (
        started(server(connections_per_address=1)) as address,
        client(address) as first,
        client(address) as second,
        client(address) as third,
    ):
        running = []
        for channel in (first, second):
            while True:  # a connection is one too many until its call runs
                try:
                    running.append(await watch(channel))
                    break
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.05)
        for _ in range(3):
            await until_ended(await connect(address, 2, "127.0.0.1", HELLO), 2)
        while is_up(third):  # noqa: ASYNC110 - gRPC has no event for it
            await asyncio.sleep(0.05)
        assert is_up(first)
        assert is_up(second)
        assert not any(each.done() for each in running)


async def test_a_limit_of_0_is_none(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "FIRST_CALL_S", 0.2)
    async with started(server(connections_per_address=0)) as address, contextlib.AsyncExitStack() as clients:
        used = [await clients.enter_async_context(client(address)) for _ in range(2 * OF_ADDRESS)]
        await until_ended(await connect(address, 1, said=HELLO), 1)
        assert all(map(is_up, used))


async def test_a_connection_that_cannot_be_looked_at_once_is_looked_at_again(
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
    async with started(server()) as address:
        opened = await connect(address, OF_ADDRESS, said=HELLO)
        await until_ended(opened, OF_ADDRESS)


@pytest.mark.parametrize(
    ("server", "client_takes", "method"),
    [
        ("coordinator", "no answers", CHECK),
        ("coordinator", "time for messages", CHECK),
        ("coordinator", "time for messages", WATCH),
        ("verifier", "no answers", WATCH),
    ],
    indirect=["server"],
)
async def test_an_address_cannot_have_all_calls(
    server: Server, client_takes: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_CALLS_OF_ADDRESS", MOST_CALLS)
    monkeypatch.setattr(connections, "MESSAGE_S", 600.0)
    monkeypatch.setattr(coordinator_server, "MAX_CALLS", 4 * MOST_CALLS)
    said, message = HELLO, b""
    if client_takes == "no answers":
        said = HELLO[:-9] + frame(SETTINGS, body=WINDOW.to_bytes(2, "big") + bytes(4))
    streams = range(1, 16 * MOST_CALLS, 2)
    for stream in streams:
        message = frame(DATA, END_STREAM, stream, bytes(5)) if client_takes == "no answers" else b""
        said += headers_of_call(stream, method) + message
    async with started(server()) as address, client(address) as used:
        [(reader, writer)] = await connect(address, 1, said=said)
        refused = 0
        async for kind, flags, _, _ in frames(reader):
            refused += kind == HEADERS and flags & END_STREAM
            if refused == len(streams) - MOST_CALLS:
                break
        await call(used)
        writer.close()


@BOTH
async def test_a_call_without_a_message_ends_soon_and_gives_its_slot_back(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_CALLS_OF_ADDRESS", 1)
    monkeypatch.setattr(connections, "MESSAGE_S", 0.1)
    async with started(server()) as address, grpc.aio.insecure_channel(address) as channel:
        for method in (CHECK, WATCH):
            assert await code_of(channel, method, None) is grpc.StatusCode.UNAVAILABLE
        monkeypatch.setattr(connections, "MESSAGE_S", 600.0)
        for method in (CHECK, WATCH):
            cancelled = channel.stream_stream(method)()
            await cancelled.wait_for_connection()
            cancelled.cancel()
            await until_calls_are_over(channel)
            late = channel.stream_stream(method)(timeout=0.1)
            assert await late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until_calls_are_over(channel)


async def until_calls_are_over(channel: grpc.aio.Channel) -> None:
    """Wait until a server, which allows one call, has noticed that the others are over."""
    while await code_of(channel, CHECK, [b""]) is not grpc.StatusCode.OK:  # noqa: ASYNC110 - counted at the server
        await asyncio.sleep(0.02)


@BOTH
async def test_a_call_has_one_message_which_may_be_compressed(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    async with started(server()) as address:
        async with grpc.aio.insecure_channel(address, compression=grpc.Compression.Gzip) as channel:
            assert await code_of(channel, CHECK, [b"\x0a\0" * 1000]) is grpc.StatusCode.OK
            assert await code_of(channel, CHECK, [b"", b"", b""]) is grpc.StatusCode.OK, "the first one counts"
            for method in (CHECK, WATCH):
                assert await code_of(channel, method, []) is grpc.StatusCode.UNIMPLEMENTED
                assert await code_of(channel, method, [b"\xff"]) is grpc.StatusCode.INVALID_ARGUMENT
                too_long = await code_of(channel, method, [bytes(9 << 20)])
                assert too_long is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_many_calls_at_once_on_a_connection_are_all_answered(server: Server) -> None:
    assert connections.MAX_CALLS_OF_ADDRESS > coordinator_server.MAX_STREAMS_OF_CONNECTION
    async with started(server()) as address, client(address) as channel:
        check = channel.unary_unary(CHECK)
        await asyncio.gather(*(check(b"") for _ in range(900)))


@BOTH
async def test_watchers_of_health_are_few_and_checks_are_always_answered(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_WATCHERS", 2)
    async with started(server()) as address, client(address) as channel:
        running = [await watch(channel) for _ in range(2)]
        assert await code_of(channel, WATCH, [b""]) is grpc.StatusCode.RESOURCE_EXHAUSTED
        await call(channel)
        assert not any(each.done() for each in running)


async def test_a_watcher_of_health_that_takes_no_answer_holds_nothing_up(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    watches, written = connections.BoundedHealth.Watch, asyncio.Event()

    async def noted(self: Any, request: Any, context: Any) -> None:
        asyncio.get_running_loop().call_later(0.2, written.set)  # when it waits for the client to take its answer
        await watches(self, request, context)

    monkeypatch.setattr(connections.BoundedHealth, "Watch", noted)
    said = HELLO[:-9] + frame(SETTINGS, body=WINDOW.to_bytes(2, "big") + bytes(4))
    said += headers_of_call(1, WATCH) + frame(DATA, END_STREAM, 1, bytes(5))

    stopped = server()
    address = await stopped.start()
    [(_, writer)] = await connect(address, 1, said=said)
    await written.wait()
    await asyncio.wait_for(stopped.stop(0.1), 60)
    writer.close()


@pytest.mark.parametrize(("sessions", "streams"), [(1, 1024), (1000, 4000)])
async def test_a_connection_to_a_verifier_has_streams_for_a_relay_of_all_its_sessions(
    sessions: int, streams: int, folder: Path
) -> None:
    config = VerifierConfig(target=str(folder), listen="127.0.0.1:0", threads=1, max_sessions=sessions)
    async with started(VerifierServer(config, SECRET)) as address:
        [(reader, writer)] = await connect(address, 1, said=HELLO)
        async for kind, _, _, body in frames(reader):
            if kind == SETTINGS:
                settings = [body[at : at + 6] for at in range(0, len(body), 6)]
                assert MAX_STREAMS.to_bytes(2) + streams.to_bytes(4) in settings
                break
        writer.close()


def test_connections_are_looked_at_when_no_descriptor_is_left() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = listener.getsockname()[1]
        watch = connections.ConnectionWatch(1)
        assert watch._look(port, 0.0) == 0
        for _ in range(3):
            opened.enter_context(socket.create_connection(("127.0.0.1", port)))
            opened.enter_context(listener.accept()[0])
        null = os.open(os.devnull, os.O_RDONLY)
        opened.callback(os.close, null)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, limits[0]), limits[1]))
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        with contextlib.suppress(OSError):
            while True:
                opened.callback(os.close, os.dup(null))
        for n in range(200):  # a thread of an earlier test may have the descriptor that is left, for a moment
            shut = watch._look(port, 1.0 + n / 100)
            if shut:
                break
            time.sleep(0.05)
        assert shut == 2
        watch.stop()


def test_connections_that_cannot_be_looked_at_are_few_lines_of_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks = []
    watch = connections.ConnectionWatch(1)

    def fail(port: int, now_s: float) -> int:
        looks.append(port)
        if len(looks) == 20:
            watch.stop()
        raise OSError(24, "too many open files")

    monkeypatch.setattr(connections, "LOOK_S", 0.001)
    monkeypatch.setattr(watch, "_look", fail)
    watch._run(1)
    assert len(looks) == 20
    assert len([record for record in caplog.records if record.name == connections.__name__]) == 1


@pytest.mark.parametrize(("descriptors", "room"), [(1024, 768), (300, 150), (20_000, 16_384), (-1, 16_384)])
def test_a_server_keeps_descriptors_for_itself(descriptors: int, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (descriptors, descriptors))
    assert dict(connections.connection_options())["grpc.max_allowed_incoming_connections"] == room


@pytest.mark.parametrize(
    ("peer", "network"),
    [
        ("ipv4:192.0.2.7:50", "192.0.2.7"),
        ("ipv6:%5B::ffff:192.0.2.7%5D:50", "192.0.2.7"),
        ("ipv6:%5B2001:db8::7%5D:50", "2001:db8::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:50", "fe80::/64"),
        ("unix:/tmp/socket", "unix:/tmp/socket"),
    ],
)
def test_a_peer_of_grpc_has_a_network(peer: str, network: str) -> None:
    assert connections.network_of_peer(peer) == network
