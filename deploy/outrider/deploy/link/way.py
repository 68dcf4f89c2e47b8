"""One direction of the link: a pipe, its timer, and the streams that share it."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from typing import Protocol

from outrider.deploy.link.pipe import Pipe
from outrider.deploy.link.shape import MTU_BYTES, WayShape
from outrider.deploy.link.sockets import receive

_READ_BYTES = 16 << 10  # small, so that streams alternate


class Traveller(Protocol):
    """A stream of the way."""

    source: socket.socket
    finished: bool  # the source has ended
    reading_since: float

    @property
    def gone(self) -> bool:
        """Whether the connection is closed."""

    def update_reading(self) -> None:
        """Begin or stop reading, after the way or the source has changed."""

    def deliver(self, data: bytes) -> None:
        """Send bytes that are due; none: the end."""

    def abort(self) -> None:
        """Reset the connection: the source has failed."""


class Timer:
    """How early a timer must be set to be on time: the median lateness, in seconds."""

    _STEP_S = 1e-6
    _MAX_S = 1.5e-4

    def __init__(self) -> None:
        self.early_s = 30e-6

    def was_late(self, seconds: float) -> None:
        """Move a step towards `seconds`; steps of one size settle at the median."""
        step = self._STEP_S if seconds > 0 else -self._STEP_S
        self.early_s = min(max(self.early_s + step, 0.0), self._MAX_S)


class Way:
    """One direction of the link."""

    def __init__(self, pipe: Pipe, timer: Timer) -> None:
        self._pipe = pipe
        self._timer = timer
        self._handle: asyncio.TimerHandle | None = None
        self._when = 0.0  # time for which `_handle` is set
        self._streams: set[Traveller] = set()
        self.full = False
        self.delivered_bytes = 0

    def add(self, stream: Traveller) -> None:
        """Add a stream that waits for room."""
        self._streams.add(stream)

    def discard(self, stream: Traveller) -> None:
        """Remove a stream; what it has under way still takes its time."""
        self._streams.discard(stream)

    def read(self, stream: Traveller) -> None:
        """Read from the stream's source while there is room."""
        now = time.monotonic()
        room = self._pipe.room(now)
        if room:
            try:
                data, age_s = receive(stream.source, min(room, _READ_BYTES))
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                stream.abort()
                return
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
            if not arrival.stream.gone:
                self.delivered_bytes += len(arrival.data)
                arrival.stream.deliver(arrival.data)
        if arrivals and was_ahead:
            self._timer.was_late(time.monotonic() - self._when)
        if self.full and self._pipe.half_empty_time(now) <= now:
            self.full = False
            self._update_reading()
        self._set_timer(now)

    def _update_reading(self) -> None:
        for stream in self._streams:
            stream.update_reading()
