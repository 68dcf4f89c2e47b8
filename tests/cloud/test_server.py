"""A live verifier on loopback, spoken to in raw frames: what is wrong is refused by name, and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import math
import random
import socket
import threading
import time
from dataclasses import replace
from functools import partial, wraps

import grpc
import pytest
from decoded_by_hand import decode_by_hand
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.cloud.serving import decode_streams
from outrider.cloud.serving.heartbeat import HealthJudge, HealthRules
from outrider.cloud.serving.stream_outbox import StreamOutbox
from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.testing import VOCAB, save_tiny_target
from outrider.cloud.verifier_config import VerifierConfig
from outrider.proto import codec
from outrider.proto.channel import LEASE_METADATA
from outrider.proto.errors import (
    ConfigError,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    LeaseExpired,
    NotFound,
    OutriderError,
    PromptTooLong,
    ResourceExhausted,
    TokenizerMismatch,
    Unauthenticated,
    Unavailable,
    UnknownToken,
    UnsupportedProtocol,
)
from outrider.proto.lease import LeaseClaim, sign_lease
from outrider.proto.plumbing.connections import MAX_WATCHERS
from outrider.proto.release import release
from outrider.proto.rpc_errors import from_rpc_error
from outrider.proto.streams import send_bytes
from outrider.proto.types import (
    PROTOCOL_VERSION,
    Branch,
    Cancel,
    Commit,
    Continue,
    Draft,
    DraftToken,
    FinishReason,
    Goaway,
    Grammar,
    GrammarKind,
    Open,
    Opened,
    Patience,
    Ping,
    Pong,
    Report,
    Sampling,
    token_ids,
)
from outrider.proto.v1 import decoding_pb2 as pb

CONTEXT = 4096
SECRET = b"a secret of the test"
PROMPT = (5,)  # one token, so that the verifier's patience holds from the first step on
START = len(PROMPT)
FOREVER = Patience(math.inf, 1000)
EXPECTED_TOKENS = 20
OLD = PROTOCOL_VERSION - 1
SMALL_WINDOW = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_target(tmp_path_factory.mktemp("tiny"), max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def expected(folder):
    """The text after PROMPT with seed 9 at temperature 1."""
    texts, _ = decode_by_hand(folder, [PROMPT], [9], EXPECTED_TOKENS)
    return tuple(texts[0])


class RawStream:
    """One Decode call in bytes."""

    def __init__(self, channel, lease=b""):
        metadata = ((LEASE_METADATA, lease),) if lease else ()
        self.call = channel.stream_stream(codec.DECODE_METHOD)(metadata=metadata)

    async def send(self, *frames):
        for frame in frames:
            # The call may just have ended; gRPC's own `write` would put an error of its own in place of its status.
            with contextlib.suppress(grpc.aio.InternalError):
                await send_bytes(self.call, frame if isinstance(frame, bytes) else codec.encode_edge_frame(frame))

    async def receive(self):
        """The next frame; None at the end; OutriderError as the status says."""
        try:
            data = await asyncio.wait_for(self.call.read(), 120)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        return None if data is grpc.aio.EOF else codec.decode_cloud_frame(data)

    async def opened(self):
        frame = await self.receive()
        assert isinstance(frame, Opened)
        return frame

    async def rest(self):
        """All tokens until the last commit, and its reason."""
        tokens = ()
        while True:
            frame = await self.receive()
            assert isinstance(frame, Commit), frame
            tokens += token_ids(frame.tokens)
            if frame.finish is not None:
                return tokens, frame.finish

    async def error(self):
        """The error that ends the stream, whatever comes before."""
        try:
            while await self.receive() is not None:
                pass
        except OutriderError as error:
            return error
        return None


class Bench:
    """A running verifier and a channel to it."""

    def __init__(self, server, channel, failures):
        self.server = server
        self.channel = channel
        self.failures = failures

    async def health(self):
        check = health_pb2_grpc.HealthStub(self.channel).Check
        return (await check(health_pb2.HealthCheckRequest())).status

    def metric(self, name, **labels):
        whose = {"model_name": "tiny", "verifier": "verifier", **labels}
        return self.server._engine.metrics.registry.get_sample_value(f"outrider:verifier_{name}", whose)

    def stream(self, lease=b""):
        return RawStream(self.channel, lease)

    def open(self, **changes):
        sampling = Sampling(temperature=1.0, seed=9, max_tokens=EXPECTED_TOKENS, ignore_eos=True)
        defaults = {
            "model": "tiny",
            "tokenizer_sha256": self.server.tokenizer_sha256,
            "prompt": PROMPT,
            "sampling": sampling,
            "session": "s",
        }
        return Open(**(defaults | changes))

    def lease(self, *, session="s", model="tiny", verifier="verifier", seconds=60.0, secret=SECRET, **key):
        return sign_lease(LeaseClaim(verifier, model, session, time.time() + seconds, **key), secret)

    async def refused(self, frame):
        """The error of a stream of its own."""
        stream = self.stream(frame.lease)
        await stream.send(frame)
        return await stream.error()

    async def begin(self, frame, *later):
        """A stream that `frame` has opened."""
        stream = self.stream(frame.lease)
        await stream.send(frame, *later)
        await stream.opened()
        return stream

    async def text(self, **changes):
        return await (await self.begin(self.open(**changes))).rest()

    async def until(self, condition, seconds=60.0):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it never came true"
            await asyncio.sleep(0.01)


def run(folder, scenario, *, secret=b"", options=(), **changes):
    """The result of `scenario(bench)` against a verifier of its own."""

    async def main():
        defaults = {"target": str(folder), "model": "tiny", "dtype": "float32", "kv_tokens": 8192, "threads": 1}
        failures = []
        server = VerifierServer(VerifierConfig(**(defaults | changes)), secret, lambda: failures.append(server))
        address = await server.start()
        try:
            async with grpc.aio.insecure_channel(address, options=list(options)) as channel:
                return await asyncio.wait_for(scenario(Bench(server, channel, failures)), 60)
        finally:
            await server.stop(0.2)

    return asyncio.run(main())


def verifier(**config):
    """Run a test, a coroutine, with the bench of a verifier of its own."""

    def decorate(test):
        @wraps(test)
        def run_test(folder, **fixtures):
            run(folder, partial(test, **fixtures), **config)

        names = ["folder", *list(inspect.signature(test).parameters)[1:]]
        fixtures = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        run_test.__signature__ = inspect.Signature(fixtures)
        return run_test

    return decorate


async def error_beside_a_right_text(bench, expected, *frames, secret=b""):
    """Send frames on one stream (functions of the bench are called); its error, once another session has been right."""
    made = [frame(bench) if callable(frame) else frame for frame in frames]
    stream = bench.stream(next((frame.lease for frame in made if isinstance(frame, Open)), b""))
    with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
        await stream.send(*made)
    error = await stream.error()
    lease = bench.lease(session="other") if secret else b""
    assert await bench.text(session="other", lease=lease) == (expected, FinishReason.LENGTH)
    await bench.until(lambda: bench.server.status().sessions == 0)
    return error


def raw_open(bench, **fields):
    wire = pb.EdgeFrame.FromString(codec.encode_edge_frame(bench.open()))
    for name, value in fields.items():
        if isinstance(value, list):
            del getattr(wire.open, name)[:]
            getattr(wire.open, name).extend(value)
        else:
            setattr(wire.open, name, value)
    return wire.SerializeToString()


def draft(chain, start, tokens, **more):
    return Draft(chain, start, tuple(map(DraftToken, tokens)), **more)


def waiting(bench, **changes):
    """An Open that the verifier waits with."""
    return bench.open(patience=FOREVER, **changes)


def wire_draft(**fields):
    return pb.EdgeFrame(draft=pb.Draft(**fields)).SerializeToString()


BAD_INPUT = {
    "empty prompt": (lambda b: raw_open(b, prompt=[]), InvalidArgument, "open.prompt"),
    "prompt too long": (lambda b: b.open(prompt=(5,) * CONTEXT), PromptTooLong, "open.prompt"),
    "unknown prompt token": (lambda b: b.open(prompt=(5, VOCAB)), UnknownToken, "open.prompt"),
    "huge prompt token": (lambda b: raw_open(b, prompt=[1 << 31]), InvalidArgument, "open.prompt"),
    "unknown committed token": (lambda b: b.open(committed=(VOCAB,)), UnknownToken, "open.committed"),
    "other tokenizer": (lambda b: b.open(tokenizer_sha256="0" * 64), TokenizerMismatch, "open.tokenizer_sha256"),
    "no tokenizer": (lambda b: raw_open(b, tokenizer_sha256=""), InvalidArgument, "open.tokenizer_sha256"),
    "unknown model": (lambda b: b.open(model="another"), NotFound, "open.model"),
    "other protocol": (lambda b: b.open(protocol_version=OLD), UnsupportedProtocol, "open.protocol_version"),
    "malformed bytes": (b"\xff\xff\xff", InvalidArgument, "frame"),
    "empty frame": (b"", InvalidArgument, "frame.body"),
    "draft first": (draft(0, START, (5,)), InvalidArgument, "frame.open"),
    "cancel first": (Cancel(), InvalidArgument, "frame.open"),
    "session name": (lambda b: raw_open(b, session="a b"), InvalidArgument, "open.session"),
}
BAD_LATER = {
    "malformed bytes": (b"\xff\xff\xff", InvalidArgument, "frame"),
    "open twice": (waiting, InvalidArgument, "frame.open"),
    "draft inside the prompt": (draft(0, START - 1, (5,)), InvalidArgument, "draft.start"),
    "draft of an unknown token": (draft(0, START, (VOCAB,)), UnknownToken, "draft.tokens"),
    "draft beyond the context": (draft(0, CONTEXT + 64, (5,)), InvalidArgument, "draft.start"),
    "unknown chain": (wire_draft(chain=1 << 31, start=START, tokens=[5]), InvalidArgument, "draft.chain"),
    "flood in one frame": (draft(0, START, (5,) * 65), ResourceExhausted, "draft.tokens"),
    "bad report": (
        pb.EdgeFrame(report=pb.Report(acceptance=1.5)).SerializeToString(), InvalidArgument, "report.acceptance",
    ),
}  # fmt: skip


@verifier()
async def test_bad_input_ends_its_own_stream_with_the_status_and_field_and_no_other(bench, expected):
    for before, cases in ((), BAD_INPUT), ((waiting,), BAD_LATER):
        for name, (frame, kind, field) in cases.items():
            error = await error_beside_a_right_text(bench, expected, *before, frame)
            assert (type(error), error.field) == (kind, field), name


BAD_LEASES = {
    "none": (lambda b: b"", Unauthenticated),
    "garbage": (lambda b: b"garbage", Unauthenticated),
    "another secret": (lambda b: b.lease(secret=b"another secret of the test"), Unauthenticated),
    "another verifier": (lambda b: b.lease(verifier="another"), Unauthenticated),
    "another model": (lambda b: b.lease(model="another"), Unauthenticated),
    "another session": (lambda b: b.lease(session="another"), Unauthenticated),
    "expired": (lambda b: b.lease(seconds=-60), LeaseExpired),
}


@verifier(secret=SECRET)
async def test_a_lease_that_is_not_for_this_stream_is_refused(bench, expected):
    for name, (lease, kind) in BAD_LEASES.items():
        frame = bench.open(lease=lease(bench))
        error = await error_beside_a_right_text(bench, expected, frame, secret=SECRET)
        assert (type(error), error.field) == (kind, "open.lease"), name


@verifier()
async def test_a_text_equals_the_rule_computed_by_transformers_alone(bench, expected):
    assert await bench.text() == (expected, FinishReason.LENGTH)
    assert await bench.text(drafting=False) == (expected, FinishReason.LENGTH)
    assert await bench.text(committed=expected[:7]) == (expected[7:], FinishReason.LENGTH)


@verifier()
async def test_right_drafts_are_accepted_and_wrong_ones_are_not(bench, expected):
    chain = draft(0, START, (*expected[:5], (expected[5] + 1) % VOCAB), complete=True)
    stream = await bench.begin(waiting(bench), chain)
    commit = await stream.receive()
    assert (token_ids(commit.tokens), commit.accepted, commit.verified) == (expected[:6], 5, 6)
    assert all(token.logp is not None for token in commit.tokens)
    await stream.send(Draft(1, START + 6, tuple(map(DraftToken, expected[6:9], (0.5, 0.5, 0.5))), complete=True))
    commit = await stream.receive()
    assert (token_ids(commit.tokens), commit.accepted, commit.chain) == (expected[6:10], 3, 1)
    assert 0 < commit.reward <= 1
    assert commit.timing.echo == 2
    assert commit.timing.hold_s > 0
    await stream.send(Report(False))
    assert await stream.rest() == (expected[10:], FinishReason.LENGTH)
    assert await stream.receive() is None


@verifier(kv_tokens=32, page_size=16)
async def test_drafts_up_to_the_end_of_the_context_stay_inside_the_reserved_pages(bench):
    sampling = Sampling(max_tokens=1000, ignore_eos=True)
    plain, _ = await bench.text(sampling=sampling)
    assert len(plain) == 31, "the cache holds as much as the context"
    frame = bench.open(sampling=sampling, patience=Patience(5.0, 1))
    stream = await bench.begin(frame, draft(0, START, (*plain, 5, 5)))
    assert await stream.rest() == (plain, FinishReason.LENGTH)


@verifier(max_sessions=2)
async def test_one_session_too_many_is_refused_with_a_time_to_retry(bench, expected):
    streams = [await bench.begin(waiting(bench, session=f"s{i}")) for i in range(2)]
    error = await bench.refused(bench.open())
    assert type(error) is ResourceExhausted
    assert error.retry_after_s > 0
    streams[0].call.cancel()
    await bench.until(lambda: bench.server.status().sessions == 1)
    assert await bench.text() == (expected, FinishReason.LENGTH)


@verifier()
async def test_a_client_that_sends_no_more_is_not_waited_for(bench, expected):
    stream = bench.stream()
    await stream.send(waiting(bench))
    await stream.call.done_writing()
    assert (await stream.opened()).release == bench.server.status().release == release()
    assert await stream.rest() == (expected, FinishReason.LENGTH)


def test_draining_sends_goaway_and_admits_nobody_and_the_text_goes_on_elsewhere(folder, expected):
    async def scenario(bench):
        stream = await bench.begin(waiting(bench), draft(0, START, expected[:3], complete=True))
        tokens = token_ids((await stream.receive()).tokens)
        draining = asyncio.create_task(bench.server.drain())
        assert isinstance(await stream.receive(), Goaway)
        assert await stream.receive() is None
        assert await draining == 1
        assert bench.server.status().state == "draining"
        error = await bench.refused(bench.open())
        assert type(error) is Unavailable
        assert error.retry_after_s > 0
        return tokens

    tokens = run(folder, scenario)
    assert tokens == expected[: len(tokens)]

    async def elsewhere(bench):
        return await bench.text(committed=tokens)

    assert run(folder, elsewhere) == (expected[len(tokens) :], FinishReason.LENGTH)


@verifier()
async def test_stopping_tells_running_sessions_that_they_may_resume(bench):
    stream = await bench.begin(waiting(bench))
    stopping = asyncio.create_task(bench.server.stop(0.0))
    assert isinstance(await stream.error(), Unavailable)
    await stopping


@verifier(secret=SECRET)
async def test_a_key_has_no_more_texts_than_it_may_and_its_slot_lasts_as_long_as_a_text(bench, expected):
    def opening(session, key="alice", **changes):
        lease = bench.lease(session=session, key=key, max_sessions=1)
        return bench.open(session=session, lease=lease, **changes)

    await bench.begin(opening("first", patience=FOREVER))
    refused = await bench.refused(opening("second"))
    assert isinstance(refused, ResourceExhausted)
    assert (refused.field, refused.retry_after_s > 0) == ("api_key", True)
    others = await bench.begin(opening("other", key="bob"))
    assert await others.rest() == (expected, FinishReason.LENGTH)
    back = await bench.begin(opening("first", patience=FOREVER))  # in another stream
    back.call.cancel()
    await bench.until(lambda: bench.server.status().sessions == 0)
    kept = await bench.begin(opening("kept", keep_s=60.0))
    assert await kept.rest() == (expected, FinishReason.LENGTH)
    await bench.begin(opening("second", patience=FOREVER))
    await kept.send(Continue(START, ()))
    refused = await kept.error()
    assert (type(refused), refused.field) == (ResourceExhausted, "api_key")


async def check_that_some_are_refused_for_a_while(streams):
    for stream in streams:
        if stream.call.done():
            refused = await stream.error()
            assert isinstance(refused, ResourceExhausted)
            assert refused.retry_after_s > 0


@verifier(secret=SECRET, max_sessions=2)
async def test_half_open_streams_are_few_of_a_lease_and_keep_neither_texts_nor_health_out(bench, expected):
    lease = bench.lease(session="idle")
    idle = [bench.stream(lease) for _ in range(40)]
    for stream in idle:
        await stream.call.wait_for_connection()
    await bench.until(lambda: len(bench.server._streams._half_open) == 2)
    assert await bench.health() == health_pb2.HealthCheckResponse.SERVING
    assert await bench.text(session="s", lease=bench.lease()) == (expected, FinishReason.LENGTH)
    await bench.until(lambda: sum(stream.call.done() for stream in idle) == 38)
    await check_that_some_are_refused_for_a_while(idle)
    assert bench.metric("refused_half_open_total") == 38
    for stream in idle:
        stream.call.cancel()
    await bench.until(lambda: not len(bench.server._streams._half_open))


@verifier(max_sessions=2)
async def test_an_address_has_no_more_half_open_streams_than_sessions_come_back_at_once(bench, expected):
    idle = [bench.stream() for _ in range(60)]
    for stream in idle:
        await stream.call.wait_for_connection()
    await bench.until(lambda: len(bench.server._streams._half_open) == 2 * 2 + 16)
    assert await bench.health() == health_pb2.HealthCheckResponse.SERVING
    for stream in idle:
        stream.call.cancel()
    await bench.until(lambda: not len(bench.server._streams._half_open))
    assert await bench.text() == (expected, FinishReason.LENGTH)


class EndlessGrammars:
    """Compiles no grammar, and serves texts without one."""

    async def matcher(self, grammar, *_, **__):
        if grammar is not None:
            await asyncio.Event().wait()

    def close(self):
        pass


@pytest.mark.parametrize("sessions", ["one", "many"])
@verifier(secret=SECRET, max_sessions=8)
async def test_streams_that_wait_for_a_grammar_are_as_few_as_the_sessions_of_their_key(bench, sessions, expected):
    bench.server._streams._grammars.close()
    bench.server._streams._grammars = EndlessGrammars()
    sampling = Sampling(grammar=Grammar(GrammarKind.JSON_OBJECT))
    streams = []
    for i in range(8):
        session = "s" if sessions == "one" else f"s{i}"
        lease = bench.lease(session=session, key="mallory", max_sessions=2)
        streams.append(bench.stream(lease))
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            await streams[-1].send(bench.open(session=session, lease=lease, sampling=sampling))
    await bench.until(lambda: sum(stream.call.done() for stream in streams) == 6)
    assert len(bench.server._streams._half_open) == 2
    await check_that_some_are_refused_for_a_while(streams)
    lease = bench.lease(session="other", key="alice")
    assert await bench.text(session="other", lease=lease) == (expected, FinishReason.LENGTH)


@verifier()
async def test_no_stream_that_has_ended_waits_for_the_garbage_collector(bench, expected):
    """Streams that do hold frames and commits of long texts until it comes."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            assert await bench.text() == (expected, FinishReason.LENGTH)
        await bench.until(lambda: not any(type(each) is StreamOutbox for each in gc.get_objects()))
    finally:
        gc.enable()


