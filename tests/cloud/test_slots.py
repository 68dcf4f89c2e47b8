"""KV pages as texts grow: who gets them, who waits, and who is sent away; the texts stay the same."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from collecting_outbox import CollectingOutbox

from outrider.cloud.serving.engine import Engine
from outrider.cloud.serving.sessions import AHEAD, Sessions
from outrider.cloud.serving.slots import ANYBODY, Owner, Slot
from outrider.cloud.target.backend import StepRow
from outrider.cloud.target.kv_cache import PagedKVCache
from outrider.cloud.target.target import Target
from outrider.cloud.target.target_loading import load_target
from outrider.cloud.target.transformers_backend import TransformersBackend
from outrider.cloud.target.verification import VerificationInput
from outrider.cloud.testing import save_tiny_target, tiny_llama
from outrider.cloud.verifier_config import VerifierConfig
from outrider.proto.errors import Unavailable
from outrider.proto.session.verifier import VerifierRules, VerifierSession
from outrider.proto.testing import word_tokenizer
from outrider.proto.types import (
    Commit,
    Continue,
    DraftToken,
    FinishReason,
    Open,
    Sampling,
    ServiceGoal,
    token_ids,
)

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


def test_texts_that_are_sent_away_for_pages_go_on_unchanged(target) -> None:
    with serving(target, 64) as engine:
        expected, sent_away = texts(target, engine, 5, max_tokens=120)
        assert sent_away == 0
    with serving(target, 16) as engine:
        found, sent_away = texts(target, engine, 5, max_tokens=120)
        assert sent_away > 0
        assert engine.metrics.counts.preempted == sent_away
        deadline = time.monotonic() + 60
        while engine.sessions.num_running and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.backend.capacity.free_pages == 16
    assert found == expected


def sessions(pages: int) -> Sessions:
    target = Target(tiny_llama(), word_tokenizer(61), kv_tokens=pages * PAGE, page_size=PAGE)
    return Sessions(TransformersBackend(target), RULES, 32)


def opened(
    sessions: Sessions, key: int, prompt: int, max_tokens: int = 1000, keep_s: float = 0.0, api_key: str = ""
) -> Slot:
    """A slot whose prompt takes `prompt` pages less the room for one step's drafts."""
    tokens = (10 + key,) * (prompt * PAGE - RULES.max_drafts)
    return added(sessions, key, tokens, api_key=api_key, max_tokens=max_tokens, keep_s=keep_s)


def added(
    sessions: Sessions, key: int, tokens: tuple[int, ...], isolation: str = "", api_key: str = "", **options: Any
) -> Slot:
    sampling = Sampling(max_tokens=int(options.pop("max_tokens", 1000)))
    frame = Open("tiny", "0" * 64, tokens, sampling, f"s{key}", drafting=True, **options)
    slot = Slot(
        key,
        VerifierSession(frame, RULES, 0.0),
        CollectingOutbox(),
        0.0,
        Owner(api_key, isolation=isolation),
    )
    sessions.open(slot)
    sessions.start_waiting()
    return slot


def next_turn(sessions: Sessions, slot: Slot, *new: int) -> None:
    turn = Continue(len(slot.session.transcript), new, None, 1)
    sessions.take(slot, turn, None, 0.0, 0.0)
    sessions.start_waiting()


def written(slot: Slot, pages: int) -> None:
    """Let a slot's text and its cache fill `pages` but for one step's drafts."""
    slot.session.transcript += [2] * (pages * PAGE - RULES.max_drafts - len(slot.session.transcript))
    computed(slot, len(slot.session.transcript) - 1)


def computed(slot: Slot, length: int) -> None:
    slot.handle.extend(slot.session.transcript[slot.handle.length : min(length, slot.handle.capacity)])


