"""Lessons: what a verifier keeps of its steps, that no text knows of it, and that nothing is kept without consent."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from drafting_outbox import DraftingOutbox
from kept_lessons import KeptLessons

from outrider.cloud.learning import lessons
from outrider.cloud.learning.inclusion import BURST_S, Inclusion, LessonKind
from outrider.cloud.learning.lesson_record import LessonRecord
from outrider.cloud.learning.lessons import (
    ANSWER_WITHIN_S,
    MAX_AGE_S,
    RETRY_S,
    Count,
    Delivery,
    LessonCollector,
    LessonSink,
    Lost,
    Packed,
    StepRows,
)
from outrider.cloud.learning.teaching import read_steps, teaching
from outrider.cloud.serving.engine import Engine
from outrider.cloud.target.target import SessionRows, Target
from outrider.cloud.target.transformers_backend import TransformersBackend
from outrider.cloud.testing import CONTEXT, VOCAB, tiny_llama
from outrider.cloud.verifier_config import VerifierConfig
from outrider.proto.salts import salted
from outrider.proto.session.verifier import VerifierRules
from outrider.proto.testing import word_tokenizer
from outrider.proto.types import Cancel, Learning, Sampling

SAMPLING = Sampling(temperature=1.0, seed=5, max_tokens=60, ignore_eos=True)
PROMPT = (5, 6, 7, 8)
Counted = Counter[LessonKind | Lost]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_llama(sharpness=60.0), word_tokenizer(VOCAB), kv_tokens=8192, page_size=16)


@pytest.fixture(autouse=True)
def quick_turns(monkeypatch) -> None:
    """Let collectors look for lessons often, so that no test waits for them."""
    monkeypatch.setattr(lessons, "TICK_S", 0.005)


def make_engine(target: Target, sink: LessonSink | None = None, *, min_step_s: float = 0.0, **options: Any) -> Engine:
    rules = VerifierRules("v", "tiny", target.tokenizer_sha256, VOCAB, CONTEXT, target.eos_tokens)
    options = {"positions_s": 1e6, "max_share": 1e6, **options}  # all rows, unless a test says otherwise
    collector = LessonCollector("tiny", sink, **options) if sink is not None else None
    config = VerifierConfig(threads=1, max_sessions=8, min_step_s=min_step_s)
    engine = Engine(TransformersBackend(target), rules, config, lessons=collector)
    engine.start()
    return engine


@pytest.fixture
def engines(target) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(*args: Any, **options: Any) -> Engine:
        made.append(make_engine(target, *args, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.stop()


def plain_text(engine: Engine, prompt: tuple[int, ...] = PROMPT, sampling: Sampling = SAMPLING) -> list[int]:
    edge = DraftingOutbox(engine, 1000, prompt)
    edge.open(sampling, learning=None, teacher=None, session="plain")
    text = edge.end()
    engine.post_close(1000)
    return text


def ended(edge: DraftingOutbox, sampling: Sampling = SAMPLING, **options: Any) -> DraftingOutbox:
    """Decode a text to its end."""
    edge.open(sampling, **options)
    edge.end()
    return edge


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.002)


def drafter_of(text: list[int], count: int = 5, wrong_every: int = 7) -> Callable[[list[int]], list[int]]:
    """Proposes the text's own tokens, but for those at some positions."""

    def drafts(before: list[int]) -> list[int]:
        first = len(before)
        ahead = enumerate(text[first : first + count], first)
        return [(token + 1) % VOCAB if place % wrong_every == 0 else token for place, token in ahead]

    return drafts


def target_says(target: Target, prefix: np.ndarray) -> np.ndarray:
    """Log p of every token after `prefix`, by the model's own forward."""
    cache = target.pool.allocate(len(prefix))
    logits = target.forward([SessionRows(cache, tuple(prefix.tolist()), 1)])
    cache.truncate(0)
    target.pool.release(cache)
    return torch.log_softmax(logits[0].double(), -1).numpy()