@verifier(secret=SECRET)
async def test_a_stream_that_is_refused_costs_no_task_and_few_lines_of_the_log(bench, monkeypatch, caplog):
    def never(*_):
        raise AssertionError("something is made for it")

    monkeypatch.setattr(decode_streams, "StreamOutbox", never)
    began = time.monotonic()
    for _ in range(40):
        assert isinstance(await bench.stream().error(), Unauthenticated)
    assert not len(bench.server._streams._half_open), "it takes no slot"
    lines = [record for record in caplog.records if "refused" in record.message]
    assert 1 <= len(lines) <= 2 + time.monotonic() - began
    assert len(lines) < 40
    assert bench.metric("refused_sessions_total", error="Unauthenticated") == 40


@verifier()
async def test_an_open_that_is_lost_on_its_way_is_worth_another_try(bench, monkeypatch):
    monkeypatch.setattr(decode_streams, "OPEN_WITHIN_S", 0.1)
    error = await bench.stream().error()
    assert isinstance(error, Unavailable), "not the fault of the request"
    assert error.field == "frame.open"


@verifier()
async def test_watchers_of_health_are_few_and_checks_are_always_answered(bench):
    watch = health_pb2_grpc.HealthStub(bench.channel).Watch
    watchers = [watch(health_pb2.HealthCheckRequest()) for _ in range(MAX_WATCHERS)]
    for watcher in watchers:
        assert (await watcher.read()).status == health_pb2.HealthCheckResponse.SERVING
    one_more = watch(health_pb2.HealthCheckRequest())
    assert await one_more.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await bench.health() == health_pb2.HealthCheckResponse.SERVING
    for watcher in watchers:
        watcher.cancel()


