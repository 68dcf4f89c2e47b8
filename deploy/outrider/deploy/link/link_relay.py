"""The shell around two pipes: real TCP connections, moved through an emulated link.

All connections share the link like a cable. A new one costs a round trip before its first byte moves, like TCP's
handshake. Loss and congestion control are not emulated: TCP shows a loss as delay, which jitter, stalls
and traces bring, and a connection that has lived for a while has grown its window.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import math
import random
import selectors
import socket
import struct
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from outrider.deploy.link.link_traces import LinkTrace
from outrider.deploy.link.pipe import Pipe
from outrider.deploy.link.shape import MTU_BYTES, LinkShape, WayShape
from outrider.proto.address import is_loopback, split_address
from outrider.proto.errors import ConfigError, Unavailable

_log = logging.getLogger(__name__)

_MAX_CONNECTIONS = 400  # two sockets each, and select() ends at 1,024
_PR_SET_TIMERSLACK = 29
_RECEIVE_BUFFER = 64 << 10  # small: what waits there is a queue that the link cannot see
_READ_BYTES = 16 << 10  # small, so that streams alternate
_SO_TIMESTAMPNS = 35  # Linux; the socket module does not have it
_TIMESPEC = struct.Struct("@qq")
_MAX_LATE_S = 0.05  # an older kernel stamp is not believed: the wall clock may have been set
_ABORT = struct.pack("ii", 1, 0)  # struct linger: close() sends a reset
# Measured after 10 s idle on LTE and 5G by probes of the radio's states (Narayanan et al., SIGCOMM 2021).
WAKE_S = (0.3, 1.0)


class Timer:
    """Median lateness of timers, in seconds, by which one must be set early to be on time."""

    _STEP_S = 1e-6
    _MAX_S = 1.5e-4

    def __init__(self) -> None:
        self.early_s = 30e-6

    def was_late(self, seconds: float) -> None:
        """Move a step towards `seconds`; steps of one size settle at the median."""
        step = self._STEP_S if seconds > 0 else -self._STEP_S
        self.early_s = min(max(self.early_s + step, 0.0), self._MAX_S)


class Way:
    """One direction of the link: a pipe, its timer, and the streams that share it."""

    def __init__(self, pipe: Pipe, timer: Timer, wake: Callable[[float], object]) -> None:
        """Carry bytes through `pipe`; `wake` is called with the time before each of them."""
        self._pipe = pipe
        self._wake = wake
        self._timer = timer
        self._handle: asyncio.TimerHandle | None = None
        self._when = 0.0  # time for which `_handle` is set
        self.streams: set[RelayedStream] = set()  # those open; what a closed one has under way still takes its time
        self.full = False
        self.delivered_bytes = 0

    def read(self, stream: RelayedStream) -> None:
        """Read from the stream's source while there is room."""
        now = time.monotonic()
        room = self._pipe.room(now)
        if room:
            try:
                data, age_s = _receive(stream.source, min(room, _READ_BYTES))
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                stream.connection.abort()
                return
            self._wake(now)
            self._pipe.push(max(now - age_s, stream.reading_since), stream, data)
            if not data:
                stream.finished = True
                stream.update_reading()
        if self._pipe.room(now) < MTU_BYTES:
            self.full = True
            self._update_reading()
        self._set_timer(now)

    def reshape(self, shape: WayShape) -> None:
        """Change the pipe to `shape` now."""
        now = time.monotonic()
        self._pipe.reshape(now, shape)
        self._set_timer(now)

    def stall(self, seconds: float) -> None:
        """Hold the pipe for `seconds`, beginning now."""
        now = time.monotonic()
        self._pipe.stall(now, seconds)
        self._set_timer(now)

    def clear(self) -> None:
        """Lose everything that is under way."""
        self._pipe.clear()
        self._set_timer(time.monotonic())

    def _set_timer(self, now: float) -> None:
        when = self._pipe.next_time()
        if self.full:
            when = min(when, self._pipe.half_empty_time(now))
        if self._handle is not None:
            if when == self._when:
                return
            self._handle.cancel()
            self._handle = None
        if when < math.inf:
            self._when = when
            at = when - self._timer.early_s
            self._handle = asyncio.get_running_loop().call_at(at, self._on_time, at > now)

    def _on_time(self, was_ahead: bool) -> None:
        self._handle = None
        now = time.monotonic()
        arrivals = self._pipe.due(now + self._timer.early_s)
        for arrival in arrivals:
            if not arrival.stream.connection.cut:
                self.delivered_bytes += len(arrival.data)
                arrival.stream.deliver(arrival.data)
        if arrivals and was_ahead:
            self._timer.was_late(time.monotonic() - self._when)
        if self.full and self._pipe.half_empty_time(now) <= now:
            self.full = False
            self._update_reading()
        self._set_timer(now)

    def _update_reading(self) -> None:
        for stream in self.streams:
            stream.update_reading()


