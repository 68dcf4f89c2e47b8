"""When a verifier's own drafter is given up, in one text or in all, and what becomes of its work."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from outrider.cloud.serving.batching import Batching
from outrider.cloud.serving.local_source import MAX_FAILURES, LocalSource
from outrider.cloud.serving.own_drafter import STUCK_S, DraftTask, OwnDrafter
from outrider.cloud.serving.slots import Slot
from outrider.cloud.serving.verifier_metrics import VerifierMetrics
from outrider.drafters import ProposalRule
from outrider.drafters.protocol import TokenPrefix
from outrider.proto.session import Drafted
from outrider.proto.session.verifier import Verified, VerifierRules, VerifierSession
from outrider.proto.types import CommittedToken, DraftToken, Open, Sampling

RULES = VerifierRules("v", "m", "ab" * 32, 1000, 400, frozenset({0}))


class States:
    """A drafter that only counts what is open of it."""

    version, steering, name = "1", None, "counted"

    def __init__(self) -> None:
        self.open_states: set[TokenPrefix] = set()

    def open(self, rule: ProposalRule) -> TokenPrefix:
        drafter = self

        class State(TokenPrefix):
            def propose(self, n: int) -> tuple[DraftToken, ...]:
                drafts = tuple(DraftToken(7, 0.9) for _ in range(n))
                self.extend([draft.id for draft in drafts])
                return drafts

            def close(self) -> None:
                drafter.open_states.discard(self)

        self.open_states.add(state := State())
        return state


class Hand:
    """Threads that work when the test says so."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self.waiting: list[DraftTask] = []
        self.stuck = False

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    def submit(self, task: DraftTask) -> None:
        self.waiting.append(task)

    def drop(self, task: DraftTask) -> bool:
        if task not in self.waiting:
            return False
        self.waiting.remove(task)
        return True

    def stop(self) -> bool:
        return not self.stuck

    def take(self, now: float = 1.0) -> DraftTask:
        """Begin the oldest task."""
        task = self.waiting.pop(0)
        task.text.begin(task.job.job, task.rule)
        task.began_at = now
        return task


class Engine:
    """A source and what its engine gives it."""

    def __init__(self, num_threads: int = 1) -> None:
        self.drafter, self.hand = States(), Hand(num_threads)
        self.source = LocalSource(OwnDrafter(self.drafter, 1000), self.hand)
        self.metrics = VerifierMetrics("m", "v")
        self.source.serve(self, Batching(0.05, 0), lambda event: event(), self.metrics)  # type: ignore[arg-type]
        self._by_key: dict[int, Slot] = {}
        self._keys = itertools.count()

    def get(self, key: int) -> Slot | None:
        return self._by_key.get(key)

    def running(self) -> list[Slot]:
        return list(self._by_key.values())

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.running())

    def admit(self) -> Slot:
        frame = Open("m", "ab" * 32, (5, 6), Sampling(max_tokens=90), "s", drafting=False, keep_s=9.0, drafts_here=3)
        session = VerifierSession(frame, RULES, 0.0, self.here)
        slot = Slot(next(self._keys), session, None, 0.0)  # type: ignore[arg-type]
        self._by_key[slot.key] = slot
        return slot

    def leave(self, slot: Slot) -> None:
        del self._by_key[slot.key]

    def commit(self, slot: Slot) -> None:
        """Let a step without drafts end."""
        slot.session.on_verified(Verified((), (CommittedToken(9, None),)), 1.0)

    def seconds(self) -> float:
        return self.metrics.counts.drafting_here_s

    def shown(self) -> dict[str, float]:
        """Return the value that Prometheus sees, by the name's end."""
        samples = [sample for family in self.metrics.registry.collect() for sample in family.samples]
        return {sample.name.removeprefix("outrider:verifier_"): sample.value for sample in samples}


def done(task: DraftTask, tokens: int = 3, seconds: float = 0.25) -> Drafted:
    return Drafted(task.job.job, tuple(DraftToken(7, 0.9) for _ in range(tokens)), seconds)


def fail(engine: Engine) -> Slot:
    """A text in which the drafter fails."""
    slot = engine.admit()
    engine.source.drive(1.0)
    task = engine.hand.take()
    task.answer(task, ValueError("broken"))
    return slot


def test_drafts_come_to_their_session_and_their_time_is_counted() -> None:
    engine = Engine()
    slot = engine.admit()
    engine.source.drive(1.0)
    engine.source.drive(1.0)
    assert engine.hand.num_waiting == 1, "one job at a time"
    task = engine.hand.take()
    assert task.job.job.extend_with == (5, 6)
    task.answer(task, done(task))
    assert [draft.id for draft in slot.session.block()] == [7, 7, 7]
    assert engine.seconds() == engine.shown()["drafting_seconds_total"] == 0.25
    assert engine.metrics.counts.drafted_here == engine.shown()["own_drafts_made_total"] == 3


def test_a_job_that_no_thread_has_begun_gives_way_to_the_next_and_keeps_its_turn() -> None:
    engine = Engine()
    slot = engine.admit()
    engine.source.drive(1.0)
    [first] = engine.hand.waiting
    first.due_since = first.queued_at = 0.5
    engine.commit(slot)
    engine.source.drive(2.0)
    [second] = engine.hand.waiting
    assert second.job.job.extend_with == (5, 6, 9)
    assert second.due_since == 0.5
    ends = slot.session.ends
    assert ends.here.waiting_s.value > 0, "no thread was free for it"


