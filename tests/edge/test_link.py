"""Connections to verifiers: one for all texts of a client, and a new one after a loss."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from outrider.edge.link import Channels, Stream
from outrider.proto import codec
from outrider.proto.errors import Unavailable
from outrider.proto.session import EdgeStatistics
from outrider.proto.types import Cancel, Opened

OPENED = Opened(0, 8, 16, "v", 512)


class Verifier:
    """Answers every frame with Opened, and remembers from which connection it came."""

    def __init__(self, address: str = "127.0.0.1:0") -> None:
        self.peers: list[str] = []
        self.server = grpc.aio.server()
        service, method = codec.DECODE_METHOD.strip("/").split("/")
        handler = grpc.stream_stream_rpc_method_handler(self._decode)
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        self.port = self.server.add_insecure_port(address)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def _decode(self, frames: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        self.peers.append(context.peer())
        async for _ in frames:
            yield codec.encode_cloud_frame(OPENED)


def run(scenario: Callable[[Verifier, Channels], Awaitable[None]]) -> None:
    async def main() -> None:
        verifier, channels = Verifier(), Channels()
        await verifier.server.start()
        try:
            await asyncio.wait_for(scenario(verifier, channels), 30)
        finally:
            await channels.close()
            await verifier.server.stop(None)

    asyncio.run(main())


async def answered(stream: Stream) -> None:
    """The stream is up: a frame has been answered."""
    stream.send(Cancel())
    assert await anext(stream.frames()) == OPENED


def test_texts_after_one_another_and_side_by_side_share_a_connection() -> None:
    async def scenario(verifier: Verifier, channels: Channels) -> None:
        first = channels.open_stream(verifier.address, EdgeStatistics())
        await answered(first)
        beside = channels.open_stream(verifier.address, EdgeStatistics())
        await answered(beside)
        await channels.close_stream(verifier.address, first)
        await channels.close_stream(verifier.address, beside)
        after = channels.open_stream(verifier.address, EdgeStatistics())
        await answered(after)
        await channels.close_stream(verifier.address, after)
        assert len(verifier.peers) == 3
        assert len(set(verifier.peers)) == 1

    run(scenario)


def test_after_a_loss_the_next_text_connects_anew() -> None:
    async def scenario(verifier: Verifier, channels: Channels) -> None:
        first = channels.open_stream(verifier.address, EdgeStatistics())
        await answered(first)
        channels.drop(verifier.address, first)
        await channels.close_stream(verifier.address, first)
        second = channels.open_stream(verifier.address, EdgeStatistics())
        await answered(second)
        await channels.close_stream(verifier.address, second)
        assert len(set(verifier.peers)) == 2

    run(scenario)


def test_the_loss_of_one_text_leaves_the_others_their_stream_and_the_next_connects_anew() -> None:
    async def scenario(verifier: Verifier, channels: Channels) -> None:
        lost = channels.open_stream(verifier.address, EdgeStatistics())
        going_on = channels.open_stream(verifier.address, EdgeStatistics())
        await answered(lost)
        await answered(going_on)
        channels.drop(verifier.address, lost)
        await channels.close_stream(verifier.address, lost)
        await answered(going_on)
        following = channels.open_stream(verifier.address, EdgeStatistics())
        await answered(following)
        channels.drop(verifier.address, going_on)  # of the old connection: the new one stays
        await channels.close_stream(verifier.address, going_on)
        await answered(following)
        beside = channels.open_stream(verifier.address, EdgeStatistics())
        await answered(beside)
        for stream in (following, beside):
            await channels.close_stream(verifier.address, stream)
        assert len(verifier.peers) == 4
        assert len(set(verifier.peers[:2])) == len(set(verifier.peers[2:])) == 1
        assert len(set(verifier.peers)) == 2

    run(scenario)


def test_a_verifier_that_came_up_after_refused_connections_is_reached_without_waiting_for_a_backoff() -> None:
    async def scenario(verifier: Verifier, channels: Channels) -> None:
        address = verifier.address
        await verifier.server.stop(None)
        for _ in range(4):
            lost = channels.open_stream(address, EdgeStatistics())
            lost.send(Cancel())
            with pytest.raises(Unavailable):
                await anext(lost.frames())
            channels.drop(address, lost)
            await channels.close_stream(address, lost)
        again = Verifier(address)
        await again.server.start()
        stream = channels.open_stream(address, EdgeStatistics())
        await answered(stream)
        await channels.close_stream(address, stream)
        await again.server.stop(None)

    run(scenario)


def test_bytes_are_counted_for_each_text_alone() -> None:
    async def scenario(verifier: Verifier, channels: Channels) -> None:
        busy, idle = EdgeStatistics(), EdgeStatistics()
        first = channels.open_stream(verifier.address, busy)
        second = channels.open_stream(verifier.address, idle)
        await answered(first)
        assert busy.uplink_bytes > 0
        assert busy.downlink_bytes >= len(codec.encode_cloud_frame(OPENED))
        assert (idle.uplink_bytes, idle.downlink_bytes) == (0, 0)
        await channels.close_stream(verifier.address, first)
        await channels.close_stream(verifier.address, second)

    run(scenario)