class RelayedStream:
    """One direction of one connection."""

    def __init__(self, connection: RelayedConnection, source: socket.socket, sink: socket.socket, way: Way) -> None:
        self.connection = connection
        self.source = source
        self.finished = False  # the source has ended
        self.over = False  # the sink has all bytes and the end
        self.reading_since = 0.0
        self._sink = sink
        self._way = way
        self._outbox = bytearray()  # bytes that are due but not taken by the sink yet
        self._reading = False
        self._ends = False  # after the outbox
        self._loop = asyncio.get_running_loop()
        way.streams.add(self)
        self.update_reading()

    def update_reading(self) -> None:
        """Read while the source has more, the way has room, and the sink takes bytes."""
        wanted = not (self.finished or self._way.full or self._outbox or self.connection.cut)
        if wanted and not self._reading:
            self.reading_since = time.monotonic()
            self._loop.add_reader(self.source, self._way.read, self)
        elif self._reading and not wanted:
            self._loop.remove_reader(self.source)
        self._reading = wanted

    def deliver(self, data: bytes) -> None:
        """Send bytes that are due; empty bytes are the end."""
        if not data:
            self._ends = True
        if self._outbox:
            self._outbox += data
            return
        self._outbox += data[self._send(data) :]
        if self._outbox:
            self._loop.add_writer(self._sink, self._flush)
            self.update_reading()
        self._end_if_all_is_sent()

    def close(self) -> None:
        """Forget the sockets."""
        self._way.streams.discard(self)
        self._loop.remove_reader(self.source)
        self._loop.remove_writer(self._sink)

    def _flush(self) -> None:
        del self._outbox[: self._send(self._outbox)]
        if not self._outbox and not self.connection.cut:
            self._loop.remove_writer(self._sink)
            self.update_reading()
            self._end_if_all_is_sent()

    def _send(self, data: bytes | bytearray) -> int:
        try:
            return self._sink.send(data) if data else 0
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self.connection.abort()
            return len(data)

    def _end_if_all_is_sent(self) -> None:
        if self._ends and not self._outbox and not self.over and not self.connection.cut:
            self.over = True
            self.connection.end(self._sink)


class RelayedConnection:
    """Two connected sockets, of an edge and of the verifier, with a stream each way."""

    def __init__(
        self, edge: socket.socket, verifier: socket.socket, up: Way, down: Way, connections: set[RelayedConnection]
    ) -> None:
        self.cut = False
        self._sockets = (edge, verifier)
        for end in self._sockets:
            _prepare(end)
        self._all = connections
        connections.add(self)
        self._streams = (RelayedStream(self, edge, verifier, up), RelayedStream(self, verifier, edge, down))

    def end(self, sink: socket.socket) -> None:
        """Shut `sink` down for writing; close the connection after both directions have ended."""
        try:
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            self.abort()
            return
        if all(stream.over for stream in self._streams):
            self._forget()
            for end in self._sockets:
                end.close()

    def abort(self) -> None:
        """Reset both sockets."""
        if not self.cut:
            self._forget()
            for end in self._sockets:
                abort(end)

    def _forget(self) -> None:
        self.cut = True
        for stream in self._streams:
            stream.close()
        self._all.discard(self)


