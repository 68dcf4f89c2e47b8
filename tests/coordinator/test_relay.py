"""Relayed decoding streams: bytes, statuses, cancellation and back-pressure pass; the lease names the verifier.
Over real gRPC on loopback, with a scripted verifier."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

import grpc.aio
import pytest
from command_processes import free_port
from fake_cluster import ScriptedCluster, ready
from prometheus_client import CollectorRegistry

from outrider.coordinator.cluster import VerifierState
from outrider.coordinator.coordinator_metrics import RelayMetrics
from outrider.coordinator.relay import StreamRelay
from outrider.proto import codec
from outrider.proto.channel import LEASE_METADATA
from outrider.proto.cluster_status import RelayStatus
from outrider.proto.errors import (
    Internal,
    LeaseExpired,
    NotFound,
    OutriderError,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from outrider.proto.lease import LeaseClaim, sign_lease
from outrider.proto.rpc_errors import from_rpc_error, to_status
from outrider.proto.streams import CLIENT_GONE
from outrider.proto.types import LeaseRequest

SECRET = b"0123456789abcdef"
Coordinating = Callable[..., AbstractAsyncContextManager[Any]]
Play = Callable[[Any], Awaitable[None]]


async def echo(context: Any) -> None:
    while (data := await context.read()) is not grpc.aio.EOF:
        await context.write(data)


class Verifier:
    """A Decoding service that plays one script for every stream, and records contexts and cancellations."""

    def __init__(self, play: Play = echo) -> None:
        self._play = play
        self.server: grpc.aio.Server | None = None
        self.address = ""
        self.metadata: list[dict[str, Any]] = []
        self.remaining_s: list[float | None] = []
        self.running = 0

    async def start(self, address: str = "") -> str:
        handler = grpc.stream_stream_rpc_method_handler(self._decode)
        self.server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        handlers = grpc.method_handlers_generic_handler(codec.DECODING_SERVICE, {"Decode": handler})
        self.server.add_generic_rpc_handlers((handlers,))
        self.address = f"127.0.0.1:{self.server.add_insecure_port(address or f'127.0.0.1:{free_port()}')}"
        await self.server.start()
        return self.address

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(0)

    async def _decode(self, _: Any, context: Any) -> None:
        self.metadata.append(dict(context.invocation_metadata()))
        self.remaining_s.append(context.time_remaining())
        self.running += 1
        try:
            await self._play(context)
        except OutriderError as error:
            await context.abort(*to_status(error))
        except CLIENT_GONE:
            return
        finally:
            self.running -= 1


@asynccontextmanager
async def verifier(play: Play = echo) -> AsyncIterator[Verifier]:
    one = Verifier(play)
    await one.start()
    try:
        yield one
    finally:
        await one.stop()


def lease(name: str = "a", *, secret: bytes = SECRET, lasts_s: float = 60.0) -> bytes:
    return sign_lease(LeaseClaim(name, "tiny", "s1", time.time() + lasts_s), secret)


def stream(channel: grpc.aio.Channel, token: bytes | None = None, *more: tuple[str, str], **options: Any) -> Any:
    metadata = ((LEASE_METADATA, lease() if token is None else token), *more)
    return channel.stream_stream(codec.DECODE_METHOD)(metadata=metadata, **options)


async def ending(call: Any) -> OutriderError | None:
    """Read a stream to its end, and return its error; None: it ends well."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError:
        pass
    code = await call.code()
    if code is grpc.StatusCode.OK:
        return None
    metadata = await call.trailing_metadata()
    return from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, await call.details()))


@asynccontextmanager
async def relaying(
    coordinating: Coordinating, play: Play = echo, **options: Any
) -> AsyncIterator[tuple[Any, Verifier]]:
    """A relaying coordinator of one verifier, `a`, and that."""
    cluster = ScriptedCluster(ready("a"))
    async with coordinating(cluster, relay=True, **options) as call, verifier(play) as one:
        cluster.verifiers["a"] = ready("a", address=one.address)
        await call.server.service.refresh()
        await call.until(lambda: call.server.service.verifiers[0].address == one.address)
        yield call, one


def status(call: Any) -> RelayStatus:
    return call.server.service.relay_metrics.status()


# --- frames and statuses ---


