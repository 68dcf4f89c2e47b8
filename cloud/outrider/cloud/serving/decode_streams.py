"""The decoding streams of a verifier: frames become the engine's events, and its frames become streams.

A stream without a valid lease, or beyond its limits, is refused before anything is made for it. Until its session is
admitted, a stream counts against the limits of its lease, its API key and its address.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, aclosing
from typing import Any

import grpc

from outrider.cloud.grammar.grammar import Grammars
from outrider.cloud.serving.engine import EngineCore
from outrider.cloud.serving.engine_health import VerifierHealth
from outrider.cloud.serving.metering import meter_of
from outrider.cloud.serving.quiet_cells import frames_of_cells, quiet_cells
from outrider.cloud.serving.sessions import opened_twice
from outrider.cloud.serving.slots import Owner
from outrider.cloud.serving.stream_outbox import LeaseEnds, StreamOutbox
from outrider.cloud.serving.verifier_tracing import VerifierTracing
from outrider.cloud.verifier_config import VerifierConfig
from outrider.proto import codec
from outrider.proto.errors import Internal, InvalidArgument, NotFound, OutriderError, Unavailable
from outrider.proto.lease import LeaseClaim, verify_lease
from outrider.proto.plumbing.access import Meters
from outrider.proto.plumbing.connections import OPEN_WITHIN_S, HalfOpenStreams, lease_in, network_of_peer
from outrider.proto.plumbing.logs import LineLimit, about
from outrider.proto.rpc_errors import to_status
from outrider.proto.session.verifier import VerifierRules
from outrider.proto.streams import write_answers
from outrider.proto.types import Commit, Continue, EdgeFrame, Goaway, Open, Opened, Ping

SPARE_STREAMS = 16  # not admitted yet, beside two for each session
MAX_UNTAKEN = 256
OPEN_TAG = b"\x0a"  # first byte of an Open: field 1 of EdgeFrame, which has a length

log = logging.getLogger(__name__)


class DecodeStreams:
    """The gRPC streams of one verifier: each becomes a session of the engine. Runs in one event loop.

    Attributes:
        lease_ends: timer that sends sessions away when their leases end.
    """

    def __init__(
        self,
        config: VerifierConfig,
        rules: VerifierRules,
        secret: bytes,
        incarnation: str,
        engine: EngineCore,
        health: VerifierHealth,
    ) -> None:
        """Serve `engine`; `secret` signs leases (empty: none is asked for), which name this process by `incarnation`.

        Raises:
            ConfigError: spans are wanted, and OpenTelemetry is not installed.
        """
        self._config = config
        self._rules = rules
        self._secret = secret
        self._incarnation = incarnation
        self._engine = engine
        self._metrics = engine.metrics
        target = engine.backend.facts
        self._grammars = Grammars(
            target.tokenizer_json, target.vocab_size, target.eos_tokens, self._metrics.killed_grammars.inc
        )
        self._health = health
        self.lease_ends = LeaseEnds()
        self._tracing = VerifierTracing.to(config.trace_endpoint, config.name) if config.trace_endpoint else None
        self._max_tokens = max(rules.context_length, rules.vocab_size)
        self._half_open = HalfOpenStreams(2 * config.max_sessions + SPARE_STREAMS, self._metrics.refused_half_open.inc)
        self._stalled = set[asyncio.Task[None]]()  # ends of streams whose clients read nothing
        self._keys = itertools.count()
        self._meters = Meters()
        self._refusals = LineLimit()
        self._decoding = ThreadPoolExecutor(1, "outrider-large-frames")

    def service(self) -> grpc.GenericRpcHandler:
        """Return the Decoding service, which takes and returns bytes, since the codec checks them."""
        handler = grpc.stream_stream_rpc_method_handler(write_answers(self._messages))
        return grpc.method_handlers_generic_handler(codec.DECODING_SERVICE, {"Decode": handler})

    def close(self) -> None:
        self._decoding.shutdown(wait=False, cancel_futures=True)
        self._grammars.close()

    def export_spans(self) -> None:
        """Export pending spans; this blocks for some seconds where the collector does not answer."""
        if self._tracing is not None:
            self._tracing.close()

    # --- one stream ---

    async def _messages(self, requests: AsyncIterator[bytes], context: Any) -> AsyncGenerator[bytes, None]:
        """Yield what one stream carries: its frames as they come, or cells where its Open asks for them."""
        made = list[StreamOutbox]()  # nothing is made for a stream that is refused
        try:
            async with aclosing(self._answers(requests, context, made)) as frames:
                async for frame in frames:
                    if (quiet := made[0].quiet) is not None:
                        break
                    yield frame
                else:
                    return
                async with aclosing(quiet_cells(frame, frames, quiet, self._config)) as cells:
                    async for cell in cells:
                        yield cell
        finally:
            for outbox in made:
                if outbox.reader is not None:
                    outbox.reader.cancel()
                    outbox.reader = None  # whose frame has the outbox: no stream is left to the garbage collector

    async def _answers(
        self, requests: AsyncIterator[bytes], context: Any, made: list[StreamOutbox]
    ) -> AsyncGenerator[bytes, None]:
        with ExitStack() as slot:
            try:
                slot.enter_context(self._held_slot(context))
            except OutriderError as error:
                await self._refuse(error, context, "")
            key = next(self._keys)
            trace = self._tracing.parent(context.invocation_metadata()) if self._tracing is not None else None
            outbox = StreamOutbox(asyncio.get_running_loop())
            made.append(outbox)
            self._health.outboxes.add(outbox)
            outbox.reader = asyncio.create_task(self._read(key, requests, outbox, context))
            stream = asyncio.current_task()
            assert stream is not None  # noqa: S101 - a coroutine runs in a task
            stall = asyncio.create_task(self._end_if_unread(outbox, stream, context))
            try:
                while True:
                    item = await outbox.get()
                    if isinstance(item, OutriderError):
                        raise item
                    if isinstance(item, Opened):
                        slot.close()
                    yield codec.encode_cloud_frame(item)
                    outbox.sent()
                    if isinstance(item, Commit):
                        if self._tracing is not None and trace is not None:
                            self._tracing.commit(trace, outbox.stream.session, item)
                        if outbox.meter is not None:
                            goaway = outbox.meter.charge(item, outbox.stream.epoch)
                            if goaway is not None:
                                outbox.put(goaway)
                    elif isinstance(item, Goaway):
                        self._metrics.counts.goaways += 1
                        log.info(
                            "sent elsewhere: %s", item.reason, extra=about(outbox.stream.session, self._rules.name)
                        )
                    if outbox.stream.ends_after(item):
                        return
            except OutriderError as error:
                if outbox.stream.opened:
                    self._metrics.fail(error)
                    whose = about(outbox.stream.session, self._rules.name, error)
                    log.warning("the session is ended: %s", error, extra=whose)
                    await context.abort(*to_status(error))
                if outbox.meter is not None:
                    outbox.meter.give_back()
                await self._refuse(error, context, outbox.stream.session)
            finally:
                stall.cancel()
                for pending in (outbox.end_of_lease, outbox.admitted):
                    if pending is not None:
                        pending.cancel()
                outbox.closed = True
                self._health.outboxes.discard(outbox)
                self._engine.post_close(key)

    async def _end_if_unread(self, outbox: StreamOutbox, stream: asyncio.Task[Any], context: Any) -> None:
        """End a stream whose client has left its frames unread for too long.

        The stream's task is then stuck in a write that flow control holds back. It is cancelled, which frees the
        session now; the status is queued after that write, for a client that reads again and resumes.
        """
        stall_s = self._config.stall_s
        taken, since = outbox.taken, time.monotonic()
        while True:
            await asyncio.sleep(stall_s / 4)
            if outbox.taken != taken or not outbox.unread():
                taken, since = outbox.taken, time.monotonic()
            elif time.monotonic() - since > stall_s:
                break
        error = Unavailable("you left commits unread too long; resume")
        self._metrics.fail(error)
        whose = about(outbox.stream.session, self._rules.name, error)
        log.warning("the client left its commits unread for %g s; its stream is ended", stall_s, extra=whose)
        status, message, metadata = to_status(error)
        ending = asyncio.create_task(context.abort(status, message, metadata))
        self._stalled.add(ending)
        ending.add_done_callback(self._stalled_ended)
        stream.cancel()

    def _stalled_ended(self, ending: asyncio.Task[None]) -> None:
        self._stalled.discard(ending)
        if not ending.cancelled():
            ending.exception()  # abort always raises

    def _held_slot(self, context: Any) -> AbstractContextManager[None]:
        """Return what holds a stream's slot until its session is admitted.

        Raises:
            Unauthenticated, LeaseExpired, InvalidArgument: its call has no lease that is good here.
            ResourceExhausted: its lease, its key or its address has too many.
        """
        if not self._secret:
            return self._half_open.hold(context.peer())
        claim = lease_in(context.invocation_metadata() or (), self._secret, time.time())
        return self._half_open.hold(context.peer(), claim.session, claim.key, claim.max_sessions)

    async def _refuse(self, error: OutriderError, context: Any, session: str) -> None:
        """End a stream that has not been admitted; whoever opens many fills no log."""
        self._metrics.refuse(error)
        unsaid = self._refusals.next_line()
        if unsaid is not None:
            more = f" (and {unsaid} more since the last such line)" if unsaid else ""
            log.warning("the session is refused: %s%s", error, more, extra=about(session, self._rules.name, error))
        await context.abort(*to_status(error))

    async def _read(self, key: int, requests: AsyncIterator[bytes], outbox: StreamOutbox, context: Any) -> None:
        """Hand the frames of one stream to the engine; wait while too many of them are untaken."""
        loop = asyncio.get_running_loop()
        room = asyncio.Semaphore(MAX_UNTAKEN)
        try:
            opening, claim = await asyncio.wait_for(self._read_open(requests, outbox), OPEN_WITHIN_S)
            owner = (claim.key if claim is not None else "") or network_of_peer(context.peer())
            grammar = opening.sampling.grammar
            admitted = outbox.admitted = asyncio.create_task(self._admit(key, opening, claim, outbox, owner))
            later = requests if opening.quiet is None else frames_of_cells(requests, opening.quiet.up_bytes)
            async for data in later:
                if data[:1] == OPEN_TAG:  # one may be as long as a prompt, and it is refused whatever it says
                    raise opened_twice()
                frame = await self._decoded(data)
                if isinstance(frame, Open):  # behind a frame of another kind in the same message, which it replaces
                    raise opened_twice()
                if isinstance(frame, Ping):
                    outbox.answer(frame)
                    continue
                await admitted
                await room.acquire()
                matcher = None
                if isinstance(frame, Continue):
                    if outbox.meter is not None:
                        outbox.meter.begin_turn(len(frame.prompt))
                    grammar = frame.sampling.grammar if frame.sampling is not None else grammar
                    matcher = await self._grammars.matcher(grammar, owner=owner)
                self._engine.post_frame(key, frame, lambda: _call_in(loop, room.release), matcher)
            await admitted
            outbox.stream.half_close()
            self._engine.post_half_close(key)
        except Exception as error:  # whatever it is, the client has to be told
            _end_reading(error, outbox, self._rules.name)

    async def _admit(self, key: int, opening: Open, claim: LeaseClaim | None, outbox: StreamOutbox, owner: str) -> None:
        """Hand a session to the engine once its grammar is compiled; pings are answered meanwhile."""
        try:
            matcher = await self._grammars.matcher(opening.sampling.grammar, opening.committed, owner=owner)
        except Exception as error:  # as above
            _end_reading(error, outbox, self._rules.name)
            return
        if outbox.closed:
            return  # the stream has ended; `wait_for` swallows a cancellation that comes with its result
        session_owner = _owner(self._config, key, claim, opening.isolation)
        self._engine.post_open(key, opening, outbox, matcher, session_owner)
        if claim is not None:
            self.lease_ends.begin(outbox, claim)

    async def _read_open(self, requests: AsyncIterator[bytes], outbox: StreamOutbox) -> tuple[Open, LeaseClaim | None]:
        async for data in requests:
            frame = await self._decoded(data)
            if not isinstance(frame, Open):
                raise InvalidArgument("must be the first frame of a stream", field="frame.open")
            outbox.stream.begin(frame, self._rules)
            outbox.quiet = frame.quiet
            self._health.check()
            claim = _check_lease(frame, self._rules, self._secret, self._incarnation)
            outbox.meter = meter_of(self._meters, claim, frame)
            return frame, claim
        raise InvalidArgument("the stream ended before it", field="frame.open")

    async def _decoded(self, data: bytes) -> EdgeFrame:
        """Return a frame; large ones are decoded in a thread, one at a time, so that nobody else waits for them."""
        limits = self._max_tokens, self._rules.max_credit
        if len(data) <= codec.SMALL_FRAME_BYTES:
            return codec.decode_edge_frame(data, *limits)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._decoding, codec.decode_edge_frame, data, *limits)


def _check_lease(frame: Open, rules: VerifierRules, secret: bytes, incarnation: str) -> LeaseClaim | None:
    if frame.model != rules.model:
        message = f"{frame.model!r} is not served here; this verifier has {rules.model!r}"
        raise NotFound(message, field="open.model", code="OUT-308")
    if not secret:
        return None
    return verify_lease(
        frame.lease,
        secret,
        verifier=rules.name,
        model=frame.model,
        session=frame.session,
        now_s=time.time(),
        epoch=frame.epoch,
        incarnation=incarnation,
    )


def _end_reading(error: Exception, outbox: StreamOutbox, verifier: str) -> None:
    match error:
        case OutriderError():
            outbox.put(error)
        case TimeoutError():
            outbox.put(Unavailable(f"did not come within {OPEN_WITHIN_S:.0f} s", field="frame.open"))
        case grpc.aio.BaseError():
            pass  # it has ended
        case _:
            log.error("a stream cannot be read", exc_info=error, extra=about(outbox.stream.session, verifier))
            outbox.put(Internal("the verifier has a defect in reading this stream; its log says which"))


def _owner(config: VerifierConfig, key: int, claim: LeaseClaim | None, of_edge: bytes) -> Owner:
    """Return the owner of the session of stream `key`.

    It shares KV pages with those of its API key, and among them of whom its edge serves, if there is a prefix cache.
    """
    api_key = claim.key if claim is not None else ""
    mark = str(key) if config.no_prefix_cache else of_edge.hex()
    isolation = f"{api_key}/{mark}" if mark else api_key  # no key's name has a slash
    if claim is None:  # nobody needs a key, and all may teach
        return Owner(isolation=isolation, teaches=True)
    return Owner(api_key, claim.max_sessions, isolation, claim.learning)


def _call_in(loop: asyncio.AbstractEventLoop, function: Any) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(function)
