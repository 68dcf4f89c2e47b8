"""Limits of a gRPC server's connections, calls and streams that wait: free to open, a descriptor or memory to keep.

gRPC limits their number, the time of a handshake and that without any call. It neither counts them by address nor shows
a connection before its first call, so a thread beside it looks at the sockets of this process and shuts those that are
too many. Nor does it show a call before its one message, so such calls are served as streams of one message.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import resource
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2

from outrider.proto.address import host_of_peer
from outrider.proto.channel import LEASE_METADATA
from outrider.proto.errors import InvalidArgument, ResourceExhausted, Unavailable
from outrider.proto.lease import LeaseClaim, read_lease
from outrider.proto.plumbing.logs import LineLimit
from outrider.proto.rpc_errors import to_status
from outrider.proto.streams import CLIENT_GONE

MAX_CONNECTIONS = 16_384
SHARE_OF_ADDRESS = 8  # an address may have this part of them
SPARE_DESCRIPTORS = 256  # for files, for other servers and for Ray
HANDSHAKE_S = 10.0  # for TLS and the first frame of HTTP/2
FIRST_CALL_S = 10.0
MAX_CALLS_OF_ADDRESS = 2304  # that are no streams of messages, until their answers are taken; a connection has fewer
MAX_WATCHERS = 64  # of the health service, which anybody may call
MESSAGE_S = 10.0  # from a call's headers to its message
RETRY_S = 1.0
IDLE_S = 300.0  # without a call; an edge connects again with its next one, and most always watch for drafters
LOOK_S = 1.0
LOOK_AGAIN_S = 0.1  # after connections were shut, since whoever opened them may open more
LOG_S = 60.0
OPEN_WITHIN_S = 10.0
MAX_OF_SESSION = 2  # an edge that comes back may be faster than the news that its old stream is gone
_DESCRIPTORS = Path("/proc/self/fd")

log = logging.getLogger(__name__)
_Peer = tuple[str, int]


def max_connections() -> int:
    """Return the connections that a server may have, which leaves descriptors for other things."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(descriptors - SPARE_DESCRIPTORS, descriptors // 2))


def connection_options() -> list[tuple[str, int]]:
    """Return gRPC's options for a server; it closes a connection beyond the limit as soon as it is accepted."""
    return [
        ("grpc.max_allowed_incoming_connections", max_connections()),
        ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_S * 1000)),
        ("grpc.max_connection_idle_ms", round(IDLE_S * 1000)),
    ]


@dataclass(eq=False, slots=True)
class _Connection:
    peer: _Peer
    descriptor: int
    since_s: float
    called: bool = False


