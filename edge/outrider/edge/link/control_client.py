"""The edge's client of a coordinator: leases, drafters, files, reports."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from outrider.edge.features import FleetPriors
from outrider.edge.link.security import Security
from outrider.proto import codec
from outrider.proto.channel import CLIENT_OPTIONS, HEALTH_METHOD, OWN_CONNECTION
from outrider.proto.errors import DeadlineExceeded, ResourceExhausted, Unavailable
from outrider.proto.plumbing.tls import ClientCredentials, explain, open_blocking_channel, open_channel
from outrider.proto.rpc_errors import from_rpc_error
from outrider.proto.types import DrafterManifest, Lease, LeaseRequest, RemoteFile, SessionReport

if TYPE_CHECKING:
    from outrider.proto.cluster_status import ClusterStatus

MAX_WAIT_S = 10.0  # between two attempts at a download
UNANSWERED_S = 2.0  # after which a call is tried over another connection
SUSPECTED_S = 0.1  # as well, where a stream of this machine has fallen silent
HEALTH_WITHIN_S = 1.0  # that the coordinator has to say its health, before either ends
ATTEMPTS_S = (0.5, 1.0, 2.0)  # at such a connection: one that begins while the network changes may never stand
MAX_RENEWALS = 2  # of a call: a device may change its network again meanwhile
BUSY_RETRY_S = 1.0  # on average
T = TypeVar("T")
_PREFIX = f"/{codec.CONTROL_SERVICE}/"


class CoordinatorClient:
    """One channel to a coordinator. Every call has a deadline and raises errors of the tree.

    A connection dies unsaid where this machine changes its network, or a router forgets it. So where neither a lease
    nor the coordinator's health has an answer within `UNANSWERED_S`, or `SUSPECTED_S` for a lease in place of a silent
    verifier's, another connection is made, and takes the place of the first where it stands before either answer comes.
    A coordinator that is slow says its health, and gets no crowd of handshakes.

    Attributes:
        on_renewed: called then, since other connections of this machine may be as dead.

    Raises:
        ConfigError: a certificate is no good, or the API key would go in plain text.
    """

    def __init__(self, address: str, timeout_s: float = 10.0, security: Security | None = None) -> None:
        self.address = address
        self.security = security or Security()
        self.security.check_coordinator(address)
        self.priors = FleetPriors()  # from leases
        self.newest_lease: Lease | None = None
        self._timeout_s = timeout_s
        self._files = ClientCredentials(self.security.tls) if self.security.tls else None
        self._credentials: grpc.ChannelCredentials | None = None
        self._open: grpc.aio.Channel | None = None
        self._retired: set[asyncio.Task[None]] = set()
        self._renewing: asyncio.Task[None] | None = None  # makes another connection, and uses it once it stands
        self.on_renewed: Callable[[], None] = lambda: None

    async def open_lease(self, request: LeaseRequest) -> Lease:
        unanswered_s = SUSPECTED_S if request.suspected else UNANSWERED_S
        lease = await self._call("OpenLease", codec.encode_lease_request(request), codec.decode_lease, unanswered_s)
        self.priors.learn(request, lease)
        self.newest_lease = lease
        return lease

    async def list_drafters(self, tokenizer_sha256: str = "") -> tuple[DrafterManifest, ...]:
        """List all drafters, or those of one tokenizer."""
        return await self._call("ListDrafters", codec.encode_drafter_query(tokenizer_sha256), codec.decode_drafters)

    async def watch_drafters(self, tokenizer_sha256: str = "") -> AsyncIterator[tuple[DrafterManifest, ...]]:
        """Yield the list of drafters now, and again each time it changes.

        Raises:
            Unavailable: among others where another connection has taken the place of the watch's.
        """
        method: Any = self._channel().unary_stream(_PREFIX + "WatchDrafters")
        call = method(codec.encode_drafter_query(tokenizer_sha256), metadata=self.security.metadata)
        try:
            async for data in call:
                yield codec.decode_drafters(data)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Unavailable("the watch ended with its connection; watch again") from error  # a closed channel's calls

    async def report(self, report: SessionReport) -> None:
        await self._call("ReportSession", codec.encode_report(report), codec.decode_nothing)

    async def status(self) -> ClusterStatus:
        """Return the coordinator's whole view."""
        from outrider.proto.cluster_status import decode_status  # here, since clients seldom ask

        return await self._call("Status", b"", decode_status)

    async def drain(self, verifier: str) -> int:
        """Send the sessions of `verifier` elsewhere and return their number."""
        return await self._call("Drain", codec.encode_drain(verifier), codec.decode_drained)

    async def close(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait([self._renewing])
        if self._open is not None:
            await self._open.close()
        await asyncio.gather(*self._retired)

    def _channel(self) -> grpc.aio.Channel:
        """Return the channel, a new one after the certificates were replaced."""
        credentials = self._files.current() if self._files is not None else None
        if self._open is not None and credentials is self._credentials:
            return self._open
        self._credentials = credentials
        return self._use(open_channel(self.address, CLIENT_OPTIONS, credentials, self.security.server_name))

    def _use(self, channel: grpc.aio.Channel) -> grpc.aio.Channel:
        """Use this channel from now on; calls that run over the one before may end."""
        before, self._open = self._open, channel
        if before is not None:
            self._retire(before)
        return channel

    def _retire(self, channel: grpc.aio.Channel) -> None:
        retiring = asyncio.create_task(channel.close(self._timeout_s))
        self._retired.add(retiring)
        retiring.add_done_callback(self._retired.discard)

    async def _call(self, method: str, request: bytes, decode: Callable[[bytes], T], unanswered_s: float = 0.0) -> T:
        """Call, after `unanswered_s` without an answer over another connection too; 0: over this one alone."""

        def over(channel: grpc.aio.Channel) -> Any:
            unary: Any = channel.unary_unary(_PREFIX + method)
            return unary(request, timeout=self._timeout_s, metadata=self.security.metadata)

        channel = self._channel()
        call = over(channel)
        try:
            for _ in range(MAX_RENEWALS if unanswered_s else 0):
                if not await self._renewed(channel, call, unanswered_s):
                    break
                call.cancel()
                channel = self._channel()
                call = over(channel)
            return decode(await call)
        except grpc.aio.AioRpcError as error:
            translated = from_rpc_error(error)
            if error.code() is grpc.StatusCode.CANCELLED:  # gRPC drops what waits in too long a line at the server
                busy = f"the coordinator at {self.address} has too many calls waiting"
                raise Unavailable(busy, retry_after_s=BUSY_RETRY_S * random.uniform(0.5, 1.5)) from error
            if isinstance(translated, DeadlineExceeded | Unavailable) and not translated.retry_after_s:
                why = explain(translated.message) or _plain(translated.message)
                message = f"the coordinator at {self.address} does not answer: {why}"
                raise Unavailable(message, field="coordinator", code="OUT-101") from error
            raise translated from error
        finally:
            call.cancel()

    async def _renewed(self, channel: grpc.aio.Channel, call: Any, unanswered_s: float) -> bool:
        """Wait for a call's answer; return whether its connection seems dead and another is the one to use."""
        health = _health(channel, unanswered_s - HEALTH_WITHIN_S)
        signs = [asyncio.ensure_future(call.code()), asyncio.create_task(health)]
        try:
            await asyncio.wait(signs, timeout=unanswered_s, return_when=asyncio.FIRST_COMPLETED)
            alive = any(sign.done() for sign in signs)
            if not alive and self._open is channel and self._renewing is None:
                self._renewing = asyncio.create_task(self._renew())
            if not alive and self._renewing is not None:
                await asyncio.wait([*signs, self._renewing], return_when=asyncio.FIRST_COMPLETED)
                alive = any(sign.done() for sign in signs)
            if alive and self._open is channel and self._renewing is not None:
                self._renewing.cancel()
            return not alive and self._open is not channel
        finally:
            for sign in signs:
                sign.cancel()

    async def _renew(self) -> None:
        options = [*CLIENT_OPTIONS, OWN_CONNECTION]
        try:
            for within_s in (*ATTEMPTS_S, self._timeout_s):
                another = open_channel(self.address, options, self._credentials, self.security.server_name)
                try:
                    async with asyncio.timeout(within_s):
                        await another.channel_ready()
                except TimeoutError:
                    self._retire(another)
                except asyncio.CancelledError:
                    self._retire(another)
                    return
                else:
                    self._use(another)
                    self.on_renewed()
                    return
        finally:
            self._renewing = None


async def _health(channel: grpc.aio.Channel, after_s: float) -> None:
    """Ask over a connection whether anybody is there; any answer will do, and so will an error."""
    await asyncio.sleep(after_s)
    ask: Any = channel.unary_unary(HEALTH_METHOD)
    with suppress(grpc.aio.AioRpcError):
        await ask(b"")


def _plain(details: str) -> str:
    """Return gRPC's words, or plain ones for what they say most often."""
    if "Connection refused" in details:
        return "nothing listens there; start `outrider up` or `outrider coordinator`, or check the address"
    return details


def file_fetcher(
    address: str, timeout_s: float = 120.0, security: Security | None = None
) -> Callable[[RemoteFile, int], Iterator[bytes]]:
    """Return a blocking download from the coordinator, for the drafter cache, which works in a thread.

    It waits for its turn, up to `timeout_s`, where others fetch as much as the coordinator sends at once.
    """
    secured = security or Security()

    def fetch(file: RemoteFile, offset: int) -> Iterator[bytes]:
        until = time.monotonic() + timeout_s
        while True:
            try:
                yield from fetch_now(file, offset)
                return
            except ResourceExhausted as error:  # before the first piece
                if not error.retry_after_s or time.monotonic() > until:
                    raise
                time.sleep(min(error.retry_after_s, MAX_WAIT_S) * random.uniform(0.5, 1.5))

    def fetch_now(file: RemoteFile, offset: int) -> Iterator[bytes]:
        credentials = ClientCredentials(secured.tls).current() if secured.tls else None
        with open_blocking_channel(address, CLIENT_OPTIONS, credentials, secured.server_name) as channel:
            stream: Any = channel.unary_stream(_PREFIX + "FetchFile")
            request = codec.encode_fetch(file.sha256, offset)
            try:
                for data in stream(request, timeout=timeout_s, metadata=secured.metadata):
                    yield codec.decode_chunk(data)
            except grpc.RpcError as error:
                raise from_rpc_error(error) from error

    return fetch