def test_lessons_may_cost_a_share_of_the_whole_step_and_not_of_its_cpu_time(engines, monkeypatch) -> None:
    """An engine that waits for an accelerator uses little CPU time, and its lessons are worth as much."""
    paid_by: list[float] = []
    draw = Inclusion.draw
    monkeypatch.setattr(Inclusion, "draw", lambda *drawn: paid_by.append(drawn[-1]) or draw(*drawn))
    kept = KeptLessons()
    ended(DraftingOutbox(engines(kept, min_step_s=0.02), 1, PROMPT), learning=Learning(3))
    kept.wait_for(1)
    assert len(paid_by) > 5
    assert min(paid_by) >= 0.02


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_k": 3, "repetition_penalty": 2.0}])
def test_every_row_says_what_the_target_says_after_its_prefix(settings, target, engines) -> None:
    """Before any penalty."""
    sampling = replace(SAMPLING, **settings)
    kept, counted = KeptLessons(), Counted()
    engine = engines(kept, count=counting(counted))
    text = plain_text(engine, sampling=sampling)
    edge = ended(DraftingOutbox(engine, 1, PROMPT, drafter_of(text)), sampling, learning=Learning(3))
    assert edge.transcript == text
    (record,) = kept.wait_for(1)
    engine.stop()
    for row in range(len(record)):
        logp = target_says(target, record.tokens[: record.positions[row]])
        said = np.exp(logp[record.top_ids[row]])
        assert np.abs(np.exp(record.top_logp[row].astype(float)) - said).max() < 2e-3
        assert sorted(record.top_ids[row].tolist()) == list(range(VOCAB))
        assert record.rest_logp[row] == -np.inf
    assert record.positions.tolist() == list(range(len(PROMPT), len(text)))
    assert record.targets.tolist() == text[len(PROMPT) :]
    assert record.tokens.tolist() == text
    assert (record.model, record.prompt_class, record.first_generated) == ("tiny", 3, len(PROMPT))
    assert record.sampling == sampling
    assert (record.weights == 1).all()
    assert min(counted[kind] for kind in LessonKind) > 0
    assert sum(counted[kind] for kind in LessonKind) == len(record)
    assert counted[LessonKind.ACCEPTED] == sum(commit.accepted for commit in edge.commits)


