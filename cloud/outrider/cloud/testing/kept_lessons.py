"""A sink of lessons in this process, for tests and benchmarks."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from outrider.cloud.learning.record import LessonRecord


class KeptLessons:
    """A sink (`LessonSink`) that keeps every record."""

    def __init__(self) -> None:
        self._records: list[LessonRecord] = []
        self._changed = threading.Condition()

    def push(self, records: tuple[bytes, ...]) -> Future[object]:
        """Take records and answer at once."""
        answer: Future[object] = Future()
        with self._changed:
            self._records += map(LessonRecord.decode, records)
            self._changed.notify_all()
        answer.set_result(None)
        return answer

    def forget(self, key_salt: bytes) -> Future[int]:
        """Drop the records of a key."""
        answer: Future[int] = Future()
        with self._changed:
            gone = [record for record in self._records if record.key_salt == key_salt]
            self._records = [record for record in self._records if record.key_salt != key_salt]
        answer.set_result(sum(map(len, gone)))
        return answer

    @property
    def records(self) -> list[LessonRecord]:
        """The records so far, in the order of their coming."""
        with self._changed:
            return list(self._records)

    def wait_for(self, count: int, timeout_s: float = 30.0) -> list[LessonRecord]:
        """Return the records once there are `count`; raise `TimeoutError` if that takes too long."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._records) >= count, timeout_s):
                raise TimeoutError(f"{len(self._records)} of {count} records came within {timeout_s:g} s")
            return list(self._records)
