"""A sink of lessons in this process, for tests and benchmarks."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from outrider.cloud.learning.lesson_record import LessonRecord


class KeptLessons:
    """A sink (`LessonSink`) that keeps every record."""

    def __init__(self) -> None:
        self._records: list[bytes] = []
        self._changed = threading.Condition()

    def push(self, records: tuple[bytes, ...]) -> Future[object]:
        """Take records and answer at once."""
        answer: Future[object] = Future()
        with self._changed:
            self._records += records
            self._changed.notify_all()
        answer.set_result(None)
        return answer

    def forget(self, key_salt: bytes) -> Future[int]:
        """Drop the records of a key."""
        answer: Future[int] = Future()
        with self._changed:
            decoded = [(LessonRecord.decode(data), data) for data in self._records]
            self._records = [data for record, data in decoded if record.key_salt != key_salt]
        answer.set_result(sum(len(record) for record, _ in decoded if record.key_salt == key_salt))
        return answer

    @property
    def records(self) -> list[LessonRecord]:
        """The records so far, in the order of their coming."""
        with self._changed:
            return list(map(LessonRecord.decode, self._records))

    def wait_for(self, count: int, timeout_s: float = 30.0) -> list[LessonRecord]:
        """Return the records once there are `count`; raise `TimeoutError` if that takes too long."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._records) >= count, timeout_s):
                raise TimeoutError(f"{len(self._records)} of {count} records came within {timeout_s:g} s")
            return list(map(LessonRecord.decode, self._records))
