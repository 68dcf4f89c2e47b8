"""Tokens to text, and stop strings that span tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from outrider.cloud.family_index import target_folder, tokenizer_file
from outrider.edge.text import TextStream

TOKENIZER = Tokenizer.from_file(str(tokenizer_file(target_folder("reference"))))


def stream(tokens: list[int], stop: tuple[str, ...] = ()) -> tuple[str, TextStream]:
    text = TextStream(TOKENIZER, stop)
    out = "".join("".join(text.push((token,))) for token in tokens)
    return out + text.finish(), text


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40))
def test_pieces_joined_are_the_whole_text(written) -> None:
    tokens = TOKENIZER.encode(written, add_special_tokens=False).ids
    assert stream(tokens)[0] == TOKENIZER.decode(tokens, skip_special_tokens=True)


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="ab c", min_size=1, max_size=40), st.text(alphabet="ab c", min_size=1, max_size=5))
def test_text_ends_before_the_first_stop_string_wherever_tokens_are_cut(written, stop) -> None:
    tokens = TOKENIZER.encode(written, add_special_tokens=False).ids
    whole = TOKENIZER.decode(tokens)
    got, text = stream(tokens, (stop,))
    assert got == whole.split(stop)[0]
    assert text.stopped == (stop in whole)


def test_of_two_stop_strings_the_earlier_wins() -> None:
    tokens = TOKENIZER.encode("one two three", add_special_tokens=False).ids
    assert stream(tokens, ("three", "two"))[0] == "one "


def test_a_character_of_several_tokens_comes_whole() -> None:
    tokens = TOKENIZER.encode("a🦉b", add_special_tokens=False).ids
    assert len(tokens) > 4
    text = TextStream(TOKENIZER)
    pieces = [piece for token in tokens for piece in text.push((token,))]
    assert "".join(pieces) + text.finish() == "a🦉b"
    assert not any("\ufffd" in piece for piece in pieces)


def test_special_tokens_are_not_text() -> None:
    tokens = TOKENIZER.encode("<|user|>hi<|assistant|>").ids
    assert stream(tokens)[0] == "hi"


@pytest.mark.parametrize("stop", ["", "x"])
def test_what_is_held_back_for_a_stop_string_comes_at_the_end(stop) -> None:
    tokens = TOKENIZER.encode("ab", add_special_tokens=False).ids
    assert stream(tokens, tuple(filter(None, (stop, "abc"))))[0] == "ab"