@verifier(stall_s=0.4, options=SMALL_WINDOW)
async def test_a_client_that_does_not_read_is_dropped_and_others_go_on(bench, expected):
    lazy = bench.stream()
    await lazy.send(bench.open(sampling=Sampling(max_tokens=4000, ignore_eos=True), session="lazy"))
    await bench.until(lambda: bench.server.status().sessions == 1)
    assert await bench.text() == (expected, FinishReason.LENGTH)
    await bench.until(lambda: bench.server.status().sessions == 0, 30)
    assert await bench.text() == (expected, FinishReason.LENGTH)
    error = await lazy.error()
    assert isinstance(error, Unavailable), "a client that comes back may resume"


def test_a_client_that_goes_while_a_commit_waits_for_room_leaves_no_traceback(folder, expected, caplog):
    async def scenario(bench):
        stream = bench.stream()
        await stream.send(bench.open(sampling=Sampling(max_tokens=2000, ignore_eos=True), session="unread"))
        await bench.until(lambda: bench.server.status().sessions == 1)
        pauses = 0
        while pauses < 5:  # the verifier waits until some of its commits are read
            await asyncio.sleep(0.1)
            pauses = 0 if bench.server.take_step_timings() else pauses + 1
        stream.call.cancel()
        time.sleep(0.05)  # noqa: ASYNC251 - gRPC hears of the failed write and of the client's end meanwhile
        assert await bench.text() == (expected, FinishReason.LENGTH)

    run(folder, scenario, options=SMALL_WINDOW)
    assert [record for record in caplog.records if record.exc_info] == []


