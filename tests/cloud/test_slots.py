"""KV pages as texts grow: who gets them, who waits, and who is sent away; the texts stay the same."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from collecting_outbox import CollectingOutbox

from outrider.cloud.config import VerifierConfig
from outrider.cloud.engine import Engine
from outrider.cloud.kv_cache import PagedKVCache
from outrider.cloud.slots import AHEAD, Slot, Slots
from outrider.cloud.target import Target, load_target
from outrider.cloud.testing import save_tiny_target, tiny_llama
from outrider.cloud.transformers_backend import TransformersBackend
from outrider.proto.errors import ResourceExhausted, Unavailable
from outrider.proto.session import VerifierRules, VerifierSession
from outrider.proto.testing import word_tokenizer
from outrider.proto.types import Commit, Continue, FinishReason, Goaway, Open, Sampling, token_ids

PAGE = 16
RULES = VerifierRules("v", "tiny", "0" * 64, 64, 1 << 20, frozenset(), max_drafts=4)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Target:
    return load_target(str(save_tiny_target(tmp_path_factory.mktemp("target"))), kv_tokens=32 * PAGE)


@contextmanager
def serving(target: Target, pages: int) -> Iterator[Engine]:
    target.pool = PagedKVCache(pages * PAGE, PAGE, torch.float32, torch.device("cpu"))
    rules = VerifierRules("v", "tiny", target.tokenizer_sha256, target.vocab_size, pages * PAGE, frozenset())
    engine = Engine(TransformersBackend(target), rules, VerifierConfig(threads=1, max_sessions=32))
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def frame(target: Target, i: int, max_tokens: int, committed: tuple[int, ...] = ()) -> Open:
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True, temperature=1.0, seed=i)
    prompt = (3 + i, 7, 11)
    return Open("tiny", target.tokenizer_sha256, prompt, sampling, f"s{i}", drafting=False, committed=committed)


def texts(target: Target, engine: Engine, count: int, max_tokens: int) -> tuple[list[list[int]], int]:
    """The texts of sessions that run at once, resumed in a new stream where they are sent away, and how many were."""
    boxes = {i: CollectingOutbox() for i in range(count)}
    found: list[list[int]] = [[] for _ in boxes]
    sent_away = 0
    for i, box in boxes.items():
        engine.post_open(i, frame(target, i, max_tokens), box)
    while boxes:
        for i, box in list(boxes.items()):
            item = box.items.get(timeout=60)
            if isinstance(item, Commit):
                found[i] += token_ids(item.tokens)
                if item.finish is not None:
                    assert item.finish is FinishReason.LENGTH
                    engine.post_close(i)
                    del boxes[i]
            elif isinstance(item, Exception):
                assert isinstance(item, Unavailable), item
                sent_away += 1
                engine.post_open(i, frame(target, i, max_tokens, tuple(found[i])), box)
    return found, sent_away


def test_sessions_hold_pages_for_their_text_so_far_and_not_for_all_of_it(target) -> None:
    with serving(target, 128) as engine:
        boxes = [CollectingOutbox() for _ in range(16)]
        for i, box in enumerate(boxes):
            engine.post_open(i, frame(target, i, max_tokens=2000), box)
        for box in boxes:
            while not isinstance(box.items.get(timeout=60), Commit):
                pass
        assert engine.session_count == 16, "their texts may take 2,000 pages of 128"


def test_texts_that_are_sent_away_for_pages_go_on_unchanged(target) -> None:
    with serving(target, 64) as engine:
        expected, sent_away = texts(target, engine, 5, max_tokens=120)
        assert sent_away == 0
    with serving(target, 16) as engine:
        found, sent_away = texts(target, engine, 5, max_tokens=120)
        assert sent_away > 0
        assert engine.metrics.preemptions._value.get() == sent_away
        deadline = time.monotonic() + 10
        while engine.session_count and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.backend.capacity.free_pages == 16
    assert found == expected


def slots(pages: int) -> Slots:
    target = Target(tiny_llama(), word_tokenizer(61), kv_tokens=pages * PAGE, page_size=PAGE)
    return Slots(TransformersBackend(target), "v")


def opened(slots: Slots, key: int, prompt: int, max_tokens: int = 1000, keep_s: float = 0.0) -> Slot:
    """A slot whose prompt takes `prompt` pages less the room for one step's drafts."""
    tokens = (1,) * (prompt * PAGE - RULES.max_drafts)
    frame = Open("tiny", "0" * 64, tokens, Sampling(max_tokens=max_tokens), f"s{key}", drafting=True, keep_s=keep_s)
    return slots.open(key, VerifierSession(frame, RULES, 0.0), CollectingOutbox(), None, 0.0)


