"""Prompts in tokens: what cannot fit is refused at once, and a long text holds up nobody."""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from outrider.edge import prompts
from outrider.edge.prompts import IN_THREAD, MAX_CHARACTERS, SLICE, PromptEncoder
from outrider.proto.errors import InvalidArgument, PromptTooLong
from outrider.proto.types import Opened


class Counting:
    """A tokenizer that counts the characters that it is given, and waits for leave where it is told to."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.characters = 0
        self.entered, self.leave = threading.Event(), threading.Event()
        self.leave.set()
        self._tokenizer = tokenizer

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.characters += sum(map(len, texts))
        self.entered.set()
        assert self.leave.wait(60)
        return self._tokenizer.encode_batch_fast(texts, **options)

    def get_vocab(self) -> dict[str, int]:
        return dict(self._tokenizer.get_vocab())


@pytest.fixture(scope="module")
def tokenizer(tokenizer_file: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer_file))


def encoder(context_length: int) -> PromptEncoder:
    made = PromptEncoder()
    if context_length:
        made.meet(Opened(0, 64, 64, "v", context_length=context_length, vocab_size=8192))
    return made


def text_of(characters: int) -> str:
    random.seed(3)
    return "".join(random.choice("abcdefg \n(.)é") for _ in range(characters))


@pytest.mark.parametrize("characters", [5, IN_THREAD + 1, SLICE + 1, 3 * SLICE])
@pytest.mark.parametrize("special", [False, True])
def test_a_text_of_any_length_has_the_tokenizers_own_tokens(
    tokenizer: Tokenizer, characters: int, special: bool
) -> None:
    text = text_of(characters)
    tokens = asyncio.run(encoder(0).encode(tokenizer, text, special=special))
    assert tokens == tuple(tokenizer.encode(text, add_special_tokens=special).ids)


@pytest.mark.parametrize("context_length", [0, 2048, 1 << 20])
def test_a_text_that_is_too_long_for_any_context_is_not_encoded(tokenizer: Tokenizer, context_length: int) -> None:
    counting = Counting(tokenizer)
    text = "x" * (MAX_CHARACTERS + 1)
    with pytest.raises(PromptTooLong, match=f"{len(text)} characters.*shorten it") as caught:
        asyncio.run(encoder(context_length).encode(counting, text, special=True))  # type: ignore[arg-type]
    assert caught.value.field == "open.prompt"
    assert counting.characters == 0


def test_a_text_with_more_characters_than_the_longest_tokens_have_is_not_encoded(tokenizer: Tokenizer) -> None:
    counting, longest = Counting(tokenizer), max(map(len, tokenizer.get_vocab()))
    limited = encoder(2048)
    with pytest.raises(PromptTooLong, match=f"at most {2048 * longest} can fit"):
        asyncio.run(limited.encode(counting, "x" * (2048 * longest + 1), special=True))  # type: ignore[arg-type]
    assert counting.characters == 0


def test_the_encoding_of_a_long_text_ends_as_soon_as_it_cannot_fit(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "SLICE", IN_THREAD)
    counting, text = Counting(tokenizer), text_of(40 * IN_THREAD)
    with pytest.raises(PromptTooLong, match="the target holds 4000, text included; shorten it"):
        asyncio.run(encoder(4000).encode(counting, text, special=True))  # type: ignore[arg-type]
    assert 0 < counting.characters < len(text) / 2


@pytest.mark.parametrize("characters", [4, SLICE + 4])
def test_half_a_surrogate_pair_is_refused_by_its_place(tokenizer: Tokenizer, characters: int) -> None:
    text = "x" * characters + "\udc00"
    with pytest.raises(InvalidArgument, match=r"surrogate pair at character \d+") as caught:
        asyncio.run(encoder(0).encode(tokenizer, text, special=True))
    assert caught.value.field == "open.prompt"


def test_token_ids_are_refused_from_twice_the_largest_context_on(tokenizer: Tokenizer) -> None:
    with pytest.raises(PromptTooLong, match="has 2001 tokens or more; the target holds 1000"):
        asyncio.run(encoder(1000).encode(tokenizer, [5] * 2001, special=True))
    assert len(asyncio.run(encoder(1000).encode(tokenizer, [5] * 1500, special=True))) == 1500
    limited = encoder(1000)
    limited.meet(Opened(0, 64, 64, "w", context_length=500, vocab_size=8192))
    assert len(asyncio.run(limited.encode(tokenizer, [5] * 1500, special=True))) == 1500


@pytest.mark.parametrize("characters", [IN_THREAD + 1, SLICE + 1])
async def test_others_go_on_while_a_long_text_is_encoded(tokenizer: Tokenizer, characters: int) -> None:
    slow, text = Counting(tokenizer), text_of(characters)
    slow.leave.clear()

    limited = encoder(0)
    long = asyncio.create_task(limited.encode(slow, text, special=True))  # type: ignore[arg-type]
    try:
        await asyncio.to_thread(slow.entered.wait, 60)
        assert await limited.encode(tokenizer, "def main():", special=True)
        assert not long.done()
    finally:
        slow.leave.set()
    assert await long == tuple(tokenizer.encode(text).ids)


def test_encoding_leaves_python_to_other_threads_meanwhile(tokenizer: Tokenizer) -> None:
    """A thread is of no use to a call that keeps Python's lock: `Tokenizer.encode` does, by 4 s for a million."""
    text, turns = text_of(1 << 18), 0

    async def both() -> int:
        nonlocal turns
        long = asyncio.get_running_loop().run_in_executor(None, lambda: prompts.encode(tokenizer, text, special=False))
        while not long.done():
            turns += 1
            await asyncio.sleep(0)
        return len(await long)

    assert asyncio.run(both()) > 1000
    assert turns > 10  # one or two otherwise