@verifier()
async def test_a_flood_of_chains_neither_grows_nor_stops_anything(bench, expected):
    stream = await bench.begin(waiting(bench))
    reading = asyncio.create_task(stream.rest())
    await stream.send(*(draft(chain, START, (5, 5, 5)) for chain in range(1500)))
    assert await bench.text(session="other") == (expected, FinishReason.LENGTH)
    await stream.send(Report(False))
    assert await reading == (expected, FinishReason.LENGTH)


@verifier()
async def test_random_drafts_and_branches_never_change_the_text_of_their_own_session(bench, expected):
    """Whatever its chains say, and whether they contradict themselves."""
    rng = random.Random(21)

    def nearly(tokens):
        return tuple(token if rng.random() < 0.8 else rng.randrange(VOCAB) for token in tokens)

    for number in range(40):
        drafts = []
        for _ in range(rng.randrange(1, 12)):
            at = rng.randrange(17)
            ahead = expected[at : at + rng.randrange(1, 9)]
            beside = tuple(
                Branch(START + at + i, nearly(ahead[i : i + rng.randrange(1, 4)]))
                for i in range(len(ahead))
                if rng.random() < 0.4
            )
            drafts.append(draft(rng.randrange(3), START + at, nearly(ahead), branches=beside))
        stream, trees = bench.stream(), rng.random() < 0.8
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):  # the text may end before all are written
            await stream.send(bench.open(patience=Patience(0.002, 4), trees=trees, session=f"s{number}"), *drafts)
        await stream.opened()
        assert await stream.rest() == (expected, FinishReason.LENGTH)


