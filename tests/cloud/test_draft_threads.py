"""Threads of a verifier's own drafter: who is served when, what a result says of its time, and how all ends."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest

from outrider.cloud.serving import own_drafter
from outrider.cloud.serving.own_drafter import (
    CHUNK,
    MAX_WAIT_S,
    STUCK_S,
    DraftedText,
    DraftTask,
    DraftThreads,
    OwnDrafter,
)
from outrider.drafters import ProposalRule
from outrider.drafters.protocol import TokenPrefix
from outrider.proto.session import Drafted, DraftJob
from outrider.proto.session.both_ends import LocalJob
from outrider.proto.types import DraftToken, Sampling, token_ids

RULE = ProposalRule(Sampling(), prompt_length=0)
READ_S, DRAFT_S = 0.001, 0.01


class CountingState(TokenPrefix):
    """Proposes its own length, and computes in time what it was extended with."""

    def __init__(self, drafter: CountingDrafter) -> None:
        super().__init__()
        self._drafter = drafter
        self._computed = 0

    def propose(self, n: int) -> tuple[DraftToken, ...]:
        if self._drafter.raises is not None:
            raise self._drafter.raises
        self._drafter.blocked.wait()
        self._drafter.clock.now += READ_S * (self.length - self._computed) + DRAFT_S * n
        drafts = tuple(DraftToken(self.length + ahead, 0.9) for ahead in range(n))
        self._computed = self.length
        self.extend(token_ids(drafts))
        return drafts

    def truncate(self, length: int) -> None:
        self._computed = min(self._computed, length)
        super().truncate(length)


class Clock:
    """Stand-in for the module `time`, which nothing but the drafter moves."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@dataclass
class CountingDrafter:
    """A drafter that can be held up, or be made to raise."""

    clock: Clock
    raises: BaseException | None = None
    blocked: threading.Event = field(default_factory=threading.Event)
    version, steering, name = "1", None, "counting"

    def __post_init__(self) -> None:
        self.blocked.set()

    def open(self, rule: ProposalRule) -> CountingState:
        return CountingState(self)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(own_drafter, "time", clock)
    return clock


class Bench:
    """Threads of which none is another than the test's, tasks for them, and their answers in order."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.threads = DraftThreads(0)
        self.answers: list[tuple[str, Drafted | BaseException]] = []
        self.ended: set[str] = set()  # tasks whose drafts are of no use any more
        self._left = 0

    def task(self, name: str, unread: int, count: int = 2, drafter: CountingDrafter | None = None) -> DraftTask:
        job = LocalJob(DraftJob(0, tuple(range(unread)), count, 0), 1.0, 0.0, lambda confidence: confidence)
        text = DraftedText(OwnDrafter(drafter or CountingDrafter(self.clock), vocab_size=1 << 20))

        def answer(task: DraftTask, result: Drafted | BaseException) -> None:
            self.answers.append((name, result))
            self._left -= 1
            if not self._left:
                self.threads.stop()

        self._left += 1
        return DraftTask(text, job, RULE, lambda job: name not in self.ended, answer, clock=self.clock.monotonic)

    def submit(self, *arguments, **fields) -> DraftTask:
        task = self.task(*arguments, **fields)
        self.threads.submit(task)
        return task

    def work(self) -> list[str]:
        """Serve as a thread until all tasks are answered; return the order of the answers."""
        self.threads._run()
        return [name for name, _ in self.answers]

    def drop(self, task: DraftTask) -> bool:
        dropped = self.threads.drop(task)
        self._left -= dropped
        return dropped


@pytest.fixture
def bench(clock) -> Bench:
    return Bench(clock)


def test_the_job_with_the_least_to_read_goes_first(bench) -> None:
    for name, unread in (("long", 90), ("short", 3), ("middle", 40)):
        bench.submit(name, unread)
    assert bench.threads.num_waiting == 3
    assert bench.work() == ["short", "middle", "long"]
    assert all(
        token_ids(result.drafts) == (n, n + 1) for n, (_, result) in zip((3, 40, 90), bench.answers, strict=True)
    )


def test_jobs_with_as_much_to_read_are_done_in_their_order(bench) -> None:
    for name in "abc":
        bench.submit(name, 5)
    assert bench.work() == ["a", "b", "c"]


def test_a_job_that_has_waited_too_long_goes_before_shorter_ones(bench) -> None:
    bench.submit("long", 90)
    bench.clock.now += MAX_WAIT_S + 0.01
    bench.submit("short", 3)
    assert bench.work() == ["long", "short"]


def test_a_job_that_takes_the_place_of_another_has_waited_for_as_long(bench) -> None:
    dropped = bench.submit("dropped", 90)
    bench.clock.now += MAX_WAIT_S + 0.01
    assert bench.drop(dropped)
    bench.submit("short", 3)
    bench.threads.submit(task := bench.task("long", 90))
    assert bench.drop(task)
    task.due_since = dropped.due_since
    bench._left += 1
    bench.threads.submit(task)
    assert bench.work() == ["long", "short"]


def test_others_get_their_turn_between_the_pieces_of_a_long_text(bench) -> None:
    """The short job comes while the long text's first piece is read."""
    drafter = CountingDrafter(bench.clock)
    bench.submit("long", 3 * CHUNK, drafter=drafter)
    propose = CountingState.propose

    class Interrupting(CountingState):
        def propose(self, n: int) -> tuple[DraftToken, ...]:
            drafts = propose(self, n)
            if not bench.answers and bench._left == 1:
                bench.submit("short", 3)
            return drafts

    drafter.open = lambda rule: Interrupting(drafter)
    assert bench.work() == ["short", "long"]