async def test_frames_pass_unchanged_and_in_order_both_ways_until_the_edge_has_no_more(
    coordinating: Coordinating,
) -> None:
    random_ = random.Random(1)
    frames = [random_.randbytes(n) for n in (1, 30, 1000, 70_000, 3_000_000, 7, 1)]

    # The largest exceeds the limit of requests to the coordinator itself.
    options = [("grpc.max_receive_message_length", 8 << 20)]
    async with (
        relaying(coordinating) as (call, _),
        grpc.aio.insecure_channel(call.address, options=options) as call.channel,
    ):
        decoding = stream(call.channel)
        for frame in frames:
            await decoding.write(frame)
        await decoding.done_writing()
        assert [await decoding.read() for _ in frames] == frames
        assert await ending(decoding) is None
        assert status(call).uplink_bytes == status(call).downlink_bytes == sum(map(len, frames))
        registry = call.server.service.metrics.registry
        assert registry.get_sample_value("outrider:relay_forward_seconds_count") == 2 * len(frames)


async def test_a_lease_says_that_it_is_relayed_and_no_other_address(coordinating: Coordinating) -> None:
    async with relaying(coordinating) as (call, _):
        given = await call("OpenLease", LeaseRequest(model="tiny", session="s1"))
        assert (given.relayed, given.address, given.verifier) == (True, "", "a")
        decoding = stream(call.channel, given.token)
        await decoding.write(b"frame")
        assert await decoding.read() == b"frame"


async def test_the_callers_metadata_passes_but_for_its_key(coordinating: Coordinating) -> None:
    async with relaying(coordinating) as (call, one):
        more = (("traceparent", "00-trace"), ("authorization", "Bearer secret"))
        decoding = stream(call.channel, None, *more)
        await decoding.write(b"frame")
        await decoding.read()
        assert one.metadata[0]["traceparent"] == "00-trace"
        assert one.metadata[0][LEASE_METADATA], "the verifier answers none without it"
        assert "authorization" not in one.metadata[0]


@pytest.mark.parametrize(
    "error",
    [
        ResourceExhausted("is full", field="open", retry_after_s=2.5),
        NotFound("no such model", field="open.model"),
        Unavailable("drains", retry_after_s=0.5),
        Internal("a defect"),
        LeaseExpired("has expired", field="open.lease"),
        None,
    ],
)
async def test_the_verifiers_own_status_arrives_whole(coordinating: Coordinating, error: OutriderError | None) -> None:
    async def refuse(context: Any) -> None:
        await context.read()
        await context.write(b"first")
        if error is not None:
            raise error

    async with relaying(coordinating, refuse) as (call, _):
        decoding = stream(call.channel)
        await decoding.write(b"open")
        assert await decoding.read() == b"first"
        came = await ending(decoding)
        assert type(came) is type(error)
        if error is not None:
            assert (came.message, came.field, came.retry_after_s) == (error.message, error.field, error.retry_after_s)
        assert status(call).broken == 0