@verifier()
async def test_a_defect_in_reading_a_stream_ends_that_stream_alone(bench, expected, monkeypatch, caplog):
    right = codec.decode_edge_frame

    def defective(data, *bounds):
        if b"defective" in data:
            raise KeyError("a defect")
        return right(data, *bounds)

    monkeypatch.setattr(codec, "decode_edge_frame", defective)
    for frames in ([bench.open(session="defective")], [waiting(bench), Cancel("defective")]):
        assert isinstance(await error_beside_a_right_text(bench, expected, *frames), Internal)
    assert sum("a stream cannot be read" in record.message for record in caplog.records) == 2


@pytest.mark.parametrize("ended", [True, False])
@verifier()
async def test_a_draft_that_no_edge_sends_ends_its_stream_though_it_is_passed_over(bench, ended, expected):
    """It is of an earlier turn, or comes after the text's end."""
    huge = pb.EdgeFrame(draft=pb.Draft(chain=0, start=START, tokens=[5] * 100_000)).SerializeToString()
    stream = await bench.begin(bench.open(keep_s=60.0))
    await stream.rest()
    if not ended:
        await stream.send(Continue(START, (), chain=1, sampling=Sampling(max_tokens=3000, ignore_eos=True)))
        await stream.receive()
    await stream.send(huge)
    error = await stream.error()
    assert (type(error), error.field) == (InvalidArgument, "frame.draft")
    assert await bench.text(session="other") == (expected, FinishReason.LENGTH)


