"""The connections over the link, a stream each way, and the two directions that the streams share."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import struct
import time
from collections.abc import Callable

from outrider.deploy.link.pipe import Pipe
from outrider.deploy.link.shape import MTU_BYTES, WayShape

_log = logging.getLogger(__name__)

_READ_BYTES = 16 << 10  # small, so that streams alternate
_SO_TIMESTAMPNS = 35  # Linux; the socket module does not have it
_TIMESPEC = struct.Struct("@qq")
_MAX_LATE_S = 0.05  # an older kernel stamp is not believed: the wall clock may have been set
_ABORT = struct.pack("ii", 1, 0)  # struct linger: close() sends a reset


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
