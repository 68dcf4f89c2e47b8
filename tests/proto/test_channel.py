"""Addresses of connections, whose both ends notice by gRPC's own pings a peer that has gone silent."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import grpc.aio
import pytest

from outrider.proto.address import is_local_address, is_loopback, join_address, split_address
from outrider.proto.channel import CLIENT_OPTIONS, DECODING_OPTIONS, KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS, SERVER_OPTIONS
from outrider.proto.errors import ConfigError

METHOD = "/test.Silent/Call"
FASTER = 20


def faster(options: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the options with every time of keepalive `FASTER` times shorter, so that a test need not take 30 s."""
    times = {KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS, KEEPALIVE_MS // 2}
    return [(name, value // FASTER if value in times and name.endswith("_ms") else value) for name, value in options]


class Cable:
    """A TCP connection to `port` that can fall silent in both directions without closing."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.silent = False
        self.server: asyncio.Server | None = None
        self.tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        self.server = await asyncio.start_server(self.connect, "127.0.0.1", 0)
        return int(self.server.sockets[0].getsockname()[1])

    async def connect(self, near: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        far, far_out = await asyncio.open_connection("127.0.0.1", self.port)
        for source, to in ((near, far_out), (far, near_out)):
            task = asyncio.create_task(self.carry(source, to))
            self.tasks.add(task)

    async def carry(self, source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await source.read(65536):
                if not self.silent:
                    to.write(data)

    async def close(self) -> None:
        assert self.server is not None
        self.server.close()
        for task in self.tasks:
            task.cancel()


@pytest.mark.parametrize("options", [CLIENT_OPTIONS, DECODING_OPTIONS], ids=["control", "decoding"])
async def test_both_ends_notice_a_peer_that_falls_silent(options: list[tuple[str, int]]) -> None:
    """gRPC's own limit of an unanswered ping is a minute, whatever its limit of keepalive says."""

    gone = asyncio.Event()

    async def call(_: object, context: grpc.aio.ServicerContext) -> None:
        try:
            await context.write(b"here")
            await asyncio.sleep(600)
        finally:
            gone.set()

    server = grpc.aio.server(options=faster(SERVER_OPTIONS))
    handler = grpc.stream_stream_rpc_method_handler(call)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Silent", {"Call": handler}),))
    cable = Cable(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    port = await cable.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=faster(options)) as channel:
        stream = channel.stream_stream(METHOD)()
        assert await stream.read() == b"here"
        cable.silent = True
        async with asyncio.timeout(40):
            assert await stream.code() is grpc.StatusCode.UNAVAILABLE
            await gone.wait()
    await cable.close()
    await server.stop(0)


def test_a_silent_peer_is_noticed_in_half_a_minute() -> None:
    assert KEEPALIVE_MS + KEEPALIVE_TIMEOUT_MS <= 30_000
    for options in (CLIENT_OPTIONS, DECODING_OPTIONS, SERVER_OPTIONS):
        named = dict(options)
        assert named["grpc.keepalive_time_ms"] == KEEPALIVE_MS
        assert named["grpc.http2.ping_timeout_ms"] == named["grpc.keepalive_timeout_ms"] == KEEPALIVE_TIMEOUT_MS


# --- addresses ---


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 0), ("a.example", 65535), ("::1", 7), ("2001:db8::1", 50050)])
def test_an_address_that_is_put_together_comes_apart_again(host, port):
    assert split_address(join_address(host, port), "listen") == (host, port)


@pytest.mark.parametrize("address", ["", "host", ":1", "host:", "host:x", "host:-1", "host:65536", "1:\u0661\u0662x"])
def test_what_is_no_address_is_refused_on_its_field(address):
    with pytest.raises(ConfigError, match="is not host:port") as refusal:
        split_address(address, "listen")
    assert refusal.value.field == "listen"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.8.7", "localhost", "::1"])
def test_loopback_is_known(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "10.0.0.1", "127.evil.example", "localhost.evil", "example.org"])
def test_anything_else_may_be_reached_from_elsewhere(host):
    assert not is_loopback(host)


def test_an_address_is_as_local_as_its_host():
    assert is_local_address("[::1]:1", "listen")
    assert not is_local_address("[::]:1", "listen")