@pytest.mark.parametrize("state", ["waiting for its text", "with its text ended", "with its next text begun"])
@pytest.mark.parametrize("first", [b"", codec.encode_edge_frame(Cancel())])
@verifier()
async def test_a_second_open_ends_its_stream_at_once_and_is_not_decoded(bench, state, first, expected, monkeypatch):
    decoded = []
    decode = codec.decode_edge_frame
    monkeypatch.setattr(codec, "decode_edge_frame", lambda data, *limits: decoded.append(data) or decode(data, *limits))
    opening = waiting(bench) if state == "waiting for its text" else bench.open(keep_s=60.0)
    stream = await bench.begin(opening)
    if opening.keep_s:
        await stream.rest()
    if state == "with its next text begun":
        await stream.send(Continue(START, (), chain=1, sampling=Sampling(max_tokens=3000, ignore_eos=True)))
        assert isinstance(await stream.receive(), Commit), "a kept session goes on"
    second = first + codec.encode_edge_frame(bench.open())
    await stream.send(second)
    error = await stream.error()
    assert (type(error), error.field) == (InvalidArgument, "frame.open")
    assert (second in decoded) == bool(first), "one behind another kind of frame shows only then"
    assert await bench.text(session="other") == (expected, FinishReason.LENGTH)


def test_other_texts_go_on_while_a_large_frame_is_decoded(folder, expected, monkeypatch):
    begun, ended = threading.Event(), threading.Event()
    decode = codec.decode_edge_frame
    held = []

    def slowly(data, *limits):
        if len(data) > codec.SMALL_FRAME_BYTES:
            begun.set()
            held.append(ended.wait(20))
        return decode(data, *limits)

    async def scenario(bench):
        large = bench.stream()
        padding = bytes(100_000)  # in a field that is not known
        await large.send(codec.encode_edge_frame(bench.open()) + b"\xa2\x06\xa0\x8d\x06" + padding)
        await asyncio.to_thread(begun.wait, 60)
        assert await bench.text(session="other") == (expected, FinishReason.LENGTH)
        ended.set()
        await large.opened()
        assert await large.rest() == (expected, FinishReason.LENGTH)
        assert held == [True], "it held the other text up"

    monkeypatch.setattr(codec, "decode_edge_frame", slowly)
    run(folder, scenario)


