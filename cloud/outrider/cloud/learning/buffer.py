"""The records that a trainer holds: new ones, a fair sample of older ones, and some of the drafter's own corpus.

They are in memory alone. A sample of each class of prompts keeps what traffic forgets, and no key fills more than a
twentieth of it; a key that floods takes turns with the others among the new ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, zip_longest

import numpy as np

from outrider.cloud.learning.lesson_record import LessonRecord
from outrider.cloud.learning.trainer_settings import KEY_SHARE, REHEARSED

CLASS_POSITIONS = 100_000  # of a class in the sample, about 33 MB
NEW_POSITIONS = 32_768  # not learned from yet; older ones go to the sample unread
RETENTION_S = 24 * 3600.0

_Ranked = tuple[float, LessonRecord]


class Buffer:
    """Records to learn from.

    Every record of the sample has a random rank, and those of highest rank stay, so each that came is as likely to be
    in the sample of its class as any other.

    Args:
        rehearsal: records of the drafter's own corpus; they have no key, and do not age.
        seed: seed of the sample and of `draw`.
        key_share: largest share of the positions of a class in the sample that one key has.
        rehearsed: share of a batch that comes from `rehearsal`, if that has any.
    """

    def __init__(
        self,
        rehearsal: Sequence[LessonRecord] = (),
        *,
        seed: int = 0,
        key_share: float = KEY_SHARE,
        rehearsed: float = REHEARSED,
    ) -> None:
        self._rehearsal = list(rehearsal)
        self._ranks = np.random.default_rng([seed, 1])
        self._seed = seed
        self._key_positions = int(CLASS_POSITIONS * key_share)
        self._rehearsed = rehearsed
        self._new: dict[bytes, deque[LessonRecord]] = {}  # by key
        self._sample: dict[int, list[_Ranked]] = {}  # by class
        self.rehearsed_keys = {record.key_salt for record in self._rehearsal}

    def __len__(self) -> int:
        """Return the number of positions, without rehearsal's."""
        return self.waiting + _positions(record for _, record in chain(*self._sample.values()))

    @property
    def waiting(self) -> int:
        """Positions of new records."""
        return _positions(chain(*self._new.values()))

    @property
    def num_waiting_records(self) -> int:
        """Number of new records."""
        return sum(map(len, self._new.values()))

    def add(self, record: LessonRecord) -> None:
        """Take a new record; the key with the most positions makes room."""
        self._new.setdefault(record.key_salt, deque()).append(record)
        while self.waiting > NEW_POSITIONS and self.num_waiting_records > 1:
            self._into_sample(self._take_new(max(self._new, key=lambda key: _positions(self._new[key]))))

    def draw(self, positions: int, step: int) -> list[LessonRecord]:
        """Return records of about `positions` positions for optimizer step `step`: half new, half of the sample.

        The share `rehearsed` of them comes from the drafter's own corpus. Keys take turns among the new records, and
        classes in the sample. New records that are drawn join the sample.
        """
        choose = np.random.default_rng([self._seed, 2, step])
        rehearsal = (self._rehearsal[index] for index in choose.permutation(len(self._rehearsal)))
        rehearsed = _up_to(positions * self._rehearsed, rehearsal)
        left = positions - _positions(rehearsed)
        older = _up_to(left / 2, self._of_sample(choose))
        new = _up_to(left - _positions(older), self._of_new())
        for record in new:
            self._into_sample(record)
        return [*new, *older, *rehearsed]

    def expire(self, now: float) -> int:
        """Drop records older than the retention at Unix time `now`, and return their number of positions."""
        return self._drop(lambda record: record.at_s < now - RETENTION_S)

    def forget(self, key_salt: bytes) -> int:
        """Drop all records of a key, and return their number of positions."""
        return self._drop(lambda record: record.key_salt == key_salt)

    def _drop(self, unwanted: Callable[[LessonRecord], bool]) -> int:
        before = len(self)
        kept = {key: deque(each for each in records if not unwanted(each)) for key, records in self._new.items()}
        self._new = {key: records for key, records in kept.items() if records}
        for sample in self._sample.values():
            sample[:] = [each for each in sample if not unwanted(each[1])]
        return before - len(self)

    def _take_new(self, key: bytes) -> LessonRecord:
        record = self._new[key].popleft()
        if not self._new[key]:
            del self._new[key]
        return record

    def _of_new(self) -> Iterator[LessonRecord]:
        while self._new:
            for key in list(self._new):
                yield self._take_new(key)

    def _of_sample(self, choose: np.random.Generator) -> Iterator[LessonRecord]:
        samples = [sample for _, sample in sorted(self._sample.items())]
        shuffled = [[sample[index][1] for index in choose.permutation(len(sample))] for sample in samples]
        for turn in zip_longest(*shuffled):
            yield from (record for record in turn if record is not None)

    def _into_sample(self, record: LessonRecord) -> None:
        sample = self._sample.setdefault(record.prompt_class, [])
        sample.append((float(self._ranks.random()), record))
        self._trim(sample, [each for each in sample if each[1].key_salt == record.key_salt], self._key_positions)
        self._trim(sample, list(sample), CLASS_POSITIONS)

    @staticmethod
    def _trim(sample: list[_Ranked], among: list[_Ranked], limit: int) -> None:
        """Evict records of lowest rank `among` those of a sample until these have `limit` positions at most."""
        positions = _positions(record for _, record in among)
        for ranked in sorted(among, key=lambda each: each[0]):
            if positions <= limit:
                return
            sample.remove(ranked)
            positions -= len(ranked[1])


def _positions(records: Iterable[LessonRecord]) -> int:
    return sum(map(len, records))


def _up_to(positions: float, records: Iterable[LessonRecord]) -> list[LessonRecord]:
    """Return the first records until they have so many positions; no further one is taken."""
    taken: list[LessonRecord] = []
    source, total = iter(records), 0
    while total < positions and (record := next(source, None)) is not None:
        taken.append(record)
        total += len(record)
    return taken