def test_a_result_tells_work_from_waiting_and_reading_from_drafting(bench) -> None:
    """Two pieces and a rest are read, each with one draft that is thrown away, before two drafts are made."""
    task = bench.submit("text", 2 * CHUNK + 20)
    bench.clock.now += 0.3
    bench.work()
    [(_, result)] = bench.answers
    rest_s = 2 * (READ_S * CHUNK + DRAFT_S) + READ_S * 20 + DRAFT_S
    assert task.read_s == pytest.approx(rest_s)
    assert result.seconds == pytest.approx(rest_s + 2 * DRAFT_S + READ_S), "the second follows the first"
    assert task.waited_s == 0, "before its last piece it has waited for nobody"


def test_the_wait_for_a_thread_is_told(bench) -> None:
    first, second = bench.submit("first", 2), bench.submit("second", 2)
    bench.clock.now += 0.25
    bench.work()
    assert first.waited_s == pytest.approx(0.25)
    assert second.waited_s == pytest.approx(0.25 + first.worked_s)
    assert first.read_s == second.read_s == 0, "a few tokens are read with the first draft"


def test_a_job_whose_drafts_are_of_no_use_any_more_reads_nothing_and_is_answered(bench) -> None:
    task = bench.submit("text", 500)
    bench.ended.add("text")
    bench.work()
    [(_, result)] = bench.answers
    assert (result.drafts, result.seconds) == ((), 0.0)
    assert task.text.num_unread == 500, "the next job goes on from there"


def test_a_job_can_be_taken_back_until_it_begins(bench) -> None:
    first, second = bench.submit("first", 5), bench.submit("second", 5)
    assert bench.drop(first)
    assert not bench.drop(first), "it is gone already"
    assert bench.work() == ["second"]
    assert not bench.drop(second)
    begun = bench.task("begun", 2 * CHUNK)
    begun.work()
    bench.threads.submit(begun)
    assert not bench.drop(begun), "the drafter's prefix is in the midst of it"


@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_whatever_a_drafter_raises_its_thread_goes_on(bench, error) -> None:
    bench.submit("broken", 3, drafter=CountingDrafter(bench.clock, raises=error))
    bench.submit("whole", 5)
    assert bench.work() == ["broken", "whole"]
    assert bench.answers[0][1] is error
    assert len(bench.answers[1][1].drafts) == 2


def test_a_piece_that_takes_too_long_is_stuck_and_waiting_is_not(bench) -> None:
    task = bench.submit("text", 2 * CHUNK)
    assert not task.is_stuck(bench.clock.now + 100 * STUCK_S)
    began_at = bench.clock.now
    assert task.work() is None
    assert not task.is_stuck(began_at + STUCK_S)
    assert task.is_stuck(began_at + STUCK_S + 0.01)
    bench.threads.submit(task)
    assert not task.is_stuck(bench.clock.now + 100 * STUCK_S), "it waits for its next piece"


def test_each_thread_works_for_another_text_at_the_same_time() -> None:
    """Either drafter waits for the other to be at work."""
    both = threading.Barrier(2, timeout=60)
    answered = threading.Barrier(3, timeout=60)
    threads = DraftThreads(2)

    class Meeting(CountingDrafter):
        def open(self, rule: ProposalRule) -> CountingState:
            both.wait()
            return super().open(rule)

    results: list[Drafted | BaseException] = []

    def answer(task: DraftTask, result: Drafted | BaseException) -> None:
        results.append(result)
        answered.wait()

    for _ in range(2):
        text = DraftedText(OwnDrafter(Meeting(Clock()), vocab_size=1 << 20))
        job = LocalJob(DraftJob(0, (1, 2), 3, 0), 1.0, 0.0, lambda confidence: confidence)
        threads.submit(DraftTask(text, job, RULE, lambda job: True, answer))
    answered.wait()
    assert [len(result.drafts) for result in results] == [3, 3]
    assert threads.stop()


def test_stopping_ends_threads_and_answers_no_task_that_waits() -> None:
    threads = DraftThreads(2)
    assert threads.num_threads == 2
    assert threads.stop()
    threads.submit(Bench(Clock()).task("late", 3))
    assert not any(thread.is_alive() for thread in threads._threads)


def test_a_thread_that_is_stuck_is_left_behind_after_the_limit(monkeypatch) -> None:
    monkeypatch.setattr(own_drafter, "STOP_WITHIN_S", 0.0)
    bench, threads = Bench(Clock()), DraftThreads(1)
    drafter = CountingDrafter(bench.clock)
    drafter.blocked.clear()
    begun = threading.Event()
    drafter.open = lambda rule: (begun.set(), CountingState(drafter))[1]
    bench._left = 1 << 10
    threads.submit(bench.task("stuck", 3, drafter=drafter))
    threads.submit(waits := bench.task("waits", 3))
    assert begun.wait(60)
    assert not threads.stop()
    drafter.blocked.set()
    threads._threads[0].join(60)
    assert threads.stop()
    assert [name for name, _ in bench.answers] == ["stuck"]
    assert not waits.begun
