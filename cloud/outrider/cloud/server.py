"""The verifier's gRPC server: streams in, engine events out, and back. No decision about a token is made here."""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import torch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from outrider.cloud.config import VerifierConfig
from outrider.cloud.engine import Engine, Outbox, StepFigures
from outrider.cloud.target import load_target
from outrider.proto import codec
from outrider.proto.channel import SERVER_OPTIONS
from outrider.proto.errors import ConfigError, InvalidArgument, NotFound, OutriderError, Unavailable, to_status
from outrider.proto.lease import LeaseClaim, verify_lease
from outrider.proto.session import VerifierRules
from outrider.proto.types import CloudFrame, Commit, Goaway, Open, Report, VerifierStatus

OPEN_WITHIN_S = 10.0
SPARE_CALLS = 16  # health checks, and streams that are refused
MOST_UNTAKEN = 256
SWITCH_S = 0.0005  # else a frame that comes while the engine's thread runs Python waits 5 ms for the interpreter

log = logging.getLogger(__name__)


class StreamOutbox(Outbox):
    """Frames from the engine's thread to one stream's task."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: asyncio.Queue[CloudFrame | OutriderError] = asyncio.Queue()
        self._unread = 0
        self.taken = 0
        self.end_of_lease: asyncio.TimerHandle | None = None

    def put(self, item: CloudFrame | OutriderError) -> None:
        """From any thread."""
        self._unread += 1
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    def unread(self) -> int:
        """Frames that gRPC has not taken yet; it takes none while the client reads none."""
        return self._unread

    async def get(self) -> CloudFrame | OutriderError:
        """The next item, in order."""
        return await self._queue.get()

    def sent(self) -> None:
        """GRPC has taken the last item."""
        self._unread -= 1
        self.taken += 1


class VerifierServer:
    """A target, its engine and their server, in this process."""

    def __init__(self, config: VerifierConfig, lease_secret: bytes = b"") -> None:
        """Load the target and check it.

        Args:
            config: of the verifier.
            lease_secret: shared with the coordinator; empty: no lease is asked for (loopback only).

        Raises:
            NotFound, ModelRefused: as `load_target`; ConfigError.
        """
        if config.insecure_listen and not lease_secret:
            raise ConfigError("must be given where the verifier listens beyond loopback", field="lease_secret")
        if config.threads:
            torch.set_num_threads(config.threads)
        self._config = config
        self._secret = lease_secret
        target = load_target(
            config.target,
            device=config.device,
            dtype=config.dtype,
            kv_tokens=config.kv_tokens,
            page_size=config.page_size,
            context_length=config.context_length,
            batch_invariant=config.batch_invariant,
        )
        self.tokenizer_json = target.tokenizer_json
        self.tokenizer_sha256 = target.tokenizer_sha256
        self.max_sessions = config.max_sessions
        self.rules = VerifierRules(
            name=config.name,
            model=config.model_id,
            tokenizer_sha256=target.tokenizer_sha256,
            vocab_size=target.vocab_size,
            context_length=target.context_length,
            eos_tokens=target.eos_tokens,
            max_drafts=config.max_drafts,
            max_credit=config.max_credit,
            patience=config.patience,
            goal=config.goal,
            batch_invariant=config.batch_invariant,
        )
        self._most_tokens = max(target.context_length, target.vocab_size)
        self._engine = Engine(target, self.rules, config)
        self._keys = itertools.count()
        self._server: grpc.aio.Server | None = None
        self._health = health.aio.HealthServicer()
        self._address = ""
        self._endings: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """Begin to serve; the address as host:port."""
        self._server = grpc.aio.server(
            options=SERVER_OPTIONS, maximum_concurrent_rpcs=2 * self._config.max_sessions + SPARE_CALLS
        )
        handler = grpc.stream_stream_rpc_method_handler(self._decode)  # bytes in, bytes out: the codec checks them
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(codec.DECODING_SERVICE, {"Decode": handler}),)
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        try:
            port = self._server.add_insecure_port(self._config.listen)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {self._config.listen}: {error}", field="listen") from error
        self._address = f"{self._config.host}:{port}"
        sys.setswitchinterval(SWITCH_S)
        self._engine.start()
        await self._server.start()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        log.info("verifier %s serves %s on %s", self.rules.name, self.rules.model, self._address)
        return self._address

    async def drain(self, grace_s: float = 10.0) -> int:
        """Send every session elsewhere and wait for them to go; how many there were."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        sessions = self._engine.session_count
        self._engine.post_drain()
        until = time.monotonic() + grace_s
        while self._engine.session_count and time.monotonic() < until:  # noqa: ASYNC110 - counted in another thread
            await asyncio.sleep(0.02)
        return sessions

    async def stop(self, grace_s: float = 1.0) -> None:
        """End the server, then the engine."""
        if self._server is not None:
            await self._server.stop(grace_s)
            await asyncio.to_thread(self._engine.stop)

    def take_step_figures(self) -> list[StepFigures]:
        """Of the steps since the last call, oldest first; the newest few thousand are kept."""
        figures = self._engine.figures
        return [figures.popleft() for _ in range(len(figures))]

    def status(self) -> VerifierStatus:
        """What the coordinator wants to know."""
        return VerifierStatus(
            name=self.rules.name,
            address=self._address,
            model=self.rules.model,
            state="draining" if self._engine.draining else "ready",
            sessions=self._engine.session_count,
            step_s=self._engine.step_s,
            kv_pages_free=self._engine.free_pages,
        )

    async def _set_health(self, status: Any) -> None:
        for service in ("", codec.DECODING_SERVICE):
            await self._health.set(service, status)

    # --- one stream ---

    async def _decode(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        key = next(self._keys)
        outbox = StreamOutbox(asyncio.get_running_loop())
        reader = asyncio.create_task(self._read(key, requests, outbox))
        stream = asyncio.current_task()
        assert stream is not None  # noqa: S101 - a coroutine runs in a task
        stall = asyncio.create_task(self._watch_stall(outbox, stream, context))
        try:
            while True:
                item = await outbox.get()
                if isinstance(item, OutriderError):
                    raise item
                yield codec.encode_cloud_frame(item)
                outbox.sent()
                if isinstance(item, Goaway) or (isinstance(item, Commit) and item.finish is not None):
                    return
        except OutriderError as error:
            status, message, metadata = to_status(error)
            await context.abort(status, message, metadata)
        finally:
            reader.cancel()
            stall.cancel()
            if outbox.end_of_lease is not None:
                outbox.end_of_lease.cancel()
            self._engine.post_close(key)

    async def _read(self, key: int, requests: AsyncIterator[bytes], outbox: StreamOutbox) -> None:
        """Frames of one stream to the engine; waits while the engine has too many of them untaken."""
        loop = asyncio.get_running_loop()
        room = asyncio.Semaphore(MOST_UNTAKEN)
        try:
            claim = await asyncio.wait_for(self._read_open(key, requests, outbox), OPEN_WITHIN_S)
            if claim is not None:
                lasts_s = max(0.0, claim.expires_at_s - time.time())
                outbox.end_of_lease = loop.call_later(lasts_s, outbox.put, Goaway("the lease has expired"))
            async for data in requests:
                await room.acquire()
                frame = codec.decode_edge_frame(data, self._most_tokens)
                self._engine.post_frame(key, frame, lambda: _call_in(loop, room.release))
            self._engine.post_frame(key, Report(drafting=False), lambda: None)  # half-closed: no draft will come
        except OutriderError as error:
            outbox.put(error)
        except TimeoutError:
            outbox.put(InvalidArgument(f"did not come within {OPEN_WITHIN_S:.0f} s", field="frame.open"))

    async def _read_open(self, key: int, requests: AsyncIterator[bytes], outbox: StreamOutbox) -> LeaseClaim | None:
        async for data in requests:
            frame = codec.decode_edge_frame(data, self._most_tokens)
            if not isinstance(frame, Open):
                raise InvalidArgument("must be the first frame of a stream", field="frame.open")
            claim = self._check_lease(frame)
            self._engine.post_open(key, frame, outbox)
            return claim
        raise InvalidArgument("the stream ended before it", field="frame.open")

    def _check_lease(self, frame: Open) -> LeaseClaim | None:
        if frame.model != self.rules.model:
            raise NotFound(
                f"{frame.model!r} is not served here; this verifier has {self.rules.model!r}", field="open.model"
            )
        if not self._secret:
            return None
        return verify_lease(
            frame.lease,
            self._secret,
            verifier=self.rules.name,
            model=frame.model,
            session=frame.session,
            now_s=time.time(),
        )

    async def _watch_stall(self, outbox: StreamOutbox, stream: asyncio.Task[Any], context: Any) -> None:
        """End a stream whose client has left its frames unread for `stall_s` seconds.

        The stream's task is then stuck in a write that flow control holds back. It is cancelled, which frees the
        session now; the status is queued behind that write, for a client that comes to read again and resumes.
        """
        taken, since = outbox.taken, time.monotonic()
        while True:
            await asyncio.sleep(self._config.stall_s / 4)
            if outbox.taken != taken or not outbox.unread():
                taken, since = outbox.taken, time.monotonic()
            elif time.monotonic() - since > self._config.stall_s:
                log.warning("a client left its commits unread for %g s; its stream is ended", self._config.stall_s)
                status, message, metadata = to_status(Unavailable("you left commits unread too long; resume"))
                ending = asyncio.create_task(context.abort(status, message, metadata))
                self._endings.add(ending)
                ending.add_done_callback(self._ended)
                stream.cancel()
                return

    def _ended(self, ending: asyncio.Task[None]) -> None:
        self._endings.discard(ending)
        if not ending.cancelled():
            ending.exception()  # abort always raises


def _call_in(loop: asyncio.AbstractEventLoop, function: Any) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(function)