async def test_an_edge_whose_connection_is_gone_frees_the_verifier(coordinating: Coordinating) -> None:
    async with relaying(coordinating) as (call, one):
        async with grpc.aio.insecure_channel(call.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            decoding = stream(channel)
            await decoding.write(b"open")
            await decoding.read()
        await call.until(lambda: one.running == 0 and status(call).streams == 0)


async def test_a_deadline_passes(coordinating: Coordinating) -> None:
    async with relaying(coordinating) as (call, one):
        for timeout in (30.0, None):
            decoding = stream(call.channel, timeout=timeout)
            await decoding.write(b"open")
            await decoding.read()
            decoding.cancel()
        assert one.remaining_s[0] is not None
        assert 0 < one.remaining_s[0] <= 30
        assert one.remaining_s[1] is None or one.remaining_s[1] > 1e6


# --- back-pressure ---

FRAME = bytes(64 << 10)
MANY = 400  # frames: 25 MiB, far more than all buffers between two ends hold


async def stuck(moved: Callable[[], int]) -> int:
    """Wait until no frame moves for a while, and return the number of frames."""
    before, still = -1, 0
    while still < 5:
        still = still + 1 if moved() == before else 0
        before = moved()
        await asyncio.sleep(0.1)
    return before


async def test_a_verifier_that_does_not_read_holds_its_own_edge_back_and_no_other(coordinating: Coordinating) -> None:
    goes_on = asyncio.Event()

    async def slow(context: Any) -> None:
        if await context.read() == b"slow":
            await goes_on.wait()
        await context.write(b"ready")
        await echo(context)

    async with relaying(coordinating, slow) as (call, _):
        written = 0

        async def push() -> None:
            nonlocal written
            for _ in range(MANY):
                await decoding.write(FRAME)
                written += 1

        decoding = stream(call.channel)
        await decoding.write(b"slow")
        pushing = asyncio.create_task(push())
        assert await stuck(lambda: written) < MANY / 2
        beside = stream(call.channel)
        await beside.write(b"quick")
        assert await beside.read() == b"ready"
        await beside.write(b"frame")
        assert await beside.read() == b"frame"
        goes_on.set()
        assert await decoding.read() == b"ready"
        for _ in range(MANY):
            assert await decoding.read() == FRAME
        await pushing


async def test_an_edge_that_does_not_read_holds_its_own_verifier_back_and_no_other(coordinating: Coordinating) -> None:
    sent = 0

    async def pour(context: Any) -> None:
        nonlocal sent
        if await context.read() == b"pour":
            for _ in range(MANY):
                await context.write(FRAME)
                sent += 1
        await echo(context)

    async with relaying(coordinating, pour) as (call, _):
        decoding = stream(call.channel)
        await decoding.write(b"pour")
        assert await stuck(lambda: sent) < MANY / 2
        beside = stream(call.channel)
        await beside.write(b"open")
        await beside.write(b"frame")
        assert await beside.read() == b"frame"
        for _ in range(MANY):
            assert await decoding.read() == FRAME
        assert sent == MANY


class GoneEdge:
    """The context of a call whose edge goes while a frame waits for room, before gRPC notices."""

    def invocation_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return ((LEASE_METADATA, lease()),)

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def time_remaining(self) -> None:
        return None

    async def read(self) -> bytes:
        return b"frame"

    async def write(self, _: bytes) -> None:
        raise grpc.aio.InternalError('Failed "execute_batch"')

    def set_trailing_metadata(self, _: Any) -> None:
        pass


def test_an_edge_that_goes_while_a_frame_waits_for_room_frees_the_verifier(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with verifier() as one:
            counted = RelayMetrics(CollectorRegistry())
            relay = StreamRelay(SECRET, lambda: (ready("a", address=one.address),), counted)
            await relay.handlers()["Decode"].stream_stream(None, GoneEdge())  # aborting would fail: there is no abort
            while one.running:  # noqa: ASYNC110 - the verifier knows nothing of tests
                await asyncio.sleep(0.01)
            assert (counted.streams, counted.status().broken) == (0, 0)
            await relay.close()

    asyncio.run(asyncio.wait_for(scenario(), 120))
    assert [record for record in caplog.records if record.exc_info] == []


# --- leases and routes ---


@pytest.mark.parametrize(
    ("token", "kind"),
    [
        (lambda: b"", Unauthenticated),
        (lambda: b"no token", Unauthenticated),
        (lambda: lease(secret=b"another secret of enough bytes"), Unauthenticated),
        (lambda: lease(lasts_s=-60), LeaseExpired),
        (lambda: lease()[:-2] + b"xx", Unauthenticated),
        (lambda: lease("127.0.0.1:22"), Unavailable),
        (lambda: lease("nobody"), Unavailable),
    ],
)
async def test_only_a_genuine_lease_for_a_verifier_of_the_fleet_opens_a_stream(
    coordinating: Coordinating, token: Callable[[], bytes], kind: type[OutriderError]
) -> None:
    async with relaying(coordinating) as (call, one):
        assert type(await ending(stream(call.channel, token()))) is kind
        assert not one.metadata, "nothing reached a verifier"
        assert status(call) == RelayStatus(refused=1)


async def test_a_call_without_lease_is_told_that_it_is_missing(coordinating: Coordinating) -> None:
    async with relaying(coordinating) as (call, _):
        decoding = call.channel.stream_stream(codec.DECODE_METHOD)()
        assert "missing" in str(await ending(decoding))


async def test_streams_beyond_the_limit_are_refused_with_a_time_until_one_ends(coordinating: Coordinating) -> None:
    async with relaying(coordinating, relay_streams=2) as (call, _):
        running = [stream(call.channel) for _ in range(2)]
        for decoding in running:
            await decoding.write(b"open")
            await decoding.read()
        refused = await ending(stream(call.channel))
        assert isinstance(refused, ResourceExhausted)
        assert refused.retry_after_s > 0
        running[0].cancel()
        await call.until(lambda: status(call).streams == 1)
        decoding = stream(call.channel)
        await decoding.write(b"open")
        assert await decoding.read() == b"open"


async def test_a_verifier_hears_of_a_stream_with_its_first_frame_and_two_may_wait(coordinating: Coordinating) -> None:
    async with relaying(coordinating) as (call, one):
        idle = [stream(call.channel) for _ in range(20)]
        for decoding in idle:
            with suppress(grpc.aio.AioRpcError):  # it is refused already
                await decoding.wait_for_connection()
        await call.until(lambda: sum(decoding.done() for decoding in idle) == 18)
        assert (one.running, status(call).streams, status(call).refused) == (0, 0, 18)
        waiting = [decoding for decoding in idle if not decoding.done()]
        for decoding in waiting:
            await decoding.write(b"open")
            assert await decoding.read() == b"open"
        assert one.running == 2
        refused = await ending(next(decoding for decoding in idle if decoding.done()))
        assert isinstance(refused, ResourceExhausted)
        assert refused.retry_after_s > 0


async def test_an_edge_that_ends_its_stream_before_the_first_frame_gives_its_place_back(
    coordinating: Coordinating,
) -> None:
    async with relaying(coordinating) as (call, one):
        for _ in range(6):
            decoding = stream(call.channel)
            await decoding.done_writing()
            assert await ending(decoding) is None
        for _ in range(6):
            gone = stream(call.channel)
            await gone.wait_for_connection()
            gone.cancel()
        decoding = stream(call.channel)
        await decoding.write(b"open")
        assert await decoding.read() == b"open"
        assert one.running == 1


async def test_without_the_option_nothing_is_relayed(coordinating: Coordinating) -> None:
    async with coordinating(ScriptedCluster(ready("a"))) as call:
        assert await stream(call.channel).code() is grpc.StatusCode.UNIMPLEMENTED
        status = await call("Status", None)
        assert status.relay is None


# --- a verifier that goes and comes back ---


async def test_a_dead_verifier_is_unavailable_and_serves_at_once_after_its_return(coordinating: Coordinating) -> None:
    async with relaying(coordinating) as (call, one):
        decoding = stream(call.channel)
        await decoding.write(b"open")
        await decoding.read()
        await one.stop()
        lost = await ending(decoding)
        assert isinstance(lost, Unavailable)
        assert lost.retry_after_s > 0
        late = stream(call.channel)
        await late.write(b"open")
        assert isinstance(await ending(late), Unavailable)
        assert status(call).broken == 2
        again = Verifier()
        await again.start(one.address)
        decoding = stream(call.channel)
        await decoding.write(b"open")
        assert await decoding.read() == b"open"
        await again.stop()


async def test_a_verifier_that_came_back_elsewhere_is_found_there(coordinating: Coordinating) -> None:
    cluster = ScriptedCluster(ready("a"))
    async with coordinating(cluster, relay=True) as call:
        for _ in range(2):
            async with verifier() as one:
                cluster.verifiers["a"] = ready("a", address=one.address)
                await call.until(lambda at=one.address: call.server.service.verifiers[0].address == at)
                decoding = stream(call.channel)
                await decoding.write(b"open")
                assert await decoding.read() == b"open"
                decoding.cancel()
                await call.until(lambda: status(call).streams == 0)
        cluster.verifiers["a"] = ready("a", state=VerifierState.DOWN)
        await call.until(lambda: call.server.service.verifiers[0].state is VerifierState.DOWN)
        assert "is down" in str(await ending(stream(call.channel)))


async def test_stopping_the_coordinator_ends_relayed_streams_on_both_sides(coordinating: Coordinating) -> None:
    async with relaying(coordinating) as (call, one):
        decoding = stream(call.channel)
        await decoding.write(b"open")
        await decoding.read()
        await call.server.stop(0)
        assert await ending(decoding) is not None
        await call.until(lambda: one.running == 0)


# --- noise ---


async def test_random_leases_and_frames_get_a_status_each_and_leave_the_relay_working(
    coordinating: Coordinating, caplog: pytest.LogCaptureFixture
) -> None:
    random_ = random.Random(7)

    async def picky(context: Any) -> None:
        while (data := await context.read()) is not grpc.aio.EOF:
            codec.decode_edge_frame(data, 1000)

    async with relaying(coordinating, picky) as (call, one):
        for i in range(150):
            genuine = bytearray(lease())
            if i % 3 == 0:
                genuine[random_.randrange(len(genuine))] ^= 1 << random_.randrange(8)
            token = bytes(genuine) if i % 3 < 2 else random_.randbytes(random_.randrange(200))
            decoding = stream(call.channel, token)
            for _ in range(random_.randrange(3)):
                with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await decoding.write(random_.randbytes(random_.randrange(1, 60)))
            if i % 5 == 0:
                decoding.cancel()
                continue
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await decoding.done_writing()
            error = await ending(decoding)
            assert error is None or isinstance(error, OutriderError)
            # A refusal may overtake the client's own first batch, which gRPC then calls an internal error.
            assert not isinstance(error, Internal) or error.message.startswith("Internal error from Core")
        await call.until(lambda: status(call).streams == 0 and one.running == 0)
        assert (await call("Status", None)).relay.refused > 50
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_random_bytes_at_every_control_method_get_a_status_and_break_nothing(
    coordinating: Coordinating, caplog: pytest.LogCaptureFixture
) -> None:
    random_ = random.Random(11)
    methods = ["OpenLease", "ListDrafters", "FetchFile", "ReportSession", "WatchDrafters", "Status", "Drain", "Nothing"]
    async with relaying(coordinating) as (call, _):
        seen = set()
        for i in range(300):
            data = random_.randbytes(random_.randrange(80))
            method = methods[i % len(methods)]
            calling = call.channel.unary_stream(f"/{codec.CONTROL_SERVICE}/{method}")(data, timeout=0.5)
            with suppress(grpc.aio.AioRpcError):
                await calling.read()
            calling.cancel()
            seen.add(await calling.code())
        assert not seen & {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}
        assert {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED} < seen
        assert (await call("OpenLease", LeaseRequest(model="tiny", session="s1"))).verifier == "a"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


# --- latency ---


async def test_the_relays_own_time_and_what_it_adds_to_a_round_trip_are_measured(
    coordinating: Coordinating, record_property: Any
) -> None:
    async def round_trips_s(decoding: Any, n: int) -> list[float]:
        times = []
        for _ in range(n):
            began = time.perf_counter()
            await decoding.write(b"x" * 40)
            await decoding.read()
            times.append(time.perf_counter() - began)
        return times

    async with relaying(coordinating) as (call, one):
        async with grpc.aio.insecure_channel(one.address) as direct:
            calls = direct.stream_stream(codec.DECODE_METHOD)(), stream(call.channel)
            measured: tuple[list[float], list[float]] = ([], [])
            for _ in range(20):  # side by side, so that a busy moment strikes both
                for decoding, times in zip(calls, measured, strict=True):
                    times += await round_trips_s(decoding, 10)
            for decoding in calls:
                decoding.cancel()
        directly_ms, relayed_ms = (1000 * statistics.median(times[10:]) for times in measured)
        record_property("direct_ms", directly_ms)
        record_property("relayed_ms", relayed_ms)
        print(f"round trip: direct {directly_ms:.2f} ms, relayed {relayed_ms:.2f} ms, in one process")
        relay = (await call("Status", None)).relay
        assert 0 < relay.forward_p50_s <= relay.forward_p99_s
        assert relay.uplink_bytes == relay.downlink_bytes == 200 * 40


def test_quantiles_are_bounds_of_what_was_counted() -> None:
    counted = RelayMetrics(CollectorRegistry())
    assert (counted.status().forward_p50_s, counted.status().forward_p99_s) == (0.0, 0.0)
    for _ in range(98):
        counted.passed_on("up", 10, 60e-6)
    counted.passed_on("down", 10, 0.004)
    counted.passed_on("down", 10, 100.0)
    status = counted.status()
    assert status.forward_p50_s == 75e-6
    assert status.forward_p99_s == 0.005
    assert (status.uplink_bytes, status.downlink_bytes) == (980, 20)
