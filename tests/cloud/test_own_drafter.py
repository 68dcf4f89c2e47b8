"""A verifier's own drafter: whether there is one, when it is given up, whom its threads serve, and how all ends."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch

from outrider.cloud.serving import own_drafter
from outrider.cloud.serving.batching import Batching
from outrider.cloud.serving.local_source import MAX_FAILURES, LocalSource, local_source, spare_cores
from outrider.cloud.serving.own_drafter import (
    CHUNK,
    MAX_WAIT_S,
    STUCK_S,
    DraftedText,
    DraftTask,
    DraftThreads,
    OwnDrafter,
    load_own_drafter,
)
from outrider.cloud.serving.slots import Slot
from outrider.cloud.serving.verifier_metrics import VerifierMetrics
from outrider.cloud.target.backend import TargetFacts
from outrider.cloud.verifier_config import VerifierConfig
from outrider.drafters import ProposalRule, find_package
from outrider.drafters.protocol import TokenPrefix
from outrider.proto.errors import ConfigError, NotFound, TokenizerMismatch
from outrider.proto.session import Drafted, DraftJob
from outrider.proto.session.both_ends import LocalJob
from outrider.proto.session.verifier import Verified, VerifierRules, VerifierSession
from outrider.proto.types import CommittedToken, DraftToken, Open, Sampling, token_ids

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


def test_a_failure_ends_drafting_in_its_text_and_some_in_a_row_end_it_for_all(caplog) -> None:
    engine = Engine(num_threads=MAX_FAILURES + 2)
    idle, other = engine.admit(), engine.admit()
    assert engine.shown()["own_drafter"] == 1
    engine.source.drive(1.0)
    works, waits = engine.hand.take(), engine.hand.take()
    for _ in range(MAX_FAILURES - 1):
        assert fail(engine).session.ends is None
        assert len(engine.drafter.open_states) == 2, "of the two that draft on"
    assert None not in (engine.here, idle.session.ends)
    works.answer(works, done(works))  # a text in which it does not fail
    for _ in range(MAX_FAILURES - 1):
        fail(engine)
    assert engine.here is not None, "they were not in a row"
    fail(engine)
    assert engine.here is None
    assert engine.shown()["own_drafter"] == 0
    assert "a text goes on without" in caplog.text
    assert f"failed in {MAX_FAILURES} texts in a row" in caplog.text
    assert "broken" not in caplog.text, "an error may quote the text"
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


# === threads =========================================================================================================


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


def test_the_job_with_the_least_to_read_goes_first_and_the_first_of_equals(bench) -> None:
    jobs = {"long": 90, "short": 3, "middle": 40, "equal": 40}
    for name, unread in jobs.items():
        bench.submit(name, unread)
    assert bench.threads.num_waiting == 4
    assert bench.work() == ["short", "middle", "equal", "long"]
    assert all(token_ids(result.drafts) == (jobs[name], jobs[name] + 1) for name, result in bench.answers)


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


# === which drafter, and whether ======================================================================================


PACKAGE = find_package("general")
FACTS = TargetFacts(
    tokenizer_json="",
    tokenizer_sha256=PACKAGE.tokenizer_sha256,
    vocab_size=PACKAGE.vocab_size,
    context_length=512,
    eos_tokens=frozenset({0}),
    hidden_size=8,
    num_layers=1,
    device=torch.device("cpu"),
)
OTHERS = replace(FACTS, tokenizer_sha256="0" * 64)


def test_the_embedded_drafter_for_any_subject_is_taken_by_default() -> None:
    own = load_own_drafter("", FACTS)
    assert own.name == f"general@{PACKAGE.version}"
    assert own.position_bytes > 0
    smol = find_package("smol")
    facts = replace(FACTS, tokenizer_sha256=smol.tokenizer_sha256, vocab_size=smol.vocab_size)
    assert load_own_drafter("", facts).name == f"smol@{smol.version}", "another target has its own"
    assert load_own_drafter("ngram", OTHERS).name.startswith("ngram@")


def test_a_drafter_for_another_tokenizer_or_none_is_refused() -> None:
    with pytest.raises(TokenizerMismatch, match="general"):
        load_own_drafter("general", OTHERS)
    with pytest.raises(NotFound):
        load_own_drafter("/nowhere", FACTS)


def test_auto_drafts_where_there_are_a_drafter_and_a_core(monkeypatch) -> None:
    config = VerifierConfig()
    assert local_source(config, FACTS) is None, "no core is left"
    monkeypatch.setattr("outrider.cloud.serving.local_source.spare_cores", lambda config, target: 1)
    assert local_source(config, OTHERS) is None
    source = local_source(config, FACTS)
    source.stop()
    assert local_source(replace(config, draft_here="off"), FACTS) is None
    monkeypatch.setattr(own_drafter, "embedded_packages", tuple)
    assert local_source(config, FACTS) is None, "no drafter is installed"


def test_auto_does_without_a_named_drafter_of_another_tokenizer_and_says_so(monkeypatch, caplog) -> None:
    monkeypatch.setattr("outrider.cloud.serving.local_source.spare_cores", lambda config, target: 1)
    for named, level in (("", logging.INFO), ("general", logging.WARNING)):
        with caplog.at_level(logging.INFO, "outrider.cloud"):
            assert local_source(VerifierConfig(draft_with=named), OTHERS) is None
        assert caplog.records[-1].levelno == level
        assert "'general' was made for another tokenizer, and only edges draft by text" in caplog.messages[-1]


def test_on_drafts_without_a_core_and_refuses_where_there_is_no_drafter() -> None:
    source = local_source(VerifierConfig(draft_here="on"), FACTS)
    source.stop()
    with pytest.raises(ConfigError, match=r"draft_here.*--draft-with"):
        local_source(VerifierConfig(draft_here="on"), OTHERS)


def test_threads_of_the_target_leave_the_other_cores(monkeypatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(6)))
    assert spare_cores(VerifierConfig(threads=4), FACTS) == 2
    assert spare_cores(VerifierConfig(threads=9), FACTS) == 0
    on_gpu = replace(FACTS, device=torch.device("cuda"))
    assert spare_cores(VerifierConfig(threads=4), on_gpu) == 5