def test_a_failure_ends_drafting_in_its_text_alone(caplog) -> None:
    engine = Engine()
    broken = fail(engine)
    assert broken.session.ends is None
    assert engine.drafter.open_states == set()
    other = engine.admit()
    assert other.session.ends is not None
    assert "a text goes on without" in caplog.text
    assert "broken" not in caplog.text, "an error may quote the text"


def test_failures_of_texts_in_a_row_end_it_for_all(caplog) -> None:
    engine = Engine(num_threads=MAX_FAILURES + 2)
    idle, other = engine.admit(), engine.admit()
    assert engine.shown()["own_drafter"] == 1
    engine.source.drive(1.0)
    works, waits = engine.hand.take(), engine.hand.take()
    for _ in range(MAX_FAILURES - 1):
        fail(engine)
    assert engine.here is not None
    works.answer(works, done(works))  # a text in which it does not fail
    for _ in range(MAX_FAILURES - 1):
        fail(engine)
    assert engine.here is not None, "they were not in a row"
    fail(engine)
    assert engine.here is None
    assert engine.shown()["own_drafter"] == 0
    assert f"failed in {MAX_FAILURES} texts in a row" in caplog.text
    assert idle.session.ends is other.session.ends is engine.admit().session.ends is None
    waits.answer(waits, done(waits))
    assert engine.drafter.open_states == set(), "also that of a task which was under way"
    engine.source.drive(2.0)
    assert not engine.hand.waiting


def test_a_parked_session_asks_for_nothing_after_the_end_of_drafting() -> None:
    engine = Engine()
    parked = engine.admit()  # nothing has been drafted for it yet
    parked.session.on_cancel()
    for _ in range(MAX_FAILURES):
        fail(engine)
    assert parked.session.ends is None


def test_a_text_whose_piece_of_work_is_stuck_goes_on_without() -> None:
    engine = Engine(num_threads=2)
    slot, other = engine.admit(), engine.admit()
    engine.source.drive(1.0)
    task = engine.hand.take(1.0)
    engine.source.drive(1.0 + STUCK_S)
    assert slot.session.ends is not None
    engine.commit(slot)
    engine.source.drive(1.1 + STUCK_S)
    assert slot.session.ends is None
    assert other.session.ends is not None, "the other thread works for it"
    assert len(engine.drafter.open_states) == 1, "the thread may still use it"
    task.answer(task, done(task))
    assert engine.drafter.open_states == set()
    assert engine.seconds() == 0.25


def test_the_late_end_of_stuck_work_is_no_success_and_no_second_failure() -> None:
    for late in (None, ValueError("late")):
        engine = Engine(num_threads=MAX_FAILURES + 1)
        for turn in range(MAX_FAILURES):
            assert engine.here is not None
            engine.admit()
            engine.source.drive(1.0)
            task = engine.hand.take(1.0)
            engine.source.drive(1.1 + STUCK_S)
            assert (engine.here is None) == (turn == MAX_FAILURES - 1)
            task.answer(task, late or done(task))


@pytest.mark.parametrize("leaves", [False, True], ids=["in a text", "in a text that has left"])
def test_when_all_threads_are_stuck_no_text_waits_for_them(leaves, caplog) -> None:
    engine = Engine(num_threads=2)
    stuck, waiting = [engine.admit(), engine.admit()], engine.admit()
    engine.source.drive(1.0)
    for slot in stuck:
        engine.hand.take(1.0)
        if leaves:
            engine.leave(slot)
    engine.source.drive(1.0 + STUCK_S)
    assert waiting.session.waits_for_drafts
    engine.source.drive(1.1 + STUCK_S)
    assert engine.here is None
    assert "stuck in all of its 2 threads" in caplog.text
    assert not waiting.session.waits_for_drafts
    assert not engine.hand.waiting
    engine.source.drive(1.2 + STUCK_S)
    assert caplog.text.count("none is drafted here any more") == 1


def test_the_text_of_a_session_that_has_left_is_closed() -> None:
    engine = Engine(num_threads=3)
    slots = [engine.admit() for _ in range(3)]
    engine.source.drive(1.0)
    at_work, idle = engine.hand.take(), engine.hand.take()
    idle.answer(idle, done(idle))
    for slot in slots:
        engine.leave(slot)
    engine.source.drive(1.0)
    assert not engine.hand.waiting, "its job is taken back"
    assert len(engine.drafter.open_states) == 1, "a thread is at work on it"
    at_work.answer(at_work, done(at_work))
    assert engine.drafter.open_states == set()
    assert engine.here is not None


@pytest.mark.parametrize("stuck", [False, True])
def test_stopping_closes_every_text_unless_a_thread_may_still_use_it(stuck) -> None:
    engine = Engine()
    engine.admit()
    engine.source.drive(1.0)
    task = engine.hand.take()
    engine.hand.stuck = stuck
    engine.source.stop()
    assert len(engine.drafter.open_states) == stuck
    task.answer(task, done(task))  # too late for anybody
