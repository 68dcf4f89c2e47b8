"""The records that a trainer holds: new ones, a fair sample of older ones, and some of the drafter's own corpus.

They are in memory alone. A sample of each class of prompts keeps what traffic forgets, and no key fills more than a
twentieth of it; a key that floods takes turns with the others among the new ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TypeVar

import numpy as np

from outrider.cloud.learning.lesson_record import LessonRecord
from outrider.cloud.learning.trainer_settings import KEY_SHARE, REHEARSED

CLASS_POSITIONS = 100_000  # about 33 MB
NEW_POSITIONS = 32_768  # not learned from yet; older ones go to the sample unread
RETENTION_S = 24 * 3600.0

Item = TypeVar("Item")


@dataclass(slots=True)
class _Kept:
    """A record of the sample; those of least `rank`, a random number, go first."""

    rank: float
    record: LessonRecord


@dataclass(slots=True)
class _Class:
    """The sample of one class of prompts, and the positions of each key in it."""

    kept: list[_Kept] = field(default_factory=list)
    positions: dict[bytes, int] = field(default_factory=dict)


class Buffer:
    """Records to learn from.

    The sample of a class is that of a random rank for every record: those of highest rank stay, so each record that
    came is as likely to be in it as any other.

    Args:
        rehearsal: records of the drafter's own corpus; they have no key, and do not age.
        seed: seed of the sample and of `draw`.
        class_positions: positions of a class in the sample.
        key_share: largest share of these that one key has.
        new_positions: positions that wait to be learned from; the oldest go to the sample unread.
        rehearsed: share of a batch that is rehearsed, where there is something to.
        retention_s: age at which a record is dropped, in seconds.
    """

    def __init__(
        self,
        rehearsal: Sequence[LessonRecord] = (),
        *,
        seed: int = 0,
        class_positions: int = CLASS_POSITIONS,
        key_share: float = KEY_SHARE,
        new_positions: int = NEW_POSITIONS,
        rehearsed: float = REHEARSED,
        retention_s: float = RETENTION_S,
    ) -> None:
        self._rehearsal = list(rehearsal)
        self._ranks = np.random.default_rng([seed, 1])
        self._seed = seed
        self._class_positions = class_positions
        self._key_positions = int(class_positions * key_share)
        self._new_positions = new_positions
        self._retention_s = retention_s
        self._rehearsed = rehearsed
        self._new: dict[bytes, deque[LessonRecord]] = {}
        self._sample: dict[int, _Class] = {}
        self.rehearsed_keys = {record.key_salt for record in self._rehearsal}
        self.waiting = 0
        """Positions of new records."""

    def __len__(self) -> int:
        """Return the number of positions, without rehearsal's."""
        return self.waiting + sum(sum(each.positions.values()) for each in self._sample.values())

    @property
    def num_waiting_records(self) -> int:
        """Number of new records."""
        return sum(map(len, self._new.values()))

    def add(self, record: LessonRecord) -> None:
        """Take a new record; the key with the most positions makes room."""
        self._new.setdefault(record.key_salt, deque()).append(record)
        self.waiting += len(record)
        while self.waiting > self._new_positions and self.num_waiting_records > 1:
            flooding = max(self._new, key=lambda key: sum(map(len, self._new[key])))
            self._into_sample(self._take_new(flooding))

    def draw(self, positions: int, step: int) -> list[LessonRecord]:
        """Return records of about `positions` positions for optimizer step `step`: half new, half of the sample.

        A share of all is rehearsed where there is something to. Keys take turns among the new records, classes in the
        sample. What was new is in the sample from now on.
        """
        choose = np.random.default_rng([self._seed, 2, step])
        rehearsed = _up_to(positions * self._rehearsed, _shuffled(choose, self._rehearsal))
        left = positions - sum(map(len, rehearsed))
        older = _up_to(left / 2, self._of_sample(choose))
        new = _up_to(left - sum(map(len, older)), self._of_new())
        for record in new:
            self._into_sample(record)
        return [*new, *older, *rehearsed]

    def expire(self, now: float) -> int:
        """Drop records older than the retention at Unix time `now`, and return their number of positions."""
        return self._drop(lambda record: record.at_s < now - self._retention_s)

    def forget(self, key_salt: bytes) -> int:
        """Drop all records of a key, and return their number of positions."""
        return self._drop(lambda record: record.key_salt == key_salt)

    def _drop(self, unwanted: Callable[[LessonRecord], bool]) -> int:
        before = len(self)
        waiting = {key: deque(each for each in records if not unwanted(each)) for key, records in self._new.items()}
        self._new = {key: records for key, records in waiting.items() if records}
        self.waiting = sum(sum(map(len, records)) for records in self._new.values())
        for sample in self._sample.values():
            sample.kept = [each for each in sample.kept if not unwanted(each.record)]
            sample.positions.clear()
            for each in sample.kept:
                self._count(sample, each.record, 1)
        return before - len(self)

    def _take_new(self, key: bytes) -> LessonRecord:
        record = self._new[key].popleft()
        self.waiting -= len(record)
        if not self._new[key]:
            del self._new[key]
        return record

    def _of_new(self) -> Iterator[LessonRecord]:
        while self._new:
            for key in list(self._new):
                yield self._take_new(key)

    def _of_sample(self, choose: np.random.Generator) -> Iterator[LessonRecord]:
        classes = [_shuffled(choose, sample.kept) for _, sample in sorted(self._sample.items())]
        for turn in zip_longest(*classes):
            yield from (each.record for each in turn if each is not None)

    def _into_sample(self, record: LessonRecord) -> None:
        sample = self._sample.setdefault(record.prompt_class, _Class())
        sample.kept.append(_Kept(float(self._ranks.random()), record))
        self._count(sample, record, 1)
        while sample.positions.get(record.key_salt, 0) > self._key_positions:
            self._evict(sample, [each for each in sample.kept if each.record.key_salt == record.key_salt])
        while sum(sample.positions.values()) > self._class_positions:
            self._evict(sample, sample.kept)

    def _evict(self, sample: _Class, among: list[_Kept]) -> None:
        least = min(among, key=lambda each: each.rank)
        sample.kept.remove(least)
        self._count(sample, least.record, -1)

    @staticmethod
    def _count(sample: _Class, record: LessonRecord, sign: int) -> None:
        left = sample.positions.get(record.key_salt, 0) + sign * len(record)
        if left:
            sample.positions[record.key_salt] = left
        else:
            sample.positions.pop(record.key_salt, None)


def _up_to(positions: float, records: Iterable[LessonRecord]) -> list[LessonRecord]:
    """Return the first records until they have so many positions; no further one is taken."""
    taken: list[LessonRecord] = []
    source, total = iter(records), 0
    while total < positions and (record := next(source, None)) is not None:
        taken.append(record)
        total += len(record)
    return taken


def _shuffled(choose: np.random.Generator, items: Sequence[Item]) -> Iterator[Item]:
    return (items[index] for index in choose.permutation(len(items)).tolist())
