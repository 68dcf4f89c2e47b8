"""One direction of a link of packets, without I/O: loss, reordering, and a queue that drops what it has no room for."""

from __future__ import annotations

import bisect
import math
import random
from typing import Any

from outrider.deploy.link.pipe import Arrival, Pipe
from outrider.deploy.link.shape import PacketFaults, WayShape


class PacketPipe(Pipe):
    """A direction that carries each packet whole, or not at all.

    Attributes:
        lost: packets lost.
        dropped: packets dropped since the queue was full.
    """

    def __init__(self, shape: WayShape, faults: PacketFaults, seed: int = 0) -> None:
        super().__init__(shape, seed)
        self.lost = self.dropped = 0
        self._faults = faults
        self._chances = random.Random(f"packets {seed}")
        self._bursting = True
        self._changes_at = -math.inf  # end of the present burst, or beginning of the next one

    def push(self, now: float, stream: Any, data: bytes) -> None:
        """Send one packet, or drop it where the queue has no room."""
        if self.room(now) < len(data):
            self.dropped += 1
            return
        super().push(now, stream, data)

    def next_time(self) -> float:
        """Return a time before which nothing is due; a packet in flight may yet be overtaken."""
        queued = self._leaves_at() + self._shape.delay_s if self._queue else math.inf
        return min(self._flight[0].due_s if self._flight else math.inf, queued)

    def _pieces(self, data: bytes) -> list[bytes]:
        return [data]

    def _fly(self, stream: Any, data: bytes, left_at: float) -> None:
        if self._loses(left_at):
            self.lost += 1
            return
        if self._chances.random() >= self._faults.reordered:
            super()._fly(stream, data, left_at)
            return
        self._hold(Arrival(stream, data, left_at + 2 * self._shape.delay_s))

    def _hold(self, arrival: Arrival) -> None:
        place = len(self._flight)
        if self._flight and arrival.due_s < self._flight[-1].due_s:
            place = bisect.bisect_right(self._flight, arrival.due_s, key=lambda held: held.due_s)
        self._flight.insert(place, arrival)
        self._flight_bytes += len(arrival.data)

    def _loses(self, at: float) -> bool:
        loss = self._faults.loss
        if not loss.burst_s or not loss.share:
            return self._chances.random() < loss.share
        if self._changes_at == -math.inf:  # the first packet finds no burst
            self._changes_at = at
        while self._changes_at <= at:
            self._bursting = not self._bursting
            mean_s = loss.burst_s if self._bursting else loss.burst_s * (1 - loss.share) / loss.share
            self._changes_at += self._chances.expovariate(1 / mean_s)
        return self._bursting
