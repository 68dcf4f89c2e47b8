"""The way of lessons to whoever learns from them: one push at a time, what waits meanwhile bounded in size and age."""

from __future__ import annotations

import logging
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

MAX_AGE_S = 24 * 3600.0
MAX_WAITING_BYTES = 8 << 20
MAX_PUSH_BYTES = 4 << 20
ANSWER_WITHIN_S = 30.0
RETRY_S = 2.0

log = logging.getLogger(__name__)


class LessonSink(Protocol):
    """A trainer, here or in another process. Neither method waits; each may raise anything."""

    def push(self, records: tuple[bytes, ...]) -> Future[object]:
        """Hand over encoded records (`LessonRecord`); the answer says that the next push may come."""
        ...

    def forget(self, key_salt: bytes) -> Future[int]:
        """Drop all lessons of one API key, and answer how many positions these were."""
        ...


@dataclass(frozen=True, slots=True)
class Packed:
    """An encoded record, and what its keeping depends on.

    Attributes:
        rows: number of its rows.
        at_s: time of its first row, Unix seconds.
    """

    data: bytes
    rows: int
    key_salt: bytes
    at_s: float


@dataclass(slots=True)
class DeliveryCounts:
    """Numbers of rows since the start.

    Attributes:
        delivered: taken by the sink.
        crowded_out: dropped because the sink was slow.
        failed: lost in a push that failed or was not answered.
        expired: dropped because they were too old.
        forgotten: dropped because their key was to be forgotten.
    """

    delivered: int = 0
    crowded_out: int = 0
    failed: int = 0
    expired: int = 0
    forgotten: int = 0


class Delivery:
    """Records on their way to a sink, used by one thread, which never waits."""

    def __init__(self, sink: LessonSink) -> None:
        self.counts = DeliveryCounts()
        self._sink = sink
        self._waiting: deque[Packed] = deque()
        self._waiting_bytes = 0
        self._flight: Future[object] | None = None
        self._flight_rows = 0
        self._since = 0.0
        self._not_before = 0.0
        self._failing = False

    @property
    def in_flight(self) -> bool:
        """Whether a push is unanswered."""
        return self._flight is not None

    def add(self, packed: Packed) -> None:
        """Let a record wait for the next push; the oldest give way where too many bytes wait."""
        self._waiting.append(packed)
        self._waiting_bytes += len(packed.data)
        while self._waiting_bytes > MAX_WAITING_BYTES:
            self.counts.crowded_out += self._pop().rows

    def push(self, now: float, wall_s: float) -> bool:
        """Push what waits, if nothing is unanswered, and return whether that was tried.

        Args:
            now: present time on any clock that never goes back, in seconds.
            wall_s: present time, Unix seconds.
        """
        while self._waiting and self._waiting[0].at_s < wall_s - MAX_AGE_S:
            self.counts.expired += self._pop().rows
        if self._flight is not None or not self._waiting or now < self._not_before:
            return False
        batch = [self._pop()]
        while self._waiting and sum(len(each.data) for each in (*batch, self._waiting[0])) <= MAX_PUSH_BYTES:
            batch.append(self._pop())
        self._flight_rows, self._since = sum(each.rows for each in batch), now
        try:
            self._flight = self._sink.push(tuple([each.data for each in batch]))
        except Exception as error:  # a sink may be anything, and a text knows nothing of it
            self._lose(error, now)
        return True

    def forget(self, key_salt: bytes) -> None:
        """Drop what waits of a key."""
        kept = [packed for packed in self._waiting if packed.key_salt != key_salt]
        self.counts.forgotten += sum(packed.rows for packed in self._waiting) - sum(packed.rows for packed in kept)
        self._waiting = deque(kept)
        self._waiting_bytes = sum(len(packed.data) for packed in kept)

    def take_answer(self, now: float) -> None:
        """Take the answer to the last push, if it is there or has not come in time, at time `now` in seconds."""
        flight = self._flight
        if flight is None:
            return
        if not flight.done():
            if now - self._since > ANSWER_WITHIN_S:
                flight.cancel()
                self._lose(TimeoutError(f"no answer within {ANSWER_WITHIN_S:g} s"), now)
            return
        error = TimeoutError("it was cancelled") if flight.cancelled() else flight.exception()
        if error is not None:
            self._lose(error, now)
            return
        self._flight, self._failing = None, False
        self.counts.delivered += self._flight_rows

    def _lose(self, error: BaseException, now: float) -> None:
        if not self._failing:
            log.warning("lessons are lost, since the trainer does not take them: %r", error)
        self._flight, self._failing, self._not_before = None, True, now + RETRY_S
        self.counts.failed += self._flight_rows

    def _pop(self) -> Packed:
        packed = self._waiting.popleft()
        self._waiting_bytes -= len(packed.data)
        return packed