def test_pages_are_given_in_order_of_admission_and_one_is_left_for_each_that_runs() -> None:
    pool = sessions(20)
    first, second, third = opened(pool, 1, 8), opened(pool, 2, 8), opened(pool, 3, 1)
    assert (first.handle.num_pages, second.handle.num_pages) == (12, 0), "a few ahead"
    assert third.waits_for_pages, "it came later"
    assert pool.running() == [first]
    pool.release(first)
    pool.start_waiting()
    assert not second.waits_for_pages
    assert not third.waits_for_pages


def test_a_text_does_not_wait_for_a_beginning_that_one_of_a_lower_class_reads() -> None:
    tokens, batch = tuple(range(10, 10 + 2 * PAGE)), ServiceGoal(batch=True)
    for first, second, waits in ((None, None, True), (batch, batch, True), (None, batch, True), (batch, None, False)):
        pool = sessions(40)
        added(pool, 1, tokens, service=first)
        other = added(pool, 2, tokens, service=second)
        assert other.waits_for_pages == waits, (first, second)


def test_a_text_grows_a_few_pages_ahead_and_no_further_than_its_end() -> None:
    pool = sessions(20)
    slot = opened(pool, 1, 2, max_tokens=6 * PAGE)
    assert slot.handle.capacity == 2 * PAGE + AHEAD
    written(slot, 7)
    assert pool.grow() == []
    assert slot.handle.capacity == 8 * PAGE


@pytest.mark.parametrize(("pages_of_old", "pages_of_young"), [(8, 5), (2, 8)], ids=["the older grows", "it grows"])
def test_growth_sends_away_the_youngest_and_spares_the_others(pages_of_old, pages_of_young) -> None:
    pool = sessions(12)
    old, young = opened(pool, 1, 2), opened(pool, 2, 1)
    assert (len(old.handle.pages), len(young.handle.pages)) == (6, 5)
    written(young, pages_of_young)
    written(old, pages_of_old)
    assert pool.grow() == [young]
    assert isinstance(young.outbox.items.get(), Unavailable)
    assert pool.running() == [old]
    assert len(old.handle.pages) >= pages_of_old


def test_growth_sends_away_the_youngest_of_the_key_that_has_most_pages() -> None:
    pool = sessions(20)
    first, second = opened(pool, 1, 2, api_key="many"), opened(pool, 2, 2, api_key="many")
    other = opened(pool, 3, 2, api_key="few")
    written(other, 6)
    written(first, 7)
    written(second, 8)
    assert pool.grow() == [second], "and neither the one that began last nor the one that began first"
    assert pool.running() == [first, other]


def test_freed_pages_go_to_the_key_that_has_fewest_and_in_order_within_it() -> None:
    pool = sessions(20)
    running, leaving = opened(pool, 1, 2, api_key="many"), opened(pool, 2, 8, api_key="many")
    waiting = [opened(pool, 3, 8, api_key="many"), *(opened(pool, key, 8, api_key="few") for key in (4, 5))]
    assert pool.running() == [running, leaving]
    pool.release(leaving)
    pool.start_waiting()
    assert pool.running() == [running, waiting[1]]


def test_parked_sessions_hold_no_page_from_any_that_runs() -> None:
    pool = sessions(12)
    idle, busy = opened(pool, 1, 4, keep_s=60.0), opened(pool, 2, 2)
    written(idle, 4)
    idle.session.finish = FinishReason.LENGTH
    pool.park(idle, 0.0)
    written(busy, 12)
    assert pool.grow() == []
    assert idle.outbox.items.empty()
    assert len(busy.handle.pages) == 12
    pool.release(busy)
    next_turn(pool, idle, 9)
    assert idle.session.cached_tokens == 0, "its pages were needed"
    assert pool.running() == [idle]


def test_a_turn_reads_only_what_is_new() -> None:
    pool = sessions(12)
    slot = opened(pool, 1, 4, keep_s=60.0)
    written(slot, 4)
    for _ in range(3):
        length = slot.handle.length
        slot.session.finish = FinishReason.LENGTH
        pool.park(slot, 0.0)
        next_turn(pool, slot, 9, 9)
        assert slot.session.cached_tokens == slot.handle.length == length
        assert slot.num_uncomputed_tokens == 3, "the last token of the text, and the new ones"
        computed(slot, len(slot.session.transcript) - 1)