@pytest.mark.parametrize("vocab", [64, 65, 1024, 1500, 8192, 8207])
def test_likeliest_tokens_are_found_by_columns_whatever_the_vocabulary(vocab) -> None:
    logits = torch.randn(40, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    logits[0] = 0.0  # ties
    logits[1, -70:] += 50.0  # all at one place, the left-over columns among them
    logits[2] = torch.arange(vocab)
    said = teaching(logits)
    probability = torch.softmax(logits.double(), -1)
    best = probability.topk(64, dim=-1)
    assert np.array_equal(said.top_ids[1:], best.indices[1:].numpy())
    assert len(set(said.top_ids[0].tolist())) == 64
    assert np.abs(np.exp(said.top_logp.astype(float)) - best.values.numpy()).max() < 2e-3
    if vocab > 64:
        assert np.exp(said.rest_logp) == pytest.approx(1 - best.values.sum(-1).numpy(), abs=1e-5)


def test_texts_beside_each_other_do_not_mix(target, engines) -> None:
    kept = KeptLessons()
    engine = engines(kept)
    prompts = [(5, 6, 7), (9, 8), (11, 12, 13, 14), (3,)]
    texts = [plain_text(engine, prompt) for prompt in prompts]
    edges = [DraftingOutbox(engine, key, prompt, drafter_of(texts[key])) for key, prompt in enumerate(prompts)]
    for key, edge in enumerate(edges):
        edge.open(SAMPLING, learning=Learning() if key != 2 else None)
    assert [edge.end() for edge in edges] == texts
    records = kept.wait_for(3)
    engine.stop()
    assert sorted(record.tokens.tolist() for record in records) == sorted(texts[i] for i in (0, 1, 3))
    for record in records:
        for row in range(0, len(record), 5):
            logp = target_says(target, record.tokens[: record.positions[row]])[record.top_ids[row]]
            assert np.abs(np.exp(record.top_logp[row].astype(float)) - np.exp(logp)).max() < 2e-3
    assert len({record.session_salt for record in records}) == 3
    assert len({record.key_salt for record in records}) == 1


def test_a_long_text_makes_a_record_now_and_then_and_each_has_what_comes_before(engines, monkeypatch) -> None:
    monkeypatch.setattr(lessons, "RECORD_TOKENS", 50)
    monkeypatch.setattr(lessons, "CONTEXT", 10)
    kept = KeptLessons()
    engine = engines(kept)
    sampling = Sampling(temperature=1.0, seed=5, max_tokens=160, ignore_eos=True)
    text = plain_text(engine, sampling=sampling)
    ended(DraftingOutbox(engine, 1, PROMPT, drafter_of(text)), sampling)
    records = kept.wait_for(4)
    rows = [record.positions.tolist() for record in records]
    assert list(itertools.chain(*rows)) == list(range(len(PROMPT), len(text)))
    for record in records:
        assert record.start >= 0
        assert record.tokens.tolist() == text[record.start : record.start + len(record.tokens)]
    assert records[1].start == rows[1][0] - 10


def test_every_turn_of_a_conversation_has_its_own_record(engines) -> None:
    kept = KeptLessons()
    engine = engines(kept)
    edge = DraftingOutbox(engine, 1, PROMPT)
    edge.open(SAMPLING, keep_s=60.0)
    first = list(edge.end())
    edge.begin_turn((9, 10, 11), Sampling(temperature=1.0, seed=6, max_tokens=10, ignore_eos=True))
    second = edge.end()
    records = kept.wait_for(2)
    assert [record.tokens.tolist() for record in records] == [first, second]
    assert [record.first_generated for record in records] == [len(PROMPT), len(first) + 3]
    assert [record.sampling.seed for record in records] == [5, 6]


def test_a_cancelled_text_and_one_whose_stream_closes_leave_what_they_taught(engines) -> None:
    kept = KeptLessons()
    engine = engines(kept)
    for key, leave in (
        (1, lambda: engine.post_frame(1, Cancel("enough"), lambda: None)),
        (2, lambda: engine.post_close(2)),
    ):
        edge = DraftingOutbox(engine, key, PROMPT)
        edge.open(Sampling(temperature=1.0, seed=5, max_tokens=900, ignore_eos=True))
        while len(edge.commits) < 5:
            time.sleep(0.001)
        leave()
        record = kept.wait_for(key)[-1]
        assert record.tokens.tolist() == edge.transcript[: len(record.tokens)]
        assert len(record) >= 5


# === consent ====================================================================================================


@pytest.mark.parametrize(("learn", "shares", "allows"), list(itertools.product((False, True), repeat=3)))
def test_nothing_is_kept_unless_verifier_edge_and_key_all_say_so(engines, learn, shares, allows) -> None:
    kept = KeptLessons()
    engine = engines(kept if learn else None)
    edge = DraftingOutbox(engine, 1, PROMPT)
    edge.open(SAMPLING, learning=Learning() if shares else None, teacher="alice" if allows else None)
    text = edge.end()
    sentinel = DraftingOutbox(engine, 2, (9, 9))  # whose record comes after that of the text, if there is one
    sentinel.open(SAMPLING)
    end = sentinel.end()
    if not learn:
        time.sleep(3 * lessons.TICK_S)
        assert kept.records == []
        return
    records = kept.wait_for(2 if shares and allows else 1)
    assert [record.tokens.tolist() for record in records] == [text, end][-len(records) :]
    assert len(records) == 1 + (shares and allows)


@pytest.mark.parametrize("constrained", [{"logit_bias": ((5, 1.0),)}, {"allowed_tokens": tuple(range(30))}])
def test_constrained_turns_are_not_kept_and_free_ones_beside_them_are(engines, constrained) -> None:
    kept = KeptLessons()
    engine = engines(kept)
    edge = ended(DraftingOutbox(engine, 1, PROMPT), Sampling(max_tokens=8, ignore_eos=True, **constrained), keep_s=60.0)
    edge.begin_turn((9,), Sampling(max_tokens=8, ignore_eos=True))
    free = list(edge.end())
    edge.begin_turn((9,), Sampling(max_tokens=8, ignore_eos=True, **constrained))
    edge.end()
    edge.begin_turn((9,), Sampling(max_tokens=8, ignore_eos=True))
    freed = edge.end()
    assert [record.tokens.tolist() for record in kept.wait_for(2)] == [free, freed]


# === texts know nothing of it ===================================================================================


class Silent:
    """Never answers."""

    def __init__(self) -> None:
        self.pushes = 0

    def push(self, records: tuple[bytes, ...]) -> Future[object]:
        self.pushes += 1
        return Future()

    def forget(self, key_salt: bytes) -> Future[int]:
        return Future()


class Stuck(Silent):
    """Does not even return."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def push(self, records: tuple[bytes, ...]) -> Future[object]:
        self.pushes += 1
        self.released.wait(60)
        return Future()


class Dead(Silent):
    def push(self, records: tuple[bytes, ...]) -> Future[object]:
        self.pushes += 1
        raise ConnectionError("the trainer is gone")

    forget = push  # type: ignore[assignment]


class Failing(Silent):
    def push(self, records: tuple[bytes, ...]) -> Future[object]:
        self.pushes += 1
        answer: Future[object] = Future()
        answer.set_exception(RuntimeError("out of memory, say"))
        return answer


PROMPTS = ((5, 6, 7), (9, 8), (11, 12, 13, 14))
SETTINGS = tuple(Sampling(temperature=float(hot), seed=5, max_tokens=120, ignore_eos=True) for hot in (0, 1))


@pytest.fixture(scope="module")
def texts_alone(target) -> list[list[list[int]]]:
    """The texts of each of `SETTINGS` after each of `PROMPTS`, by an engine without lessons."""
    engine = make_engine(target)
    try:
        return [[plain_text(engine, prompt, sampling) for prompt in PROMPTS] for sampling in SETTINGS]
    finally:
        engine.stop()


@pytest.mark.parametrize("make", [None, KeptLessons, Silent, Stuck, Dead, Failing])
def test_texts_are_the_same_without_lessons_with_them_and_with_any_sink(engines, texts_alone, monkeypatch, make):
    monkeypatch.setattr(lessons, "RECORD_TOKENS", 20)
    monkeypatch.setattr(lessons, "RETRY_S", 0.0)
    monkeypatch.setattr(lessons, "STOP_WITHIN_S", 0.1)
    taking = make() if make else None
    engine = engines(taking)
    for sampling, texts in zip(SETTINGS, texts_alone, strict=True):
        edges = [
            DraftingOutbox(engine, key, prompt, drafter_of(texts[key], wrong_every=5))
            for key, prompt in enumerate(PROMPTS)
        ]
        for key, edge in enumerate(edges):
            edge.open(sampling, session=f"t{sampling.temperature:.0f}-{key}")
        assert [edge.end() for edge in edges] == texts
        for key in range(len(PROMPTS)):
            engine.post_close(key)
    until(lambda: not isinstance(taking, Silent) or taking.pushes)
    if isinstance(taking, Stuck):
        taking.released.set()


def test_a_defect_in_the_collector_ends_no_text(engines, monkeypatch, caplog) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(LessonCollector, "_copy", broken)
    engine = engines(KeptLessons())
    edge = DraftingOutbox(engine, 1, PROMPT)
    edge.open(SAMPLING)
    assert edge.end() == plain_text(engine)
    assert "the lessons of a step are lost" in caplog.text


def counting(counted: Counted) -> Count:
    def count(what: LessonKind | Lost, rows: int) -> None:
        counted[what] += rows

    return count


def test_a_silent_sink_gets_one_push_and_the_rest_is_dropped_and_counted(engines, monkeypatch) -> None:
    monkeypatch.setattr(lessons, "RECORD_TOKENS", 20)
    monkeypatch.setattr(lessons, "MAX_WAITING_BYTES", 30_000)
    counted, silent = Counted(), Silent()
    engine = engines(silent, count=counting(counted))
    for key in range(6):
        ended(DraftingOutbox(engine, key, PROMPT))
    until(lambda: counted[Lost.TRAINER])
    assert silent.pushes == 1
    assert counted[Lost.TRAINER] >= 20


def test_logits_that_nobody_reads_are_dropped_oldest_first_and_counted(engines, monkeypatch) -> None:
    monkeypatch.setattr(lessons, "RECORD_TOKENS", 20)
    monkeypatch.setattr(lessons, "MAX_QUEUED_BYTES", 10 * VOCAB * 4)
    counted, stuck = Counted(), Stuck()
    engine = engines(stuck, count=counting(counted))
    collector = engine.lessons
    for key in range(3):
        ended(DraftingOutbox(engine, key, PROMPT))
        if key == 0:
            until(lambda: stuck.pushes)
    queued = [item for item in list(collector._queue) if isinstance(item, StepRows)]
    assert sum(step.nbytes for step in queued) <= 10 * VOCAB * 4
    stuck.push = Silent().push  # type: ignore[method-assign]
    stuck.released.set()
    until(lambda: counted[Lost.QUEUE] >= 60)


def test_the_rate_is_kept_and_what_is_kept_stands_for_the_rest(engines) -> None:
    kept, rate = KeptLessons(), 10.0
    engine = engines(kept, positions_s=rate)
    text, began, rows = plain_text(engine), time.monotonic(), 0
    for key in range(4):
        edge = ended(DraftingOutbox(engine, key, PROMPT, drafter_of(text)))
        rows += sum(len(commit.tokens) for commit in edge.commits)
    budget = rate * (BURST_S + time.monotonic() - began) + 17
    time.sleep(3 * lessons.TICK_S)
    got = sum(map(len, kept.records))
    assert 0 < got <= budget < rows


def test_records_older_than_a_day_are_dropped(engines, monkeypatch) -> None:
    counted, kept = Counted(), KeptLessons()
    engine = engines(kept, count=counting(counted))
    monkeypatch.setattr(lessons, "MAX_AGE_S", -1.0)
    ended(DraftingOutbox(engine, 1, PROMPT))
    until(lambda: counted[Lost.AGE])
    assert kept.records == []


def test_lessons_beyond_their_share_are_fewer_and_records_still_whole(engines) -> None:
    kept, all_kept = KeptLessons(), KeptLessons()
    shared, free = engines(kept, max_share=0.02), engines(all_kept)
    sampling = Sampling(temperature=1.0, seed=5, max_tokens=400, ignore_eos=True)
    for engine in (shared, free):
        ended(DraftingOutbox(engine, 1, PROMPT), sampling)
    (every,) = all_kept.wait_for(1)
    (some,) = kept.wait_for(1)
    assert 0 < len(some) < len(every) == sampling.max_tokens
    assert some.tokens.tolist() == every.tokens.tolist()


def test_rows_that_are_no_numbers_are_left_out() -> None:
    logits = torch.zeros(3, 80)
    logits[1, 5] = float("nan")
    step = StepRows(logits)
    read_steps([step])
    assert step.said.finite.tolist() == [True, False, True]


# === forgetting =================================================================================================


def test_a_key_is_forgotten_here_and_at_the_sink_and_others_are_not(engines) -> None:
    kept = KeptLessons()
    engine = engines(kept, secret=b"secret")
    for key, teacher in enumerate(("alice", "bob", "alice")):
        ended(DraftingOutbox(engine, key, PROMPT), teacher=teacher)
    kept.wait_for(3)
    assert engine.lessons.forget("alice").result(30) == 2 * SAMPLING.max_tokens
    (record,) = kept.records
    assert record.key_salt == salted(b"secret", "key bob")
    ended(DraftingOutbox(engine, 7, PROMPT), teacher="alice")
    assert len(kept.wait_for(2)) == 2, "later texts teach again"


def test_what_has_not_been_pushed_is_forgotten_too(engines, monkeypatch) -> None:
    counted, silent = Counted(), Silent()
    answers: list[Future[object]] = []

    def push(records: tuple[bytes, ...]) -> Future[object]:
        assert LessonRecord.decode(records[0]).key_salt == salted(b"", "key bob"), "alice's were to be forgotten"
        answers.append(Future())
        return answers[-1]

    monkeypatch.setattr(silent, "push", push)
    monkeypatch.setattr(silent, "forget", KeptLessons().forget)
    engine = engines(silent, count=counting(counted))
    for key, teacher in enumerate(("bob", "alice", "bob")):
        ended(DraftingOutbox(engine, key, PROMPT), teacher=teacher)
        until(lambda: answers)
    running = DraftingOutbox(engine, 7, PROMPT)  # what it has taught so far, too
    running.open(Sampling(max_tokens=900, ignore_eos=True), teacher="alice")
    until(lambda: len(running.commits) >= 5)
    answer = engine.lessons.forget("alice")
    time.sleep(0.1)
    assert not answer.done(), "a push is on its way, which may hold lessons of the key"
    engine.post_close(7)
    answers[0].set_result(None)
    assert answer.result(30) == 0
    until(lambda: counted[Lost.FORGOTTEN] >= SAMPLING.max_tokens + 5 and len(answers) >= 2)
    answers[-1].set_result(None)


def test_a_sink_that_cannot_forget_says_so(engines) -> None:
    engine = engines(Dead())
    with pytest.raises(ConnectionError):
        engine.lessons.forget("alice").result(30)


def test_nothing_is_to_be_forgotten_where_nothing_is_kept(engines) -> None:
    assert engines().lessons.forget("alice").result(0) == 0


# === the way to a sink ===============================================================================================


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
