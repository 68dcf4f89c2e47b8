"""Connections to verifiers: one for all texts of a client, and a new one after a loss."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from command_processes import free_port

from outrider.edge import Client, EdgeConfig
from outrider.edge.features import TextFeatures
from outrider.edge.link.link import Channels, Connection, Stream
from outrider.edge.link.routes import PREFIX_LENGTHS, CoordinatorRoute, DirectRoute, prefix_key, text_prefixes
from outrider.edge.link.security import Security
from outrider.proto import codec
from outrider.proto.channel import CONNECTION_WINDOW_BYTES, REPORT_METHOD
from outrider.proto.errors import OutriderError, ResourceExhausted, Unavailable
from outrider.proto.rpc_errors import to_status
from outrider.proto.session import EdgeStatistics, RetryRules
from outrider.proto.types import (
    MAX_PREFIXES,
    MAX_TOKEN_ID,
    Cancel,
    Commit,
    CommittedToken,
    FinishReason,
    Lease,
    LeaseRequest,
    Open,
    Opened,
)

OPENED = Opened(0, 8, 16, "v", 512)
COMMIT = Commit(start=4, tokens=tuple(map(CommittedToken, (5, 6))), accepted=1, credit=16)


class Verifier:
    """Answers every frame with Opened, and notes the connection that each came from."""

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


class Ending(Verifier):
    """Answers the first frame with two, and ends the stream; or with an error, where it has one."""

    def __init__(self, error: ResourceExhausted | None = None) -> None:
        super().__init__()
        self._error = error

    async def _decode(self, frames: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        await anext(frames)
        yield codec.encode_cloud_frame(OPENED)
        yield codec.encode_cloud_frame(COMMIT)
        if self._error is not None:
            await context.abort(*to_status(self._error))


class Refusing(Verifier):
    """Refuses its first two streams with an error of its own, or without one as a proxy would; decodes the others."""

    def __init__(self, error: OutriderError | None) -> None:
        super().__init__()
        self._error = error

    async def _decode(self, frames: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        self.peers.append(context.peer())
        opening = codec.decode_edge_frame(await anext(frames))
        assert isinstance(opening, Open)
        if len(self.peers) <= 2:
            status = (grpc.StatusCode.UNAVAILABLE, "no") if self._error is None else to_status(self._error)
            await context.abort(*status)
        yield codec.encode_cloud_frame(replace(OPENED, epoch=opening.epoch))
        whole = Commit(1, (CommittedToken(7),), 0, 8, finish=FinishReason.LENGTH, epoch=opening.epoch)
        yield codec.encode_cloud_frame(whole)


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Verifier, Channels]]:
    verifier, channels = Verifier(), Channels()
    await verifier.server.start()
    try:
        yield verifier, channels
    finally:
        await channels.close()
        await verifier.server.stop(None)


def at(address: str) -> Lease:
    return Lease(b"", "v", address, 60.0, "tiny", "")


async def answered(stream: Stream) -> None:
    """The stream is up: a frame has been answered."""
    stream.send(Cancel())
    assert await anext(stream.frames()) == OPENED


async def reaches(connection: Connection, wanted: grpc.ChannelConnectivity) -> None:
    """The connection comes into this state, and nobody uses it."""
    while (state := connection.channel.get_state()) is not wanted:
        await connection.channel.wait_for_state_change(state)


async def test_texts_after_one_another_and_side_by_side_share_a_connection() -> None:
    async with connected() as (verifier, channels):
        busy, idle = EdgeStatistics(), EdgeStatistics()
        first = channels.open_stream(at(verifier.address), busy)
        await answered(first)
        beside = channels.open_stream(at(verifier.address), idle)
        assert busy.uplink_bytes > 0
        assert busy.downlink_bytes >= len(codec.encode_cloud_frame(OPENED))
        assert (idle.uplink_bytes, idle.downlink_bytes) == (0, 0), "bytes are counted for each text"
        await answered(beside)
        await channels.close_stream(first)
        await channels.close_stream(beside)
        after = channels.open_stream(at(verifier.address), EdgeStatistics())
        await answered(after)
        await channels.close_stream(after)
        assert len(verifier.peers) == 3
        assert len(set(verifier.peers)) == 1


@pytest.mark.parametrize(
    ("said", "known"),
    [
        (b'{"context_length": 512}', 512),
        (b"{}", 0),
        (b"[", 0),
        (b"null", 0),
        (b'{"context_length": "many"}', 0),
        (None, 0),
    ],
)
async def test_a_verifier_without_a_coordinator_says_its_context_where_it_can(said: bytes | None, known: int) -> None:
    async def report(request: bytes, context: Any) -> bytes:
        return said or b""

    verifier, channels = Verifier(), Channels()
    if said is not None:  # else it is of a release that has no such service
        service, method = REPORT_METHOD.strip("/").split("/")
        handlers = {method: grpc.unary_unary_rpc_method_handler(report)}
        verifier.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    await verifier.server.start()
    lease = Lease(b"", "v", verifier.address, 1.0, "tiny", "")
    assert await channels.described(lease, 30.0) == replace(lease, context_length=known)
    await channels.close()
    await verifier.server.stop(None)


async def test_losing_one_text_leaves_the_others_their_stream_and_the_next_reconnects() -> None:
    async with connected() as (verifier, channels):
        lost = channels.open_stream(at(verifier.address), EdgeStatistics())
        going_on = channels.open_stream(at(verifier.address), EdgeStatistics())
        await answered(lost)
        await answered(going_on)
        channels.retire(verifier.address, lost.connection)
        await channels.close_stream(lost)
        await answered(going_on)
        following = channels.open_stream(at(verifier.address), EdgeStatistics())
        await answered(following)
        channels.retire(verifier.address, going_on.connection)  # of the old connection: the new one stays
        await channels.close_stream(going_on)
        await answered(following)
        beside = channels.open_stream(at(verifier.address), EdgeStatistics())
        await answered(beside)
        for stream in (following, beside):
            await channels.close_stream(stream)
        assert len(verifier.peers) == 4
        assert len(set(verifier.peers[:2])) == len(set(verifier.peers[2:])) == 1
        assert len(set(verifier.peers)) == 2


async def test_a_verifier_that_starts_after_refusals_is_reached_without_backoff() -> None:
    async with connected() as (verifier, channels):
        await verifier.server.stop(None)
        address = f"127.0.0.1:{free_port()}"
        for _ in range(4):
            lost = channels.open_stream(at(address), EdgeStatistics())
            lost.send(Cancel())
            with pytest.raises(Unavailable):
                await anext(lost.frames())
            channels.retire(address, lost.connection)
            await channels.close_stream(lost)
        again = Verifier(address)
        await again.server.start()
        stream = channels.open_stream(at(address), EdgeStatistics())
        await answered(stream)
        await channels.close_stream(stream)
        await again.server.stop(None)


async def test_a_connection_is_renewed_in_mid_text_and_no_text_waits_for_the_handshake() -> None:
    async def text(channels: Channels, address: str) -> Connection:
        stream = channels.open_stream(at(address), EdgeStatistics())
        await answered(stream)
        await channels.close_stream(stream)
        return stream.connection

    async with connected() as (verifier, channels):
        address = verifier.address
        first = channels.open_stream(at(address), EdgeStatistics())
        await answered(first)
        assert first.connection.successor is None
        first.connection.receive(CONNECTION_WINDOW_BYTES // 2)
        await answered(first)
        successor = first.connection.successor
        assert successor is not None, "made before the text has ended"
        assert successor.channel.get_state() is not grpc.ChannelConnectivity.IDLE, "nobody has to use it first"
        await reaches(successor, grpc.ChannelConnectivity.READY)
        assert successor.stands
        first.connection.opened = OPENED
        assert await text(channels, address) is successor
        assert successor.opened == OPENED, "the same verifier's"
        await answered(first)  # over the old connection, to its end
        await channels.close_stream(first)
        assert first.connection.channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
        assert await text(channels, address) is successor
        assert len(set(verifier.peers)) == 2


async def test_a_used_up_connection_carries_texts_until_its_successor_stands() -> None:
    async with connected() as (verifier, channels):
        address = verifier.address
        first = channels.open_stream(at(address), EdgeStatistics())
        await answered(first)
        old = first.connection
        nobody = grpc.aio.insecure_channel("127.0.0.1:1")
        old.renew = lambda: Connection(nobody, old.renew)
        old.receive(CONNECTION_WINDOW_BYTES)
        second = channels.open_stream(at(address), EdgeStatistics())
        await answered(second)
        assert second.connection is old
        channels.retire(address, old)  # lost: its successor, made over the same link, is not trusted
        third = channels.open_stream(at(address), EdgeStatistics())
        await answered(third)
        assert third.connection not in (old, old.successor)
        for stream in (first, second, third):
            await channels.close_stream(stream)
        for channel in (old.channel, nobody):
            assert channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN


async def test_a_connection_made_ahead_in_vain_costs_the_first_text_no_backoff() -> None:
    async with connected() as (verifier, channels):
        await verifier.server.stop(None)
        address = f"127.0.0.1:{free_port()}"
        channels.connect(at(address))
        in_vain = channels._by_address[address]
        await reaches(in_vain, grpc.ChannelConnectivity.TRANSIENT_FAILURE)
        again = Verifier(address)
        await again.server.start()
        stream = channels.open_stream(at(address), EdgeStatistics())
        assert stream.connection is not in_vain
        await answered(stream)
        await channels.close_stream(stream)
        assert in_vain.channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
        await again.server.stop(None)


async def test_a_prepared_client_has_a_connection_that_its_first_text_takes(tokenizer_file: Path) -> None:
    verifier = Verifier()
    await verifier.server.start()
    async with Client(
        EdgeConfig(verifier=verifier.address, model="tiny", tokenizer=tokenizer_file, drafter="none")
    ) as client:
        connection = client._channels._by_address[verifier.address]
        await reaches(connection, grpc.ChannelConnectivity.READY)
        assert verifier.peers == [], "no stream has been opened"
        client._channels.connect(at(verifier.address))
        stream = client._channels.open_stream(at(verifier.address), EdgeStatistics())
        assert stream.connection is connection
        await answered(stream)
        await client._channels.close_stream(stream)
    await verifier.server.stop(None)


@pytest.mark.parametrize("error", [None, ResourceExhausted("no room", retry_after_s=2.0)])
async def test_a_draft_that_meets_the_streams_end_hides_neither_commit_nor_error(
    error: ResourceExhausted | None,
) -> None:
    verifier, channels = Ending(error), Channels()
    await verifier.server.start()
    stream = channels.open_stream(at(verifier.address), EdgeStatistics())
    frames = stream.frames()
    stream.send(Cancel())
    assert await anext(frames) == OPENED
    await asyncio.sleep(0.3)  # the verifier's status has come, and nobody has read so far
    stream.send(Cancel())
    await asyncio.sleep(0.1)
    last = await anext(frames)
    assert isinstance(last, Commit)
    assert last.tokens == COMMIT.tokens
    with pytest.raises(OutriderError) as caught:
        await anext(frames)
    assert type(caught.value) is (Unavailable if error is None else ResourceExhausted)
    assert caught.value.retry_after_s == (0 if error is None else 2)
    await channels.close_stream(stream)
    await channels.close()
    while any("status_once_received" in str(task.get_coro()) for task in asyncio.all_tasks()):  # noqa: ASYNC110
        await asyncio.sleep(0.01)  # until gRPC keeps nothing of the call
    await verifier.server.stop(None)


async def test_a_stream_whose_closing_is_cancelled_gives_its_connection_back() -> None:
    async with connected() as (verifier, channels):
        stream = channels.open_stream(at(verifier.address), EdgeStatistics())
        await answered(stream)
        channels.retire(verifier.address, stream.connection)
        closing = asyncio.create_task(channels.close_stream(stream))
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        assert stream.connection.streams == 0
        assert stream.connection.channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN


@pytest.mark.parametrize(
    ("error", "connections"),
    [(ResourceExhausted("full", retry_after_s=0.01), 1), (Unavailable("drains"), 1), (None, 3)],
)
async def test_a_refused_stream_keeps_its_connection_and_a_broken_one_does_not(
    tokenizer_file: Path, error: OutriderError | None, connections: int
) -> None:
    verifier = Refusing(error)
    await verifier.server.start()
    retry = RetryRules(first_s=0.01)
    config = EdgeConfig(verifier=verifier.address, model="tiny", tokenizer=tokenizer_file, drafter="none", retry=retry)
    try:
        async with Client(config) as client:
            for _ in range(2):
                completion = await client.complete((5,), max_tokens=1)
                assert completion.ids == (7,)
    finally:
        await verifier.server.stop(None)
    assert len(verifier.peers) == 4
    assert len(set(verifier.peers)) == connections


# --- routes: hashes of a text's beginnings, equal where texts of one key begin alike, and fixed addresses ---

KEY = prefix_key("secret", "tiny", "ab" * 32)
TEXT = random.Random(3).choices(range(MAX_TOKEN_ID + 1), k=PREFIX_LENGTHS[-1] + 5)


def test_lengths_grow_by_half_an_octave_from_sixteen_tokens() -> None:
    assert PREFIX_LENGTHS[:6] == (16, 22, 32, 45, 64, 90)
    assert PREFIX_LENGTHS[4::4] == (64, 256, 1024, 4096, 16384), "four more are a fourfold length"
    assert len(PREFIX_LENGTHS) == MAX_PREFIXES


@pytest.mark.parametrize("common", [0, 15, 16, 63, 64, 500, len(TEXT)])
def test_texts_have_those_hashes_in_common_whose_lengths_they_share(common: int) -> None:
    other = [*TEXT[:common], *((token + 1) % (MAX_TOKEN_ID + 1) for token in TEXT[common:])]
    one, two = text_prefixes(TEXT, KEY), text_prefixes(other, KEY)
    shared = sum(length <= common for length in PREFIX_LENGTHS)
    assert one[:shared] == two[:shared]
    assert not set(one[shared:]) & set(two)
    assert text_prefixes(TEXT[:common], KEY) == one[:shared], "a longer text goes on with further ones"
    assert LeaseRequest("m", "s", prefixes=one).prefixes == one


class Asked:
    """A coordinator's client that notes the requests for leases, and gives none."""

    security = Security(api_key="secret")

    def __init__(self) -> None:
        self.requests: list[LeaseRequest] = []

    async def open_lease(self, request: LeaseRequest) -> Lease:
        self.requests.append(request)
        return Lease(b"", "v", "a:1", 60.0, "tiny", "ab" * 32)