def _prepare(end: socket.socket) -> None:
    """Turn off Nagle's algorithm and turn on receive stamps."""
    end.setblocking(False)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        end.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    except OSError:
        _log.debug("no receive stamps here; a late wake-up of the relay counts as delay")


def _receive(source: socket.socket, size: int) -> tuple[bytes, float]:
    """Return bytes and their age in seconds by the kernel's stamp, since the relay may have been woken late."""
    data, control, _, _ = source.recvmsg(size, socket.CMSG_SPACE(_TIMESPEC.size))
    for level, kind, value in control:
        if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS and len(value) == _TIMESPEC.size:
            seconds, nanoseconds = _TIMESPEC.unpack(value)
            age_s = (time.time_ns() - seconds * 1_000_000_000 - nanoseconds) / 1e9
            return data, age_s if 0 <= age_s <= _MAX_LATE_S else 0.0
    return data, 0.0


def abort(end: socket.socket) -> None:
    """Close with a reset."""
    try:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
    except OSError:
        _log.debug("the other end was faster")
    end.close()


class Radio:
    """The radio of one link, which is asleep at first.

    Args:
        idle_s: silence in both directions after which it sleeps, in seconds.
        seed: seed of the times that it takes to wake, uniform in `WAKE_S`.
    """

    def __init__(self, idle_s: float, seed: int = 0) -> None:
        self._idle_s = idle_s
        self._random = random.Random(f"radio {seed}")
        self._used_at = self._awake_at = -math.inf

    def use(self, now: float) -> float:
        """Return the seconds that what comes at `now`, in either direction, waits for the radio to be awake."""
        if now - self._used_at > self._idle_s:
            self._awake_at = now + self._random.uniform(*WAKE_S)
        self._used_at = max(now, self._awake_at)
        return max(0.0, self._awake_at - now)


def _tcp_socket(family: int) -> socket.socket:
    """Return a TCP socket of this machine that is not connected."""
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
    return made


@dataclass(frozen=True, slots=True)
class Counters:
    """TCP payload that the link has delivered since its start, in bytes, and accepted connections."""

    up_bytes: int
    down_bytes: int
    connections: int