def fail(batch):
    raise RuntimeError("no memory")


@verifier()
async def test_a_target_that_always_fails_makes_the_verifier_say_that_it_is_down(bench):
    assert await bench.health() == health_pb2.HealthCheckResponse.SERVING
    stream = await bench.begin(waiting(bench))
    bench.server._engine.backend.target.forward = fail
    await stream.send(Report(False))
    assert isinstance(await stream.error(), Unavailable)
    await bench.until(lambda: bench.failures == [bench.server])
    assert await bench.health() == health_pb2.HealthCheckResponse.NOT_SERVING
    status = bench.server.status()
    assert (status.state, status.sessions) == ("down", 0)
    assert isinstance(await bench.refused(waiting(bench)), Unavailable)


def test_a_verifier_beyond_loopback_needs_a_secret(folder):
    with pytest.raises(ConfigError) as caught:
        VerifierServer(VerifierConfig(target=str(folder), listen="0.0.0.0:0", insecure_listen=True))
    assert caught.value.field == "lease_secret"


def test_a_machine_whose_name_has_no_address_is_named_before_weights_are_read(tmp_path, monkeypatch):
    def unknown(name):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "gethostname", lambda: "nowhere")
    monkeypatch.setattr(socket, "gethostbyname", unknown)
    everywhere = VerifierConfig(target=str(tmp_path), listen="0.0.0.0:0", insecure_listen=True)
    with pytest.raises(ConfigError, match="nowhere") as caught:
        VerifierServer(everywhere, b"a secret")
    assert caught.value.field == "advertise"
    with pytest.raises(OutriderError) as caught:  # the folder is empty
        VerifierServer(replace(everywhere, advertise="10.0.0.1"), b"a secret")
    assert caught.value.field == "target"


def test_a_taken_port_is_a_config_error(folder):
    async def scenario(bench):
        address = bench.server.status().address
        other = VerifierServer(VerifierConfig(target=str(folder), listen=address))
        with pytest.raises(ConfigError) as caught:
            await other.start()
        assert caught.value.field == "listen"

    run(folder, scenario)


# === silent streams and late ones ===============================================================================


@verifier()
async def test_a_ping_is_answered_at_once_with_the_epoch_of_the_open_while_the_text_waits(bench):
    stream = bench.stream()
    await stream.send(waiting(bench, epoch=4))
    assert (await stream.opened()).epoch == 4
    for number in (1, 2):
        await stream.send(Ping(number))
        assert await stream.receive() == Pong(number, 4), "its patience is infinite and no draft ever came"


@contextlib.contextmanager
def standing_still(server):
    """Hold the engine's thread."""
    stuck, released = threading.Event(), threading.Event()
    server._engine.inbox.post(lambda: (stuck.set(), released.wait(100)))
    assert stuck.wait(60)
    try:
        yield
    finally:
        released.set()


@verifier()
async def test_a_ping_is_answered_while_a_step_runs_and_a_grammar_is_compiled(bench):
    bench.server._streams._grammars.close()
    bench.server._streams._grammars = EndlessGrammars()
    with standing_still(bench.server):
        stream, sampling = bench.stream(), Sampling(max_tokens=2, grammar=Grammar(GrammarKind.JSON_OBJECT))
        await stream.send(bench.open(sampling=sampling), Ping(7))
        assert await stream.receive() == Pong(7)


@verifier()
async def test_answers_to_pings_do_not_pile_up_before_a_client_that_reads_none(bench):
    outbox = StreamOutbox(asyncio.get_running_loop())
    for number in range(10_000):
        outbox.answer(Ping(number))
    assert outbox.unread() <= 65


