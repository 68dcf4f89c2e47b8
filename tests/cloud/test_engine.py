"""The engine's thread: one session's failure is its own, and a session has one slot."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from collecting_outbox import CollectingOutbox

from outrider.cloud.grammar.grammar import Allowed, GrammarMatcher
from outrider.cloud.serving import engine as engine_module
from outrider.cloud.serving.batching import Batch
from outrider.cloud.serving.engine import Engine
from outrider.cloud.serving.sessions import MASKS_WITHIN_S
from outrider.cloud.target.transformers_backend import TransformersBackend
from outrider.cloud.verifier_config import VerifierConfig
from outrider.proto.errors import Internal, InvalidArgument
from outrider.proto.session.verifier import VerifierRules
from outrider.proto.types import Commit, Draft, DraftToken, Open, Opened, Patience, Sampling, token_ids

RUN_AHEAD = Patience(0.0)


@pytest.fixture
def engine_at_rest(shared_target) -> Engine:
    """Its thread does not run."""
    target = shared_target()
    rules = VerifierRules("v", "reference", target.tokenizer_sha256, target.vocab_size, 512, target.eos_tokens)
    return Engine(TransformersBackend(target), rules, VerifierConfig(threads=1, max_sessions=4))


@pytest.fixture
def engine(engine_at_rest) -> Any:
    engine_at_rest.start()
    yield engine_at_rest
    engine_at_rest.stop()


def opened(engine: Engine, session: str, prompt: tuple[int, ...], max_tokens: int = 20) -> Open:
    return Open(
        "reference",
        engine.rules.tokenizer_sha256,
        prompt,
        Sampling(max_tokens=max_tokens, ignore_eos=True),
        session,
        drafting=False,
    )


def test_a_draft_that_is_refused_during_a_step_ends_its_session_without_a_commit(engine_at_rest, caplog) -> None:
    engine, box, other = engine_at_rest, CollectingOutbox(), CollectingOutbox()
    run = engine._runner.run

    def run_while_a_draft_comes(shares: Any) -> Any:
        if engine.sessions.num_running == 2:
            engine.post_frame(1, Draft(0, 0, (DraftToken(5),)), lambda: None)  # inside the prompt
        return run(shares)

    engine._runner.run = run_while_a_draft_comes
    engine.post_open(1, opened(engine, "hostile", (5, 6, 7)), box)
    engine.post_open(2, opened(engine, "honest", (8, 9)), other)
    engine.start()
    try:
        assert isinstance(box.until_end()[-1], InvalidArgument)
        assert isinstance(other.until_end()[-1], Commit)
    finally:
        engine.stop()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_defect_in_one_event_does_not_end_the_thread(engine) -> None:
    engine.inbox.post(lambda: 1 // 0)
    box = CollectingOutbox()
    engine.post_open(1, opened(engine, "after", (5, 6)), box)
    assert isinstance(box.until_end()[-1], Commit)


def test_an_engine_with_nothing_to_do_ends_at_once(engine_at_rest, monkeypatch) -> None:
    monkeypatch.setattr(engine_module, "IDLE_S", 600.0)
    engine_at_rest.start()
    began = time.monotonic()
    engine_at_rest.stop()
    assert time.monotonic() - began < 300


def test_a_step_takes_at_least_as_long_as_the_pace_that_stands_for_a_larger_target(shared_target) -> None:
    target = shared_target()
    rules = VerifierRules("v", "reference", target.tokenizer_sha256, target.vocab_size, 512, target.eos_tokens)
    engine = Engine(TransformersBackend(target), rules, VerifierConfig(threads=1, min_step_s=0.03))
    engine.start()
    try:
        box, began = CollectingOutbox(), time.monotonic()
        engine.post_open(1, opened(engine, "paced", (5, 6), max_tokens=10), box)
        assert isinstance(box.until_end()[-1], Commit)
        assert time.monotonic() - began > 9 * 0.03
        assert engine.step_s.value >= 0.03
    finally:
        engine.stop()


# === what a grammar allows ======================================================================================


class Withheld(GrammarMatcher):
    """Allows everything, once the test lets it answer."""

    def __init__(self, vocab_size: int, threads: ThreadPoolExecutor) -> None:
        super().__init__(lambda: None, vocab_size, frozenset(), threads)  # type: ignore[arg-type, return-value]
        self.gate = threading.Event()
        self.blocks: list[tuple[int, ...]] = []

    def _allowed(self, block: tuple[int, ...]) -> Allowed:
        assert self.gate.wait(60)
        self.blocks.append(block)
        return Allowed(block, np.ones((len(block) + 1, self._vocab_size), bool))


@pytest.fixture
def asking(engine_at_rest) -> Any:
    """An engine whose thread does not run, a session with a withheld grammar, and one without any."""
    with ThreadPoolExecutor(2) as threads:
        matcher = Withheld(engine_at_rest.rules.vocab_size, threads)
        frame = replace(opened(engine_at_rest, "asks", (5,)), drafting=True, patience=RUN_AHEAD)
        engine_at_rest.post_open(1, frame, box := CollectingOutbox(), matcher)
        yield engine_at_rest, matcher, box
        matcher.gate.set()


def planned(engine: Engine, now: float) -> Batch:
    """Return the plan of the engine's thread at `now`, which never makes it wait."""
    engine._take(engine.inbox.take())
    return engine._schedule(now)


