"""A text costs a grammar's threads no more than its tokens and masks grant it, and no second trial."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tiny_grammars import EOS, VOCAB, Inline, tiny_tokenizer

from outrider.cloud.grammar.grammar import AHEAD_S, ROW_S, TOKEN_S, GrammarMatcher, Grammars
from outrider.proto.errors import InvalidArgument
from outrider.proto.types import Grammar, GrammarKind

PLAIN = Grammar(GrammarKind.REGEX, "[ab]+")
AMBIGUOUS = Grammar(GrammarKind.LARK, 'start: x\nx: x x | "a"')


@dataclass
class Parser:
    """Allows everything but EOS; what it does takes time by the clock of the test."""

    clock: Clock
    token_s: float = 0.0
    row_s: float = 0.0
    consumed: int = 0

    def consume_token(self, token: int) -> bool:
        self.clock.now_s += self.token_s
        self.consumed += 1
        return token != EOS

    def compute_bitmask(self) -> bytes:
        self.clock.now_s += self.row_s
        return bytes([0b0111])

    def rollback(self, tokens: int) -> bool:
        self.consumed -= tokens
        return True

    def is_error(self) -> bool:
        return False


@dataclass
class Clock:
    """Processor time of the thread that a parser runs in, in seconds."""

    now_s: float = 0.0


@pytest.fixture
def clock(monkeypatch) -> Clock:
    planted = Clock()
    monkeypatch.setattr("outrider.cloud.grammar.grammar.time.thread_time", lambda: planted.now_s)
    return planted


@pytest.fixture
def grammars() -> Any:
    made = Grammars(tiny_tokenizer(), VOCAB, frozenset({EOS}))
    yield made
    made.close()


def matcher_of(parser: Parser) -> GrammarMatcher:
    fresh: Callable[[], Any] = lambda: parser  # noqa: E731 - typed
    return GrammarMatcher(fresh, VOCAB, frozenset({EOS}), Inline())


def refusal_of(work: Callable[[], object]) -> str:
    with pytest.raises(InvalidArgument) as refused:
        work()
    assert refused.value.field == "sampling.grammar"
    return refused.value.message


def test_reading_a_text_again_ends_with_the_token_that_takes_too_long(clock: Clock) -> None:
    parser = Parser(clock, token_s=0.1)
    assert "less ambiguous" in refusal_of(lambda: matcher_of(parser).resume([0] * 10_000))
    assert parser.consumed == math.floor(AHEAD_S / (0.1 - TOKEN_S)) + 1


def test_a_text_may_be_as_long_as_any_where_its_grammar_takes_its_time_but_no_more(clock: Clock) -> None:
    parser = Parser(clock, token_s=0.9 * TOKEN_S, row_s=0.9 * ROW_S)
    matcher = matcher_of(parser)
    matcher.resume([0] * 100_000)
    for _ in range(1_000):
        assert len(matcher.ask((0, 1, 0), lambda: None, ((1, (0, 0)),)).result().tokens) == 4
        matcher.advance((0, 1))
    assert clock.now_s > 10 * AHEAD_S


@pytest.mark.parametrize("branches", [(), ((0, (1,) * 16),)])
def test_masks_that_take_too_long_end_in_that_error_alone_and_never_in_another_mask(clock: Clock, branches) -> None:
    parser = Parser(clock)
    matcher = matcher_of(parser)
    matcher.resume([0])
    parser.row_s = 0.9 * AHEAD_S
    assert matcher.ask((), lambda: None).result().tokens.shape == (1, VOCAB), "once it may"
    matcher.advance((0,))
    parser.row_s = 1.8 * ROW_S  # so that what the next row grants would be enough
    block = () if branches else (1,) * 16
    assert "takes too long to follow" in refusal_of(lambda: matcher.ask(block, lambda: None, branches).result())
    parser.row_s = 0.0
    for _ in range(3):  # its parser has read drafts
        matcher.advance(())
        assert "takes too long to follow" in refusal_of(lambda: matcher.ask((), lambda: None).result())


def test_cheap_masks_save_up_no_time_for_costly_ones(clock: Clock) -> None:
    parser = Parser(clock)
    matcher = matcher_of(parser)
    matcher.resume([0])
    for _ in range(1_000):
        matcher.ask((), lambda: None).result()
        matcher.advance((0,))
    parser.row_s = 2 * AHEAD_S
    refusal_of(lambda: matcher.ask((), lambda: None).result())


async def test_the_parser_of_an_ambiguous_grammar_is_timed_too(grammars: Grammars, monkeypatch) -> None:
    calls = iter(range(1 << 30))
    monkeypatch.setattr("outrider.cloud.grammar.grammar.time.thread_time", lambda: 0.01 * next(calls))

    await grammars.matcher(AMBIGUOUS, [0], "mallory")
    with pytest.raises(InvalidArgument, match="less ambiguous"):
        await grammars.matcher(AMBIGUOUS, [0] * 900, "mallory")


# === one trial ==================================================================================================


def forgotten(grammars: Grammars, monkeypatch) -> None:
    """Evict all grammars, and allow no further trial."""
    grammars._compiled.clear()
    monkeypatch.setattr(grammars, "_try", lambda grammar: pytest.fail("a second trial"))


def test_a_text_goes_on_without_another_trial_when_its_grammar_is_evicted(grammars: Grammars, monkeypatch) -> None:
    matcher = grammars.begin(PLAIN, (0, 1)).result()
    before = matcher.ask((), lambda: None).result().tokens
    forgotten(grammars, monkeypatch)
    matcher._rebuild()  # as after drafts that have broken its parser
    matcher.advance(())
    assert np.array_equal(matcher.ask((), lambda: None).result().tokens, before)


async def test_a_grammar_that_is_evicted_while_it_waits_for_its_turn_is_not_tried_again(grammars, monkeypatch) -> None:
    take = grammars._resume_turns.take

    async def evicted_meanwhile(owner: str) -> None:
        forgotten(grammars, monkeypatch)
        await take(owner)

    await grammars.matcher(PLAIN, owner="alice")
    monkeypatch.setattr(grammars._resume_turns, "take", evicted_meanwhile)
    matcher = await grammars.matcher(PLAIN, [0, 1], "alice")
    assert matcher.ask((), lambda: None).result().tokens.any()


def test_a_grammar_that_was_refused_lately_needs_no_thread(grammars: Grammars) -> None:
    grammars._refused[PLAIN] = "is refused", math.inf
    with pytest.raises(InvalidArgument, match="is refused"):
        asyncio.run(grammars.matcher(PLAIN, owner="mallory"))
    assert grammars._pools is None