def test_a_lease_is_asked_for_by_hashes_of_whom_the_text_is_for() -> None:
    client = Asked()
    route = CoordinatorRoute(client, "tiny", "ab" * 32)  # type: ignore[arg-type]
    for isolation in (b"", b"alice", b"bob"):
        asyncio.run(route.about(TextFeatures(), isolation).lease(LeaseRequest("tiny", "s"), TEXT))
    found = [request.prefixes for request in client.requests]
    assert found[0] == text_prefixes(TEXT, KEY)
    assert len({hash_ for prefixes in found for hash_ in prefixes}) == 3 * MAX_PREFIXES


def test_a_key_a_model_and_a_tokenizer_have_hashes_of_their_own() -> None:
    keys = [
        KEY,
        prefix_key("another", "tiny", "ab" * 32),
        prefix_key("", "tiny", "ab" * 32),
        prefix_key("secret", "big", "ab" * 32),
        prefix_key("secret", "tiny", "cd" * 32),
        prefix_key("secret", "tiny", "ab" * 32, b"alice"),
        prefix_key("secret", "tiny", "ab" * 32, b"bob"),
    ]
    hashes = [hash_ for key in keys for hash_ in text_prefixes(TEXT, key)]
    assert len(set(hashes)) == len(keys) * MAX_PREFIXES


# --- without a coordinator ---


@pytest.mark.parametrize(
    ("lost", "next_one"),
    [("", "a:1"), ("a", "b:1"), ("ab", "c:1"), ("abc", "a:1"), ("bca", "b:1"), ("cab", "c:1"), ("cb", "a:1")],
)
def test_the_next_address_was_not_lost_or_else_was_lost_longest_ago(lost, next_one) -> None:
    route = DirectRoute(("a:1", "b:1", "c:1"), "tiny", "")
    lease = asyncio.run(route.lease(LeaseRequest("tiny", "s", avoid=tuple(f"{name}:1" for name in lost))))
    assert lease.address == next_one