def test_growth_comes_before_admission() -> None:
    pool = sessions(8)
    running, waiting = opened(pool, 1, 2), opened(pool, 2, 2)
    assert len(running.handle.pages) == 6
    written(running, 8)
    assert pool.grow() == []
    pool.start_waiting()
    assert waiting.waits_for_pages


def test_a_turn_without_room_for_its_prompt_waits_behind_those_that_came_before() -> None:
    pool = sessions(16)
    idle = opened(pool, 1, 2, keep_s=60.0)
    written(idle, 2)
    idle.session.finish = FinishReason.LENGTH
    pool.park(idle, 0.0)
    busy, other = opened(pool, 2, 8), opened(pool, 3, 8)
    next_turn(pool, idle, *[9] * (6 * PAGE))
    assert idle.waits_for_pages
    pool.release(busy)
    pool.start_waiting()
    assert pool.running() == [other], "it came before"
    pool.release(other)
    pool.start_waiting()
    assert pool.running() == [idle]


def test_a_text_waits_for_what_another_is_reading_and_reads_on_from_there() -> None:
    pool, prompt = sessions(60), tuple(range(3, 3 + 2 * PAGE))
    reader, same = added(pool, 1, prompt), added(pool, 2, prompt)
    longer = added(pool, 3, (*prompt, *prompt))
    theirs, other, shorter = added(pool, 4, prompt, "theirs"), added(pool, 5, prompt[1:]), added(pool, 6, prompt[:20])
    assert pool.running() == [reader, theirs, other, shorter], "no text waits for one that has more to read"
    assert shorter.session.cached_tokens == 0
    for length, started in ((PAGE - 1, []), (PAGE, [same]), (2 * PAGE - 1, [same]), (2 * PAGE, [same, longer])):
        computed(reader, length)
        pool.backend.target.pool.register(reader.handle, length)
        pool.start_waiting()
        assert [slot for slot in (same, longer) if not slot.waits_for_pages] == started
    assert (same.session.cached_tokens, longer.session.cached_tokens) == (PAGE, 2 * PAGE)


def test_a_text_that_has_ended_holds_no_pages_unless_it_is_kept() -> None:
    pool = sessions(8)
    first, waiting = opened(pool, 1, 6), opened(pool, 2, 2)
    first.session.on_cancel()
    pool.park(first, 0.0)
    pool.start_waiting()
    assert not waiting.waits_for_pages


def test_a_cancelled_text_that_never_had_pages_can_be_followed_by_another_turn() -> None:
    pool = sessions(8)
    first, waiting = opened(pool, 1, 6), opened(pool, 2, 2, keep_s=60.0)
    waiting.session.on_cancel()
    pool.park(waiting, 0.0)
    pool.release(first)
    next_turn(pool, waiting, 9)
    assert pool.running() == [waiting]


def test_a_session_that_ends_amid_a_step_leaves_none_of_its_drafts_to_be_found(target) -> None:
    target.pool = PagedKVCache(8 * PAGE, PAGE, torch.float32, torch.device("cpu"))
    backend = TransformersBackend(target)
    sessions = Sessions(backend, replace(RULES, tokenizer_sha256=target.tokenizer_sha256, max_drafts=16), 1)
    prompt, drafts = tuple(range(3, 33)), tuple(range(20, 34))
    opening = replace(frame(target, 0, max_tokens=40), prompt=prompt)
    assert sessions.admit(0, opening, CollectingOutbox(), None, ANYBODY, 0.0)
    sessions.start_waiting()
    slot = sessions.get(0)
    asked = VerificationInput(opening.sampling, prompt, len(prompt), tuple(map(DraftToken, drafts)))
    backend.step([StepRow(slot.handle, prompt, asked)])
    assert slot.handle.length == len(prompt) + len(drafts)
    sessions.release(slot)
    assert backend.open((*prompt, *drafts, 3)).length < len(prompt)
