"""The buffer of lessons: a fair sample, no key above its share, rehearsal, forgetting and age."""

from __future__ import annotations

from collections import Counter

import pytest
from lessons_for_tests import bigram_target, text_record

from outrider.cloud.learning import buffer as buffering
from outrider.cloud.learning.buffer import Buffer
from outrider.cloud.learning.lesson_record import LessonRecord
from outrider.proto.salts import salted

VOCAB = 64
TARGET = bigram_target(VOCAB, seed=0)


def record(number: int, *, key: str = "", prompt_class: int = 0, at_s: float = 1e9, length: int = 10) -> LessonRecord:
    return text_record(
        TARGET,
        vocab=VOCAB,
        seed=number,
        key=key or f"key-{number}",
        prompt_class=prompt_class,
        at_s=at_s,
        length=length,
    )


def positions(records: list[LessonRecord]) -> int:
    return sum(map(len, records))


def sampled(buffer: Buffer) -> list[LessonRecord]:
    """All that is in the sample of a buffer without new records."""
    return buffer.draw(10**6, 0)


def test_half_of_a_batch_is_new_and_half_is_of_the_sample() -> None:
    buffer = Buffer(seed=1)
    for number in range(40):
        buffer.add(record(number))
    buffer.draw(400, 0)
    assert buffer.waiting == 0
    for number in range(40, 60):
        buffer.add(record(number))
    drawn = buffer.draw(100, 1)
    assert positions(drawn) == 100
    seeds = [each.sampling.seed for each in drawn]
    assert sum(seed >= 40 for seed in seeds) == 5
    assert len(set(seeds)) == 10
    assert buffer.waiting == 150


def test_a_share_of_a_batch_is_rehearsed_and_never_ages() -> None:
    corpus = [record(1000 + number, key="corpus", at_s=0.0) for number in range(30)]
    buffer = Buffer(corpus, rehearsed=0.1)
    for number in range(30):
        buffer.add(record(number))
    buffer.expire(1e9)
    drawn = buffer.draw(200, 0)
    assert sum(each.sampling.seed >= 1000 for each in drawn) == 2
    assert positions(drawn) == 200
    assert not any(each.sampling.seed >= 1000 for each in Buffer().draw(200, 0))


def test_no_key_has_more_than_its_share_of_the_sample(monkeypatch) -> None:
    monkeypatch.setattr(buffering, "CLASS_POSITIONS", 1000)
    buffer = Buffer(key_share=0.05)
    for number in range(300):
        buffer.add(record(number, key="flood"))
        buffer.add(record(number + 1000, key=f"key-{number % 30}"))
    buffer.draw(10**6, 0)
    kept = Counter(each.key_salt for each in sampled(buffer))
    assert kept[salted(b"", "flood")] == 5
    assert max(kept.values()) <= 5
    assert sum(kept.values()) * 10 <= 1000


def test_a_key_that_floods_takes_turns_with_the_others_among_the_new(monkeypatch) -> None:
    monkeypatch.setattr(buffering, "NEW_POSITIONS", 300)
    buffer = Buffer()
    for number in range(500):
        buffer.add(record(number, key="flood"))
    for number in range(5):
        buffer.add(record(1000 + number, key="quiet"))
    assert buffer.waiting <= 300
    new = buffer.draw(100, 0)[:10]
    assert sum(each.sampling.seed >= 1000 for each in new) >= 2


def test_the_sample_is_fair_to_old_and_new_and_the_classes_take_turns(monkeypatch) -> None:
    early = 0
    monkeypatch.setattr(buffering, "CLASS_POSITIONS", 200)
    for seed in range(20):
        buffer = Buffer(seed=seed, key_share=1.0)
        for number in range(80):
            buffer.add(record(number, length=5))
        buffer.draw(10**6, 0)
        kept = [each.sampling.seed for each in sampled(buffer)]
        assert len(kept) == 40
        early += sum(number < 40 for number in kept)
    assert early == pytest.approx(400, abs=60)  # of 800; a queue of the newest would keep none
    monkeypatch.undo()
    buffer = Buffer(seed=0)
    for number in range(60):
        buffer.add(record(number, prompt_class=int(number % 10 == 0)))
    buffer.draw(10**6, 0)
    drawn = Counter(each.prompt_class for each in buffer.draw(80, 1))
    assert drawn == {0: 2, 1: 2}


def test_forgetting_a_key_leaves_nothing_of_it() -> None:
    buffer = Buffer()
    for number in range(10):
        buffer.add(record(number, key="one" if number % 2 else "other"))
    buffer.draw(50, 0)  # some are in the sample, some wait
    assert buffer.waiting
    assert buffer.forget(salted(b"", "one")) == 50
    assert len(buffer) == 50
    left = buffer.draw(10**6, 1)
    assert {each.key_salt for each in left} == {salted(b"", "other")}
    assert buffer.forget(salted(b"", "one")) == 0


def test_records_beyond_the_retention_are_dropped_wherever_they_are(monkeypatch) -> None:
    monkeypatch.setattr(buffering, "RETENTION_S", 60.0)
    buffer = Buffer()
    for number in range(10):
        buffer.add(record(number, at_s=1000.0 + 10 * number))
    buffer.draw(50, 0)
    assert buffer.expire(1100.0) == 40
    assert {each.at_s for each in buffer.draw(10**6, 1)} == {1040.0 + 10 * number for number in range(6)}
    assert Buffer().expire(1e12) == 0
