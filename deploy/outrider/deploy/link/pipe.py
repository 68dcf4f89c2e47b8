"""One direction of a link, without I/O: bytes in, bytes out later. The clock is an argument.

A chunk goes through two stages, in order:

1. *Queue*: it leaves in segments of up to `MTU_BYTES`, one after the other; n bytes take n / rate. A rate that changes
   while a segment is leaving counts for the rest of that segment.
2. *Flight*: each segment then takes delay + jitter, but never overtakes the one before. A delay that changes counts for
   segments that leave from then on.

Nothing is dropped. A full queue shows in `room`, and the caller does not read more from the sender: to the two ends
that is TCP's own back-pressure.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass
from typing import Any

from outrider.deploy.link.shape import MTU_BYTES, WayShape

# A link without a limit on its rate holds no more than this: the window of a long, fat connection.
MAX_IN_FLIGHT_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Arrival:
    """Bytes of a stream that come out of a pipe, and when they were due; no bytes are its end."""

    stream: Any
    data: bytes
    due_s: float


class Pipe:
    """One direction of a link, shared by all streams in it, first come, first served."""

    def __init__(self, shape: WayShape, seed: int = 0) -> None:
        self._shape = shape
        self._random = random.Random(seed)
        self._queue: deque[tuple[Any, bytes]] = deque()  # segments
        self._queued_bytes = 0
        self._served_bytes = 0.0  # bytes of the first segment that have left
        self._served_at = -math.inf  # time up to which the queue has been served
        self._flight: deque[Arrival] = deque()
        self._flight_bytes = 0
        self._last_due = -math.inf
        self._stalled_until = -math.inf

    def room(self, now: float) -> int:
        """Return how many bytes may be pushed."""
        self._advance(now)
        queue = self._shape.queue_bytes - self._queued_bytes
        return max(0, min(queue, MAX_IN_FLIGHT_BYTES - self._flight_bytes))

    def push(self, now: float, stream: Any, data: bytes) -> None:
        """Send bytes; `b""` is the end of the stream.

        Args:
            now: when the bytes reached the link; it may lie a little before the time of the last call.
            stream: what `due` names with the bytes.
            data: should not exceed `room`; more is held all the same.
        """
        self._advance(now)
        if not self._queue:
            self._served_at = max(self._served_at, now)
        # Without a limit on the rate, bytes pushed together leave together.
        size = MTU_BYTES if self._shape.bytes_per_s < math.inf else max(len(data), 1)
        self._queue.extend((stream, data[start : start + size]) for start in range(0, max(len(data), 1), size))
        self._queued_bytes += len(data)

    def due(self, now: float) -> list[Arrival]:
        """Take out what has arrived by `now`, in order."""
        self._advance(now)
        arrived = []
        while self._flight and self._flight[0].due_s <= now:
            arrived.append(self._flight.popleft())
            self._flight_bytes -= len(arrived[-1].data)
        return arrived

    def next_time(self) -> float:
        """Return a time before which nothing is due; `inf`: nothing is under way, or nothing moves."""
        if self._flight:
            return self._flight[0].due_s
        if self._queue:
            return max(self._last_due, self._leaves_at() + self._shape.delay_s)
        return math.inf

    def half_empty_time(self, now: float) -> float:
        """Return when half of the queue will be free if nothing more comes and the rate stays."""
        self._advance(now)
        if self._flight_bytes > MAX_IN_FLIGHT_BYTES // 2:
            return self._flight[0].due_s
        too_many = self._queued_bytes - self._shape.queue_bytes // 2
        if too_many <= 0:
            return now
        rate = self._shape.bytes_per_s
        return self._served_at + (too_many / rate if rate else math.inf)

    def reshape(self, now: float, shape: WayShape) -> None:
        """Change the link to `shape`; what is in flight arrives when it would have."""
        self._advance(now)
        self._shape = shape

    def stall(self, now: float, seconds: float) -> None:
        """Hold everything until `now + seconds`: nothing leaves the queue, nothing arrives."""
        self._advance(now)
        until = max(self._stalled_until, now + seconds)
        shift = until - max(self._stalled_until, now)
        self._stalled_until = until
        self._flight = deque(Arrival(a.stream, a.data, max(a.due_s, now) + shift) for a in self._flight)
        self._last_due = max(self._last_due, now) + shift
        self._served_at = max(self._served_at, now) + shift

    def clear(self) -> None:
        """Lose everything that is under way."""
        self._queue.clear()
        self._flight.clear()
        self._queued_bytes = self._flight_bytes = 0
        self._served_bytes = 0.0

    def _leaves_at(self) -> float:
        """Return when the first segment of the queue will have left."""
        left = len(self._queue[0][1]) - self._served_bytes
        rate = self._shape.bytes_per_s
        return self._served_at + max(left, 0.0) / rate if rate else math.inf

    def _advance(self, now: float) -> None:
        """Serve the queue up to `now`."""
        while self._queue:
            left_at = self._leaves_at()
            if left_at > now:
                if now > self._served_at:
                    self._served_bytes += (now - self._served_at) * self._shape.bytes_per_s
                    self._served_at = now
                return
            stream, data = self._queue.popleft()
            self._served_at = left_at
            self._served_bytes = 0.0
            self._queued_bytes -= len(data)
            self._fly(stream, data, left_at)

    def _fly(self, stream: Any, data: bytes, left_at: float) -> None:
        shape = self._shape
        delay = shape.delay_s + (self._random.uniform(0.0, shape.jitter_s) if shape.jitter_s else 0.0)
        self._last_due = max(self._last_due, left_at + delay)
        self._flight.append(Arrival(stream, data, self._last_due))
        self._flight_bytes += len(data)