def written(slot: Slot, pages: int) -> None:
    """Let a slot's text and its cache fill `pages` but for one step's drafts."""
    slot.session.transcript += [2] * (pages * PAGE - RULES.max_drafts - len(slot.session.transcript))
    slot.handle.length = min(len(slot.session.transcript) - 1, slot.handle.capacity)


def test_pages_are_given_in_order_of_admission_and_one_is_left_for_each_that_runs() -> None:
    pool = slots(20)
    first, second, third = opened(pool, 1, 8), opened(pool, 2, 8), opened(pool, 3, 1)
    assert (len(first.handle.pages), len(second.handle.pages)) == (12, 0), "a few ahead"
    assert third.waits_for_pages, "it came later"
    assert pool.running() == [first]
    pool.release(first)
    pool.start_waiting()
    assert not second.waits_for_pages
    assert not third.waits_for_pages


def test_a_text_grows_a_few_pages_ahead_and_no_further_than_its_end() -> None:
    pool = slots(20)
    slot = opened(pool, 1, 2, max_tokens=6 * PAGE)
    assert slot.handle.capacity == 2 * PAGE + AHEAD
    written(slot, 7)
    assert pool.grow() == []
    assert slot.handle.capacity == 8 * PAGE


def test_growth_sends_away_the_youngest_and_spares_the_others() -> None:
    pool = slots(12)
    old, young = opened(pool, 1, 2), opened(pool, 2, 1)
    assert (len(old.handle.pages), len(young.handle.pages)) == (6, 5)
    written(young, 5)
    written(old, 8)
    assert pool.grow() == [young]
    assert isinstance(young.outbox.items.get(), Unavailable)
    assert pool.running() == [old]
    assert len(old.handle.pages) >= 8


def test_a_text_that_cannot_grow_and_is_the_youngest_is_sent_away_itself() -> None:
    pool = slots(12)
    old, young = opened(pool, 1, 2), opened(pool, 2, 1)
    written(young, 8)
    assert pool.grow() == [young]
    assert pool.running() == [old]


def test_parked_sessions_go_before_any_that_runs() -> None:
    pool = slots(12)
    idle, busy = opened(pool, 1, 4, keep_s=60.0), opened(pool, 2, 2)
    written(idle, 4)
    idle.session.finish = FinishReason.LENGTH
    pool.park(idle, 0.0)
    written(busy, 10)
    assert pool.grow() == []
    assert isinstance(idle.outbox.items.get(), Goaway)
    assert len(busy.handle.pages) >= 10


def test_growth_comes_before_admission() -> None:
    pool = slots(8)
    running, waiting = opened(pool, 1, 2), opened(pool, 2, 2)
    assert len(running.handle.pages) == 6
    written(running, 8)
    assert pool.grow() == []
    pool.start_waiting()
    assert waiting.waits_for_pages


def test_a_turn_without_room_for_its_prompt_is_refused_with_a_time_to_retry() -> None:
    pool = slots(16)
    idle = opened(pool, 1, 2, keep_s=60.0)
    written(idle, 2)
    idle.session.finish = FinishReason.LENGTH
    pool.park(idle, 0.0)
    opened(pool, 2, 8)
    turn = Continue(len(idle.session.transcript), (1,) * (6 * PAGE), None, 1)
    with pytest.raises(ResourceExhausted) as caught:
        pool.resume(idle, idle.session.continued(turn, 0.0), turn.start, None, 0.0)
    assert caught.value.retry_after_s > 0


def test_a_text_that_has_ended_holds_no_pages_unless_it_is_kept() -> None:
    pool = slots(8)
    first, waiting = opened(pool, 1, 6), opened(pool, 2, 2)
    first.session.on_cancel()
    pool.park(first, 0.0)
    pool.start_waiting()
    assert not waiting.waits_for_pages


def test_a_cancelled_text_that_never_had_pages_can_be_followed_by_another_turn() -> None:
    pool = slots(8)
    first, waiting = opened(pool, 1, 6), opened(pool, 2, 2, keep_s=60.0)
    waiting.session.on_cancel()
    pool.park(waiting, 0.0)
    pool.release(first)
    turn = Continue(4, (9,), None, 1)
    pool.resume(waiting, waiting.session.continued(turn, 0.0), turn.start, None, 0.0)
    assert pool.running() == [waiting]