@verifier()
async def test_a_late_open_of_an_older_stream_does_not_take_the_session_from_a_newer_one(bench, expected):
    newer = await bench.begin(waiting(bench, epoch=1))
    error = await bench.refused(bench.open(epoch=0))
    assert isinstance(error, FailedPrecondition)
    assert error.field == "open.epoch"
    await newer.send(Draft(0, START, (), complete=True))
    assert token_ids((await newer.receive()).tokens) == expected[:1], "it goes on"
    following = await bench.begin(bench.open(epoch=2))
    assert isinstance(await newer.error(), Unavailable), "a later stream takes it"
    assert await following.rest() == (expected, FinishReason.LENGTH)


@verifier(secret=SECRET)
async def test_the_session_of_another_key_is_not_taken_over_by_whoever_knows_its_name(bench, expected):
    victim = await bench.begin(waiting(bench, lease=bench.lease(key="alice")))
    epoch = 1 << 31
    thief = await bench.begin(bench.open(lease=bench.lease(key="mallory", epoch=epoch), epoch=epoch))
    assert await thief.rest() == (expected, FinishReason.LENGTH), "a text of its own"
    await victim.send(Draft(0, START, (), complete=True))
    assert token_ids((await victim.receive()).tokens) == expected[:1], "it goes on"
    again = await bench.begin(bench.open(lease=bench.lease(key="alice", epoch=1), epoch=1))
    assert await again.rest() == (expected, FinishReason.LENGTH), "its own edge may take it"


@verifier(secret=SECRET)
async def test_a_coordinator_tells_the_text_of_a_key_from_another_of_that_name(bench, expected):
    streams = {}
    for key, epoch in (("alice", 0), ("mallory", 7)):
        lease = bench.lease(key=key, epoch=epoch)
        streams[key] = await bench.begin(waiting(bench, lease=lease, epoch=epoch))
    report = bench.server.report()
    assert report["admitted"] == {"alice/s": 0, "mallory/s": 7}
    bench.server.send_away(frozenset({"mallory/s", "bob/s"}))
    assert isinstance(await streams["mallory"].error(), Unavailable)
    await streams["alice"].send(Draft(0, START, (), complete=True))
    assert token_ids((await streams["alice"].receive()).tokens) == expected[:1], "it goes on"
    bench.server.send_away(frozenset({"s"}))  # as a coordinator of an older release says
    assert isinstance(await streams["alice"].error(), Unavailable)


# === an engine that stands still ================================================================================


def hasty(server, **rules):
    """Let the verifier judge its engine by short bounds."""
    rules = HealthRules(**{"hung_s": 2.0, **rules})
    server._health._judge = HealthJudge(server._engine.heart, rules, 0.5, time.monotonic())


@verifier()
async def test_a_hung_engine_sends_its_sessions_away_and_disturbs_none_when_it_wakes(bench, expected):
    server = bench.server
    hasty(server)
    stream = await bench.begin(waiting(bench))
    with standing_still(server):
        error = await asyncio.wait_for(stream.error(), 50)
        assert isinstance(error, Unavailable), "it can be resumed elsewhere"
        assert "stands still" in error.message
        await bench.until(lambda: server.status().state == "sick", 50)
        assert await bench.health() == health_pb2.HealthCheckResponse.NOT_SERVING
        assert isinstance(await bench.refused(bench.open(session="other")), Unavailable)
        assert bench.failures == []
    await bench.until(lambda: server.status().state == "ready", 50)
    assert await bench.health() == health_pb2.HealthCheckResponse.SERVING
    await bench.until(lambda: server.status().sessions == 0, 50)
    assert bench.metric("fenced_sessions_total") == 1
    assert await bench.text() == (expected, FinishReason.LENGTH)


@verifier()
async def test_an_engine_that_has_hung_for_good_ends_the_process(bench):
    hasty(bench.server, hung_s=1.0, lost_s=0.5)
    with standing_still(bench.server):
        await bench.until(lambda: bench.failures, 50)
        await asyncio.sleep(0.6)
        assert bench.failures == [bench.server], "once"
        assert await bench.health() == health_pb2.HealthCheckResponse.NOT_SERVING


# === an event loop that stands still ============================================================================


@verifier()
async def test_a_call_that_blocks_the_event_loop_is_shown_and_ends_the_process(bench, caplog):
    server = bench.server
    server._health._loop._hung_s = server._health._loop._lost_s = 1.0

    def block_in_a_handler():
        end = time.monotonic() + 50
        while not (bench.failures and bench.metric("sick")) and time.monotonic() < end:
            time.sleep(0.01)

    block_in_a_handler()
    assert (bench.failures, bench.metric("sick")) == ([server], 1.0)
    [line] = [record.getMessage() for record in caplog.records if "stands still, in" in record.getMessage()]
    assert "block_in_a_handler" in line
