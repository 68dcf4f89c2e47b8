"""A relay of decoding streams to the verifiers, for edges that can reach only the coordinator.

Frames stay bytes, which nothing here reads. The lease in the call's metadata, signed by the coordinator, names the
verifier of the fleet that a stream goes to; nothing else can be reached.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from outrider.coordinator.cluster import VerifierInfo, VerifierState
from outrider.coordinator.coordinator_metrics import RelayMetrics
from outrider.proto import codec
from outrider.proto.channel import CLIENT_OPTIONS
from outrider.proto.errors import Internal, InvalidArgument, OutriderError, ResourceExhausted, Unavailable
from outrider.proto.lease import LeaseClaim
from outrider.proto.plumbing.connections import OPEN_WITHIN_S, HalfOpenStreams, lease_in
from outrider.proto.plumbing.tls import ClientCredentials, ClientTls, explain, open_channel
from outrider.proto.rpc_errors import DETAIL_KEY, to_status
from outrider.proto.streams import CLIENT_GONE, ENDED, send_bytes

logger = logging.getLogger(__name__)

RETRY_WHEN_FULL_S = 1.0
RETRY_WHEN_LOST_S = 0.1
# The statuses by which gRPC reports a lost connection; a verifier's own status carries a detail.
BROKEN = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.CANCELLED,
)
# Metadata between edge and coordinator, or that gRPC sets itself.
_KEPT_BACK = {"authorization", "user-agent", "te", "content-type"}
_UNREAD_ENDING = (grpc.StatusCode.OK, "", ())
_VERIFIER_OPTIONS = [
    *CLIENT_OPTIONS,
    ("grpc.http2.bdp_probe", 0),
    ("grpc.use_local_subchannel_pool", 1),  # else a new channel gets the old connection, and its backoff
]


@dataclass(eq=False, slots=True)
class _Connection:
    channel: grpc.aio.Channel
    streams: int = 0
    retired: bool = False


class StreamRelay:
    """Passes `Decoding.Decode` on to the present `verifiers`, in one event loop; `clock` is Unix time in seconds."""

    def __init__(
        self,
        secret: bytes,
        verifiers: Callable[[], tuple[VerifierInfo, ...]],
        metrics: RelayMetrics,
        *,
        tls: ClientTls | None = None,
        max_streams: int = 256,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._secret = secret
        self._verifiers = verifiers
        self._metrics = metrics
        self._credentials = ClientCredentials(tls) if tls is not None else None
        self._max_streams = max_streams
        self._clock = clock
        self._half_open = HalfOpenStreams(max_streams, metrics.refused_half_open.inc)
        self._connections: dict[tuple[str, str], _Connection] = {}  # by name and address

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        """Return the methods of the Decoding service, which take and return bytes."""
        return {"Decode": grpc.stream_stream_rpc_method_handler(self._decode)}

    async def close(self) -> None:
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            await connection.channel.close()

    async def _decode(self, _: Any, context: Any) -> None:
        try:
            opening, verifier = await self._opened(context)
        except OutriderError as error:
            self._metrics.refused.inc()
            logger.info("a stream is not relayed: %s", error)
            await context.abort(*to_status(error))
        if opening is grpc.aio.EOF:
            return
        self._metrics.streams += 1
        self._metrics.opened.inc()
        try:
            ending = await self._pass_on(verifier, context, opening)
        except OutriderError as error:
            ending = to_status(error)
        except Exception:  # the top of a call: the edge gets an answer to any failure
            logger.exception("a relayed stream failed")
            ending = to_status(Internal("the coordinator failed on this stream; its log says why"))
        finally:
            self._metrics.streams -= 1
        code, details, trailing = ending
        if code is not grpc.StatusCode.OK:
            with suppress(CLIENT_GONE):
                await context.abort(code, details, trailing)
        context.set_trailing_metadata(trailing)

    async def _opened(self, context: Any) -> tuple[Any, VerifierInfo]:
        """Return a stream's first frame, or EOF, and its verifier, which hears of no stream before that frame."""
        claim = lease_in(context.invocation_metadata() or (), self._secret, self._clock())
        self._route(claim)
        with self._half_open.hold(context.peer(), claim.session, claim.key):
            try:
                opening = await asyncio.wait_for(context.read(), OPEN_WITHIN_S)
            except TimeoutError as error:
                raise InvalidArgument(f"did not come within {OPEN_WITHIN_S:.0f} s", field="frame.open") from error
            except grpc.aio.UsageError:  # the edge is gone
                opening = grpc.aio.EOF
        return opening, self._route(claim)

    def _route(self, claim: LeaseClaim) -> VerifierInfo:
        """Return the verifier that a lease is for."""
        if self._metrics.streams >= self._max_streams:
            message = f"{self._max_streams} streams are relayed, which is the coordinator's limit"
            raise ResourceExhausted(message, retry_after_s=RETRY_WHEN_FULL_S, code="OUT-305")
        for verifier in self._verifiers():
            if verifier.name == claim.verifier and verifier.state is not VerifierState.DOWN:
                return verifier
        raise Unavailable(f"verifier {claim.verifier!r} is down", retry_after_s=RETRY_WHEN_LOST_S, code="OUT-301")

    async def _pass_on(self, verifier: VerifierInfo, context: Any, opening: bytes) -> tuple[grpc.StatusCode, str, Any]:
        """Pass frames both ways until the verifier ends the stream, and return its status."""
        metadata = [
            (name, value)
            for name, value in context.invocation_metadata() or ()
            if name not in _KEPT_BACK and not name.startswith("grpc-")
        ]
        async with self._connected(verifier) as connection:
            method: Any = connection.channel.stream_stream(codec.DECODE_METHOD)
            call = method(timeout=context.time_remaining(), metadata=metadata)
            uplink = asyncio.create_task(self._uplink(context, call, opening))
            try:
                if await self._downlink(call, context):
                    return await self._ending(verifier, connection, call)
                return _UNREAD_ENDING
            finally:
                uplink.cancel()
                call.cancel()
                await asyncio.gather(uplink, return_exceptions=True)

    async def _uplink(self, context: Any, call: Any, data: Any) -> None:
        """Pass on frames, from `data` on; read the next one from the edge once gRPC has room for the last."""
        try:
            while data is not grpc.aio.EOF:
                began = time.perf_counter()
                await send_bytes(call, data)
                self._metrics.passed_on("up", len(data), time.perf_counter() - began)
                data = await context.read()
            await call.done_writing()
        except ENDED:
            return  # `_downlink` meets the same end, and reports it
        except grpc.aio.UsageError:
            return  # the edge is gone, which cancels the call

    async def _downlink(self, call: Any, context: Any) -> bool:
        """Pass on what the verifier sends until it ends; return whether the edge is still there."""
        try:
            while (data := await call.read()) is not grpc.aio.EOF:
                began = time.perf_counter()
                try:
                    await context.write(data)
                except CLIENT_GONE:
                    return False
                self._metrics.passed_on("down", len(data), time.perf_counter() - began)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the status of the stream says more than that of a read
        return True

    async def _ending(
        self, verifier: VerifierInfo, connection: _Connection, call: Any
    ) -> tuple[grpc.StatusCode, str, Any]:
        code = await call.code()
        details = await call.details() or ""
        trailing = tuple(
            (name, value) for name, value in await call.trailing_metadata() or () if not name.startswith("grpc-")
        )
        if code not in BROKEN or any(name == DETAIL_KEY for name, _ in trailing):
            return code, details, trailing
        self._retire((verifier.name, verifier.address), connection)
        self._metrics.broken.inc()
        why = explain(details) or details or code.name
        logger.warning("the relayed stream to verifier %s broke: %s", verifier.name, why)
        return to_status(Unavailable(f"the relay has lost verifier {verifier.name!r}", retry_after_s=RETRY_WHEN_LOST_S))

    @asynccontextmanager
    async def _connected(self, verifier: VerifierInfo) -> AsyncIterator[_Connection]:
        """Share one connection to `verifier` among its streams, until one breaks."""
        which = (verifier.name, verifier.address)
        connection = self._connections.get(which)
        if connection is None:
            connection = self._connections[which] = _Connection(self._connect(verifier))
        connection.streams += 1
        try:
            yield connection
        finally:
            connection.streams -= 1
            if connection.retired and not connection.streams:
                await connection.channel.close()

    def _connect(self, verifier: VerifierInfo) -> grpc.aio.Channel:
        if verifier.tls and self._credentials is None:
            logger.error("verifier %s speaks TLS; give the coordinator --verifier-tls-ca", verifier.name)
            why = f"the relay cannot speak to verifier {verifier.name!r}, which has TLS"
            raise Unavailable(why, retry_after_s=RETRY_WHEN_FULL_S, code="OUT-103")
        credentials = self._credentials.current() if verifier.tls and self._credentials is not None else None
        for which, stale in list(self._connections.items()):
            if which[0] == verifier.name and which[1] != verifier.address:  # it came back elsewhere
                self._retire(which, stale)
        return open_channel(verifier.address, _VERIFIER_OPTIONS, credentials, verifier.tls_name)

    def _retire(self, which: tuple[str, str], connection: _Connection) -> None:
        """Drop a broken connection, so that the next stream connects at once instead of after gRPC's backoff."""
        connection.retired = True
        if self._connections.get(which) is connection:
            del self._connections[which]