class LinkRelay:
    """A listener that carries every connection over the link to one address.

    Args:
        to: `host:port` of the verifier.
        shape: initial shape.
        seed: seed of the jitter.
        radio: radio of the edge; None: it never sleeps.
    """

    def __init__(self, to: str, shape: LinkShape, seed: int = 0, radio: Radio | None = None) -> None:
        self._to = split_address(to, "to")
        self._shape = shape
        self._radio = radio
        self._next_point: asyncio.TimerHandle | None = None  # of a trace
        timer = Timer()
        self._up = Way(Pipe(shape.up, 2 * seed), timer, self._wake)
        self._down = Way(Pipe(shape.down, 2 * seed + 1), timer, self._wake)
        self._connections: set[RelayedConnection] = set()
        self._accepted = 0
        self._connecting: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self._listener: socket.socket | None = None
        self._target: tuple[int, tuple[str, int]] = (socket.AF_INET, ("", 0))

    async def start(self, listen: str = "127.0.0.1:0") -> str:
        """Listen, and return the address as `host:port`.

        Raises:
            ConfigError: `listen` is not loopback, or `to` is no address.
            Unavailable: the port is taken.
        """
        host, port = split_address(listen, "listen")
        if not is_loopback(host):
            raise ConfigError(
                f"{listen!r} is not a loopback address; the link is for this machine only", field="listen"
            )
        family, address = await _resolve(host, port, "listen")
        listener = _tcp_socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            listener.close()
            raise Unavailable(f"cannot listen on {listen}: {error.strerror}", field="listen", code="OUT-109") from error
        bound = listener.getsockname()[1]
        self._listener = listener
        try:
            self._target = await _resolve(*self._to, "to")
        except ConfigError:
            listener.close()
            raise
        listener.listen(128)
        self._accepting = asyncio.get_running_loop().create_task(self._accept(listener))
        return f"[{host}]:{bound}" if family == socket.AF_INET6 else f"{host}:{bound}"

    async def stop(self) -> None:
        """Cut everything and listen no longer."""
        self._end_trace()
        if self._accepting is not None and self._listener is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
            self._listener.close()
        self.cut()
        if self._connecting:
            await asyncio.wait(self._connecting)

    @property
    def counters(self) -> Counters:
        """Payload and connections since the start."""
        return Counters(self._up.delivered_bytes, self._down.delivered_bytes, self._accepted)

    def set_shape(self, shape: LinkShape) -> None:
        """Change the link to `shape` and end a trace."""
        self._end_trace()
        self._apply(shape)

    def play(self, trace: LinkTrace) -> None:
        """Play round trip and rates of `trace` in a loop; jitter and queue stay."""
        self._end_trace()
        self._follow(trace, self._shape, asyncio.get_running_loop().time())

    def stall(self, seconds: float) -> None:
        """Hold the link for `seconds`."""
        self._up.stall(seconds)
        self._down.stall(seconds)

    def cut(self) -> None:
        """Abort all connections; what is under way is lost."""
        for task in self._connecting:
            task.cancel()
        for connection in tuple(self._connections):
            connection.abort()
        self._up.clear()
        self._down.clear()

    def _end_trace(self) -> None:
        if self._next_point is not None:
            self._next_point.cancel()
            self._next_point = None

    def _follow(self, trace: LinkTrace, like: LinkShape, began: float) -> None:
        loop = asyncio.get_running_loop()
        # A timer may be early by its resolution; half a millisecond later is surely after the point it was set for.
        passed = loop.time() - began + 0.0005
        self._apply(replace(trace.at(passed), jitter_s=like.jitter_s, queue_bytes=like.queue_bytes))
        self._next_point = loop.call_at(began + trace.next_time(passed), self._follow, trace, like, began)

    def _apply(self, shape: LinkShape) -> None:
        self._shape = shape
        self._up.reshape(shape.up)
        self._down.reshape(shape.down)

    def _wake(self, now: float) -> float:
        """Hold the link while its radio wakes for what comes at `now`; return for how many seconds."""
        waits_s = self._radio.use(now) if self._radio else 0.0
        if waits_s:
            self.stall(waits_s)
        return waits_s

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                edge, _ = await loop.sock_accept(listener)
            except OSError as error:  # such as no file descriptors left; existing connections go on
                _log.warning("cannot accept a connection: %s", error)
                await asyncio.sleep(0.1)
                continue
            if len(self._connections) + len(self._connecting) >= _MAX_CONNECTIONS:
                _log.warning("there are %d connections already; one more is refused", _MAX_CONNECTIONS)
                abort(edge)
                continue
            self._accepted += 1
            task = loop.create_task(self._connect(edge))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _connect(self, edge: socket.socket) -> None:
        family, address = self._target
        verifier = _tcp_socket(family)
        try:
            # The kernel has answered the edge's SYN at once. Over a real link the answer takes a round trip.
            await asyncio.sleep(self._wake(time.monotonic()) + self._shape.rtt_s)
            await asyncio.get_running_loop().sock_connect(verifier, address)
        except (OSError, asyncio.CancelledError) as error:
            if isinstance(error, OSError):
                _log.warning("%s:%d does not answer: %s", *self._to, error.strerror)
            abort(edge)
            abort(verifier)
            return
        RelayedConnection(edge, verifier, self._up, self._down, self._connections)


async def _resolve(host: str, port: int, field: str) -> tuple[int, tuple[str, int]]:
    """Return family and address of a host; raises `ConfigError` on `field`."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"there is no host {host!r}: {error.strerror}", field=field) from error
    family, _, _, _, address = found[0]
    return family, (str(address[0]), int(address[1]))


def run_on_time(work: Coroutine[Any, Any, int]) -> int:
    """Run `work` like `asyncio.run`, with timers that are exact to some 20 microseconds.

    A relay needs it, alone in its process: whatever else the event loop does makes the link late. select() takes its
    timeout in microseconds, where epoll_wait() rounds up to the next millisecond; and the kernel by default adds 50
    microseconds of slack to each timer of a process.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:  # Linux; elsewhere timers are a little later
        prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
    gc.freeze()  # what was imported is never garbage; collections then take microseconds
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        return runner.run(work)