class ConnectionWatch(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """A watch over the connections of one gRPC server, which it is an interceptor of; on Linux alone.

    It shuts connections of an address beyond a limit, those without a call first and then the newest, and those without
    a call within `FIRST_CALL_S`, of which an address may keep one beside each that has been used: edges connect ahead.
    None is shut while a call runs on it. An IPv6 network of 64 bits counts as one address.

    It also keeps each address to `MAX_CALLS_OF_ADDRESS` calls that are no streams of messages, unless connections have
    no limit, and each of those to `MESSAGE_S` for its message.
    """

    def __init__(self, of_address: int | None = None) -> None:
        """Keep each address to `of_address` connections; None: its share of all, 0: no limit."""
        self._of_address = max(1, max_connections() // SHARE_OF_ADDRESS) if of_address is None else of_address
        self._lock = threading.Lock()
        self._running: Counter[_Peer] = Counter()
        self._called: set[_Peer] = set()
        self._sockets: dict[int, _Connection | None] = {}  # by inode; None: not one of the server's
        self._calls: Counter[str] = Counter()  # by network; in the event loop alone
        self._ended = threading.Event()
        self._spare: int | None = None
        self._failures = LineLimit(lambda: time.monotonic() / LOG_S)
        self._unsaid = 0
        self._say_at_s = 0.0

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """Count a call, whose handler is a coroutine function, for its connection and its address."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        kind = "stream" if handler.request_streaming else "unary"
        kind += "_stream" if handler.response_streaming else "_unary"
        behave = getattr(handler, kind)

        async def counted(requests: Any, context: Any) -> Any:
            request = requests if handler.request_streaming else await self._message(context)
            with self._call(context.peer()):
                return await behave(request, context)

        served = "stream_stream" if handler.response_streaming else "stream_unary"
        return handler._replace(**{"request_streaming": True, served: counted})

    def begin(self, port: int) -> None:
        if _DESCRIPTORS.is_dir():
            threading.Thread(target=self._run, args=(port,), name="outrider-connections", daemon=True).start()

    def stop(self) -> None:
        self._ended.set()

    def _run(self, port: int) -> None:
        shut = 0
        while not self._ended.wait(LOOK_AGAIN_S if shut else LOOK_S):
            try:
                shut = self._look(port, time.monotonic())
            except Exception:  # the top of a thread: connections are to be limited whatever happens
                if self._failures.next_line() is not None:
                    log.exception("the connections of port %d cannot be looked at; that will be tried again", port)
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def _look(self, port: int, now_s: float) -> int:
        """Shut connections that are too many or unused at `now_s`, and return their number."""
        with self._lock:
            called, self._called = self._called, set()
        before, self._sockets = self._sockets, {}
        by_network: dict[str, list[_Connection]] = {}
        with self._spare_descriptor():
            for descriptor, inode in _open_sockets():
                try:
                    connection = before[inode] if inode in before else _connection(descriptor, port, now_s)
                except OSError:
                    continue  # it is gone, has no other end, or there is no descriptor left to look at it this time
                self._sockets[inode] = connection
                if connection is not None:
                    connection.descriptor = descriptor
                    connection.called |= connection.peer in called
                    by_network.setdefault(network_of(connection.peer[0]), []).append(connection)
            surplus = [connection for each in by_network.values() for connection in self._surplus(each, now_s)]
            shut = [connection for connection in surplus if self._shut(connection)]
        if shut:
            self._say(len(shut), shut[-1].peer[0], now_s)
        return len(shut)

    def _surplus(self, connections: Iterable[_Connection], now_s: float) -> list[_Connection]:
        by_worth = sorted(connections, key=lambda each: (not self._runs(each), not each.called, each.since_s))
        used = sum(each.called for each in by_worth)
        late = [each for each in by_worth if not each.called and now_s - each.since_s > FIRST_CALL_S][used:]
        if not self._of_address:
            return late
        gone = set(late)
        return late + [each for each in by_worth if each not in gone][self._of_address :]

    def _shut(self, connection: _Connection) -> bool:
        """Shut a connection for gRPC to close, unless a call runs on it."""
        if self._runs(connection):
            return False
        with suppress(OSError), _duplicate(connection.descriptor) as found:  # it may be gone, its number another's
            if _peer_of(found) == connection.peer:
                found.shutdown(socket.SHUT_RDWR)
                return True
        return False

    def _runs(self, connection: _Connection) -> bool:
        with self._lock:
            return connection.peer in self._running

    @contextmanager
    def _spare_descriptor(self) -> Iterator[None]:
        """Give back a descriptor that is kept for this, and keep one again afterwards."""
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        try:
            yield
        finally:
            with suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY)

    async def _message(self, context: Any) -> Any:
        """Count a call until its end, and return the first message, after which gRPC reads no other one either."""
        network = network_of_peer(context.peer())
        call = asyncio.current_task()
        assert call is not None  # noqa: S101 - a coroutine runs in a task
        self._calls[network] += 1
        call.add_done_callback(lambda _: discount(self._calls, network))  # its answer is taken after its handler
        if self._of_address and self._calls[network] > MAX_CALLS_OF_ADDRESS:
            why = f"your address has {MAX_CALLS_OF_ADDRESS} calls under way, which is the limit; try again"
            await _abort(context, *to_status(ResourceExhausted(why, retry_after_s=RETRY_S, code="OUT-305")))
        try:
            async with asyncio.timeout(MESSAGE_S):
                message = await context.read()
        except TimeoutError:
            why = f"the request did not come within {MESSAGE_S:.0f} s; try again"
            await _abort(context, *to_status(Unavailable(why, retry_after_s=RETRY_S)))
        except DecodeError:  # otherwise gRPC logs it, as often as a stranger likes
            await _abort(context, *to_status(InvalidArgument("is not a message of this method", field="request")))
        if message is grpc.aio.EOF:
            await _abort(context, grpc.StatusCode.UNIMPLEMENTED, "the method takes one message; the call has none")
        return message

    @contextmanager
    def _call(self, peer: str) -> Iterator[None]:
        if peer.startswith("unix:"):
            yield
            return
        which = (_plain(host_of_peer(peer)), int(peer.rpartition(":")[2]))
        with self._lock:
            self._running[which] += 1
            self._called.add(which)
        try:
            yield
        finally:
            with self._lock:
                discount(self._running, which)

    def _say(self, shut: int, host: str, now_s: float) -> None:
        self._unsaid += shut
        if now_s >= self._say_at_s:
            line = "shut %d connections that were too many of one address or had no call, the last of %s"
            log.warning(line, self._unsaid, host)
            self._unsaid, self._say_at_s = 0, now_s + LOG_S


class BoundedHealth(health.aio.HealthServicer):  # type: ignore[misc]  # grpc_health has no types
    """A health service that refuses watchers beyond `MAX_WATCHERS`, and waits for none when a health changes."""

    def __init__(self) -> None:
        super().__init__()
        self._watchers = 0
        self._changed = asyncio.Event()

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:  # noqa: N802 - gRPC's name
        """Stream the changes of a service's health; a client that takes no answer holds this call alone."""
        if self._watchers >= MAX_WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many watch; use Check")
        self._watchers += 1
        said = None
        try:
            while True:
                changed = self._changed
                status = self._server_status.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
                if status != said:
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                    said = status
                await changed.wait()
        finally:
            self._watchers -= 1

    async def _set(self, service: str, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        self._server_status[service] = status
        self._changed.set()
        self._changed = asyncio.Event()


class HalfOpenStreams:
    """Counts of decoding streams that are not admitted, of which each lease, API key and peer may have few.

    Such a stream costs its client nothing, and whoever opens many at once must not keep others out. For one event loop.

    Args:
        max_of_peer: most streams of one address, or of an IPv6 network of 64 bits, whatever their leases.
        refused: called whenever one is refused.
    """

    def __init__(self, max_of_peer: int, refused: Callable[[], None]) -> None:
        self._max_of_peer = max_of_peer
        self._refused = refused
        self._of_peer: Counter[Hashable] = Counter()
        self._of_session: Counter[Hashable] = Counter()  # by key, too: another key may lease the same name
        self._of_key: Counter[Hashable] = Counter()

    @contextmanager
    def hold(self, peer: str, session: str = "", key: str = "", max_of_key: int = 0) -> Iterator[None]:
        """Count a stream of the gRPC `peer` until its session is admitted; raises `ResourceExhausted`.

        `session` and `key` are those of its lease, empty without one; `max_of_key`: most sessions of the key, and of
        its streams that wait; 0: any number.
        """
        network, of_key = network_of_peer(peer), max(max_of_key, MAX_OF_SESSION)
        if session and self._of_session[key, session] >= MAX_OF_SESSION:
            raise self._refusal(f"the session has {MAX_OF_SESSION} streams that are not admitted")
        if key and max_of_key and self._of_key[key] >= of_key:
            raise self._refusal(f"key {key!r} has {of_key} streams that are not admitted")
        if self._of_peer[network] >= self._max_of_peer:
            raise self._refusal(f"{self._max_of_peer} streams from your address are not admitted")
        held = (self._of_peer, network), (self._of_session, (key, session)), (self._of_key, key)
        for counts, name in held:
            counts[name] += 1
        try:
            yield
        finally:
            for counts, name in held:
                discount(counts, name)

    def __len__(self) -> int:
        return self._of_peer.total()

    def _refusal(self, why: str) -> ResourceExhausted:
        self._refused()
        message = f"{why}; send Open on them and wait, or end them"
        return ResourceExhausted(message, retry_after_s=RETRY_S, code="OUT-305")


def lease_in(metadata: Iterable[tuple[str, str | bytes]], secret: bytes, now_s: float) -> LeaseClaim:
    """Return the claim of the lease in a call's metadata; raises what `token_in` and `read_lease` raise."""
    return read_lease(token_in(metadata), secret, now_s=now_s)


def token_in(metadata: Iterable[tuple[str, str | bytes]]) -> bytes:
    """Return the token in a call's metadata; empty: there is none. Raises `InvalidArgument` where it is text."""
    token = next((value for name, value in metadata if name == LEASE_METADATA), b"")
    if not isinstance(token, bytes):
        raise InvalidArgument("must be bytes", field=LEASE_METADATA)
    return token


async def _abort(context: Any, code: grpc.StatusCode, details: str, trailing: Any = ()) -> NoReturn:
    """End a call by a status, which nobody reads where the client is gone."""
    with suppress(CLIENT_GONE):
        await context.abort(code, details, trailing)
    raise asyncio.CancelledError


def _open_sockets() -> Iterator[tuple[int, int]]:
    for name in os.listdir(_DESCRIPTORS):
        with suppress(OSError):  # it was closed since
            found = os.fstat(int(name))
            if stat.S_ISSOCK(found.st_mode):
                yield int(name), found.st_ino


def _connection(descriptor: int, port: int, now_s: float) -> _Connection | None:
    """Return the connection to `port` whose server's end `descriptor` is, if it is one; raises `OSError`."""
    with _duplicate(descriptor) as found:
        if found.family in (socket.AF_INET, socket.AF_INET6) and found.getsockname()[1] == port:
            return _Connection(_peer_of(found), descriptor, now_s)
    return None


@contextmanager
def _duplicate(descriptor: int) -> Iterator[socket.socket]:
    """Open another descriptor of a socket for a moment, since gRPC's own may be closed and taken meanwhile."""
    copy = os.dup(descriptor)
    try:
        found = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with found:
        yield found


def _peer_of(found: socket.socket) -> _Peer:
    """Return the other end's address; raises `OSError` where there is none."""
    host, port = found.getpeername()[:2]
    return _plain(host.removeprefix("::ffff:")), port


def _plain(host: str) -> str:
    return host.partition("%")[0]


def network_of(host: str) -> str:
    """Return what counts as one address: the network of 64 bits of an IPv6 address, which one client can have."""
    return str(ipaddress.ip_network((host, 64), strict=False)) if ":" in host else host


def network_of_peer(peer: str) -> str:
    """Return what counts as one address of a gRPC peer; a Unix socket is one, too."""
    host = host_of_peer(peer)
    return host if host.startswith("unix:") else network_of(_plain(host))


def discount(counts: Counter[Any], name: Hashable) -> None:
    """Count one less of `name`, and forget it with the last one."""
    counts[name] -= 1
    if not counts[name]:
        del counts[name]
