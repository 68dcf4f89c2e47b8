"""Turns at grammars: one of each owner at a time, owners in turn, none lost."""

from __future__ import annotations

import asyncio
import threading

import pytest
from tiny_grammars import EOS, VOCAB, tiny_tokenizer

from outrider.cloud.grammar.grammar import COMPILING_THREADS, FairTurns, GrammarMatcher, Grammars
from outrider.proto.types import Grammar, GrammarKind


async def test_an_owner_has_one_turn_at_a_time_while_others_find_a_free_one() -> None:
    turns = FairTurns(2)
    await turns.take("a")
    second = asyncio.create_task(turns.take("a"))
    await asyncio.wait_for(turns.take("b"), 60)
    await asyncio.sleep(0)
    assert not second.done()
    turns.give_back("b")
    await asyncio.sleep(0)
    assert not second.done()
    turns.give_back("a")
    await asyncio.wait_for(second, 60)


async def test_a_turn_that_is_given_up_while_waiting_or_just_begun_is_not_lost() -> None:
    turns = FairTurns(1)
    await turns.take("a")
    waiting = [asyncio.create_task(turns.take(owner)) for owner in "bcd"]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    turns.give_back("a")  # to c, which leaves before it notices
    waiting[1].cancel()
    await asyncio.wait_for(waiting[2], 60)
    turns.give_back("d")
    await asyncio.wait_for(turns.take("e"), 60)


@pytest.mark.parametrize("known", [True, False])
def test_grammars_of_others_wait_for_no_more_than_one_trial_of_a_key(known: bool, monkeypatch) -> None:
    """One that is known already waits for none, though all threads are at trials."""
    grammars = Grammars(tiny_tokenizer(), VOCAB, frozenset({EOS}))
    costly = [Grammar(GrammarKind.REGEX, "a" * i) for i in range(1, 9)]
    plain, ended = Grammar(GrammarKind.REGEX, "b+"), threading.Event()
    tried: list[Grammar] = []
    try_one = grammars._try

    def slow_trial(grammar: Grammar) -> None:
        tried.append(grammar)
        if grammar in costly:
            assert ended.wait(60)
        try_one(grammar)

    async def scenario() -> None:
        if known:
            await grammars.matcher(plain, owner="alice")
        monkeypatch.setattr(grammars, "_try", slow_trial)
        keys = COMPILING_THREADS if known else 1
        waiting = [
            asyncio.create_task(grammars.matcher(grammar, owner=f"mallory {i % keys}"))
            for i, grammar in enumerate(costly)
        ]
        while len(tried) < keys:  # noqa: ASYNC110 - noted in another thread
            await asyncio.sleep(0.01)
        assert await asyncio.wait_for(grammars.matcher(plain, owner="alice"), 60) is not None
        assert len([grammar for grammar in tried if grammar in costly]) == keys
        for task in waiting:
            task.cancel()
        ended.set()
        await asyncio.gather(*waiting, return_exceptions=True)
        again = grammars.matcher(Grammar(GrammarKind.REGEX, "ab"), owner="mallory 0")
        assert await asyncio.wait_for(again, 60) is not None

    try:
        asyncio.run(scenario())
    finally:
        ended.set()
        grammars.close()


def test_a_key_reads_one_text_at_a_time_and_texts_at_their_beginning_wait_for_none(monkeypatch) -> None:
    grammars = Grammars(tiny_tokenizer(), VOCAB, frozenset({EOS}))
    plain, ended = Grammar(GrammarKind.REGEX, "[ab]+"), threading.Event()
    read: list[list[int]] = []
    resume = GrammarMatcher.resume

    def slow_resume(matcher: GrammarMatcher, committed: list[int]) -> None:
        read.append(committed)
        if len(committed) > 1:
            assert ended.wait(60)
        resume(matcher, committed)

    async def scenario() -> None:
        await grammars.matcher(plain, owner="alice")
        monkeypatch.setattr(GrammarMatcher, "resume", slow_resume)
        waiting = [asyncio.create_task(grammars.matcher(plain, [0, 1, 0], "mallory")) for _ in range(6)]
        while not read:  # noqa: ASYNC110 - noted in another thread
            await asyncio.sleep(0.01)
        assert await asyncio.wait_for(grammars.matcher(plain, [0], "alice"), 60) is not None
        waiting += [asyncio.create_task(grammars.matcher(plain, [1, 1], f"key {i}")) for i in range(6)]
        assert await asyncio.wait_for(grammars.matcher(plain, owner="alice"), 60) is not None
        assert len([text for text in read if len(text) > 1]) <= COMPILING_THREADS
        assert read.count([0, 1, 0]) == 1
        ended.set()
        assert None not in await asyncio.gather(*waiting)

    try:
        asyncio.run(scenario())
    finally:
        ended.set()
        grammars.close()