def soon() -> float:
    """Return the time after all that has happened so far."""
    return time.monotonic() + 1.0


def keys(batch: Batch) -> list[int]:
    return [share.slot.key for share in batch.shares]


def answered(matcher: Withheld) -> None:
    matcher.gate.set()
    matcher._answer.result(timeout=60)


def test_a_grammar_that_has_not_answered_leaves_the_engine_asleep_until_it_does(asking) -> None:
    engine, matcher, _ = asking
    now = soon()
    assert planned(engine, now) == Batch(wake_at=now + MASKS_WITHIN_S)
    late = now + MASKS_WITHIN_S
    assert planned(engine, late) == Batch(), "nothing is tried again and again"
    assert not engine.inbox
    answered(matcher)
    assert engine.inbox, "the answer wakes the engine"
    assert keys(planned(engine, late)) == [1]


def test_a_step_waits_shortly_for_a_grammar_and_then_begins_without_it(asking) -> None:
    engine, matcher, _ = asking
    engine.post_open(2, opened(engine, "free", (6,)), CollectingOutbox())
    now = soon()
    assert planned(engine, now) == Batch(wake_at=now + MASKS_WITHIN_S)
    assert planned(engine, now + MASKS_WITHIN_S / 2) == Batch(wake_at=now + MASKS_WITHIN_S)
    without = planned(engine, now + MASKS_WITHIN_S)
    assert keys(without) == [2]
    engine._step(without)
    answered(matcher)
    assert keys(planned(engine, soon())) == [1, 2], "it missed one step"


def test_a_step_begins_as_soon_as_the_grammar_has_answered(asking) -> None:
    engine, matcher, _ = asking
    engine.post_open(2, opened(engine, "free", (6,)), CollectingOutbox())
    now = soon()
    planned(engine, now)
    answered(matcher)
    assert keys(planned(engine, now)) == [1, 2]


def test_a_grammar_is_asked_once_a_step_however_many_drafts_come_meanwhile(asking) -> None:
    engine, matcher, box = asking
    now = soon()
    planned(engine, now)
    drafts = (7, 8, 9)
    for i, token in enumerate(drafts):
        engine.post_frame(1, Draft(0, 1 + i, tuple(map(DraftToken, (token,)))), lambda: None)
        planned(engine, now)
    answered(matcher)
    [share] = (batch := planned(engine, now)).shares
    assert share.block == (), "what was asked about; the drafts keep for the next step"
    assert matcher.blocks == [()]
    engine._step(batch)
    assert isinstance(box.items.get(timeout=60), Opened)
    [token] = token_ids(box.items.get(timeout=60).tokens)
    left = drafts[1:] if token == drafts[0] else ()
    planned(engine, soon())
    answered(matcher)
    assert matcher.blocks == [(), left]


def test_an_answer_about_withdrawn_drafts_is_worth_what_both_have_in_common() -> None:
    with ThreadPoolExecutor(1) as threads:
        matcher = Withheld(16, threads)
        assert matcher.allowed((1, 2)) is None
        matcher.ask((1, 2, 3), lambda: None)
        assert matcher.allowed((1, 2, 3)) is None
        answered(matcher)
        for block, common in (((1, 2, 3), 3), ((1, 2, 3, 4), 3), ((1, 9, 3), 1), ((9,), 0), ((), 0)):
            allowed = matcher.allowed(block)
            assert allowed.block == block[:common]
            assert allowed.tokens.shape == (common + 1, 16)


def test_a_grammar_that_fails_ends_its_own_session_only(asking, monkeypatch) -> None:
    engine, matcher, box = asking
    monkeypatch.setattr(Withheld, "_allowed", lambda *_: 1 // 0)
    engine.post_open(2, opened(engine, "free", (6,)), CollectingOutbox())
    now = soon()
    planned(engine, now)
    with pytest.raises(ZeroDivisionError):
        answered(matcher)
    assert keys(planned(engine, now)) in ([], [2])
    assert keys(planned(engine, now)) == [2]
    assert isinstance(box.until_end()[-1], Internal)


def test_a_text_with_a_grammar_is_as_long_as_without_and_asks_once_a_token(engine) -> None:
    with ThreadPoolExecutor(1) as threads:
        matcher, box = Withheld(engine.rules.vocab_size, threads), CollectingOutbox()
        matcher.gate.set()
        frame = opened(engine, "masked", (5, 6, 7))
        engine.post_open(1, frame, box, matcher)
        tokens = [token for item in box.until_end() if isinstance(item, Commit) for token in token_ids(item.tokens)]
    assert len(tokens) == frame.sampling.max_tokens == len(matcher.blocks)
