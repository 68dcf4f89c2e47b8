"""The engine's thread: one session's failure is its own, and a session has one seat."""

from __future__ import annotations

import queue
import time
from typing import Any

import pytest

from outrider.cloud.config import VerifierConfig
from outrider.cloud.engine import Engine, Outbox
from outrider.cloud.target import Rows, load_target
from outrider.proto.errors import ConfigError, Internal, Unavailable
from outrider.proto.session import VerifierRules
from outrider.proto.types import Commit, Open, Opened, Sampling

POISON = 666


class Collected(Outbox):
    def __init__(self) -> None:
        self.items: queue.Queue[Any] = queue.Queue()

    def put(self, item: Any) -> None:
        self.items.put(item)

    def unread(self) -> int:
        return 0

    def until_end(self) -> list[Any]:
        items = []
        while not items or not (isinstance(items[-1], Exception) or getattr(items[-1], "finish", None)):
            items.append(self.items.get(timeout=60))
        return items


@pytest.fixture
def engine() -> Any:
    target = load_target("reference", kv_tokens=4096)
    rules = VerifierRules("v", "reference", target.tokenizer_sha256, target.vocab_size, 512, target.eos_tokens)
    engine = Engine(target, rules, VerifierConfig(threads=1, max_sessions=4))
    forward = target.forward

    def poisoned(batch: list[Rows]) -> Any:
        if any(POISON in rows.tokens for rows in batch):
            raise RuntimeError("out of memory, say")
        return forward(batch)

    target.forward = poisoned  # type: ignore[method-assign]
    engine.start()
    yield engine
    engine.stop()


def opened(engine: Engine, session: str, prompt: tuple[int, ...], max_tokens: int = 20) -> Open:
    return Open(
        "reference",
        engine.rules.tokenizer_sha256,
        prompt,
        Sampling(max_tokens=max_tokens, ignore_eos=True),
        session,
        drafting=False,
    )


def test_a_step_that_fails_ends_only_the_session_at_fault(engine) -> None:
    boxes = [Collected() for _ in range(3)]
    prompts = [(5, 6, 7), (5, POISON, 7), (8, 9)]
    for key, (box, prompt) in enumerate(zip(boxes, prompts, strict=True)):
        engine.post_open(key, opened(engine, f"s{key}", prompt), box)
    ends = [box.until_end()[-1] for box in boxes]
    assert isinstance(ends[1], Internal)
    assert isinstance(ends[0], Commit)
    assert isinstance(ends[2], Commit)


def test_the_texts_beside_a_failure_are_what_they_are_alone(engine) -> None:
    def text(key: int, *beside: tuple[int, ...]) -> list[int]:
        box = Collected()
        engine.post_open(key, opened(engine, f"text{key}", (5, 6, 7)), box)
        for i, prompt in enumerate(beside):
            engine.post_open(100 + i, opened(engine, f"beside{i}", prompt), Collected())
        tokens = [token for item in box.until_end() if isinstance(item, Commit) for token in item.tokens]
        engine.post_close(key)
        return tokens

    assert text(1) == text(2, (POISON,), (9, 9, 9))


def test_a_session_that_opens_again_takes_the_place_of_its_old_stream(engine) -> None:
    old, new = Collected(), Collected()
    engine.post_open(1, opened(engine, "same", (5, 6, 7), max_tokens=400), old)
    assert isinstance(old.items.get(timeout=60), Opened)
    engine.post_open(2, opened(engine, "same", (5, 6, 7)), new)
    assert isinstance(old.until_end()[-1], Unavailable)
    assert isinstance(new.until_end()[-1], Commit)
    assert engine.session_count == 1


def test_a_defect_in_one_event_does_not_end_the_thread(engine) -> None:
    engine._post(lambda: 1 // 0)
    box = Collected()
    engine.post_open(1, opened(engine, "after", (5, 6)), box)
    assert isinstance(box.until_end()[-1], Commit)


def test_a_step_takes_at_least_as_long_as_the_pace_that_stands_for_a_larger_target() -> None:
    target = load_target("reference", kv_tokens=4096)
    rules = VerifierRules("v", "reference", target.tokenizer_sha256, target.vocab_size, 512, target.eos_tokens)
    engine = Engine(target, rules, VerifierConfig(threads=1, pace_s=0.03))
    engine.start()
    try:
        box, began = Collected(), time.monotonic()
        engine.post_open(1, opened(engine, "paced", (5, 6), max_tokens=10), box)
        assert isinstance(box.until_end()[-1], Commit)
        assert time.monotonic() - began > 9 * 0.03
        assert engine.step_s >= 0.03
    finally:
        engine.stop()


def test_a_pace_below_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="pace_s"):
        VerifierConfig(pace_s=-0.1)
