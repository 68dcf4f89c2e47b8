"""The way of lessons to a sink: one push at a time, bounded in size and age, by a clock that is an argument."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future

import pytest

from outrider.cloud.learning import lessons
from outrider.cloud.learning.lessons import ANSWER_WITHIN_S, MAX_AGE_S, RETRY_S, Delivery, Lost, Packed


class Scripted:
    """Keeps what is pushed; a test answers."""

    def __init__(self) -> None:
        self.pushes: list[tuple[bytes, ...]] = []
        self.answers: list[Future[object]] = []

    def push(self, records: tuple[bytes, ...]) -> Future[object]:
        self.pushes.append(records)
        self.answers.append(Future())
        return self.answers[-1]

    def forget(self, key_salt: bytes) -> Future[int]:
        raise NotImplementedError


def delivery_to(trainer: Scripted) -> tuple[Delivery, Counter[Lost]]:
    """Return a delivery, and the rows that it loses."""
    lost = Counter[Lost]()
    return Delivery(trainer, lambda why, rows: lost.update({why: rows})), lost


def packed(data: bytes, at_s: float = 0.0, key: bytes = b"k") -> Packed:
    return Packed(data, len(data), key, at_s)


def test_what_comes_during_a_push_goes_with_the_next_one() -> None:
    trainer = Scripted()
    delivery, lost = delivery_to(trainer)
    for data in (b"a", b"bb", b"ccc"):
        delivery.add(packed(data))
        delivery.take_answer(0.0)
        delivery.push(0.0, 0.0)
    assert trainer.pushes == [(b"a",)]
    trainer.answers[0].set_result(None)
    delivery.take_answer(1.0)
    delivery.push(1.0, 0.0)
    assert trainer.pushes == [(b"a",), (b"bb", b"ccc")]
    assert not lost


def test_a_push_is_no_larger_than_a_limit(monkeypatch) -> None:
    monkeypatch.setattr(lessons, "MAX_PUSH_BYTES", 5)
    trainer = Scripted()
    delivery, _ = delivery_to(trainer)
    for data in (b"1234567", b"ab", b"cd", b"ef"):
        delivery.add(packed(data))
    for _ in range(3):
        delivery.push(0.0, 0.0)
        trainer.answers[-1].set_result(None)
        delivery.take_answer(0.0)
    assert trainer.pushes == [(b"1234567",), (b"ab", b"cd"), (b"ef",)]


@pytest.mark.parametrize("late", [False, True])
def test_after_a_failure_the_next_push_comes_a_little_later(late, caplog) -> None:
    trainer = Scripted()
    delivery, lost = delivery_to(trainer)
    delivery.add(packed(b"lost"))
    delivery.push(0.0, 0.0)
    delivery.add(packed(b"kept"))
    now = ANSWER_WITHIN_S + 0.5 if late else 1.0
    if not late:
        trainer.answers[0].set_exception(RuntimeError("no room"))
    delivery.take_answer(now)
    delivery.push(now + 0.9 * RETRY_S, 0.0)
    assert trainer.pushes == [(b"lost",)]
    assert not delivery.in_flight
    delivery.push(now + RETRY_S, 0.0)
    assert trainer.pushes == [(b"lost",), (b"kept",)]
    assert lost == {Lost.PUSH: 4}
    assert caplog.text.count("lessons are lost") == 1


def test_the_oldest_give_way_and_what_is_a_day_old_is_dropped(monkeypatch) -> None:
    monkeypatch.setattr(lessons, "MAX_WAITING_BYTES", 6)
    trainer = Scripted()
    delivery, lost = delivery_to(trainer)
    for data, at_s in ((b"1st", 0.0), (b"2nd", 1.0), (b"3rd", 2.0)):
        delivery.add(packed(data, at_s))
    assert lost == {Lost.TRAINER: 3}
    delivery.push(0.0, MAX_AGE_S + 1.5)
    assert trainer.pushes == [(b"3rd",)]
    assert lost == {Lost.TRAINER: 3, Lost.AGE: 3}
