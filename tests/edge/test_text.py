"""Tokens to text, of vocabularies of every kind: what streams is what the tokenizer decodes from all at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from outrider.cloud.models.family_index import target_folder, tokenizer_file
from outrider.drafters.token_text import TokenText
from outrider.edge.event_stream import TextStream

TOKENIZER = Tokenizer.from_file(str(tokenizer_file(target_folder("reference"))))
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
SPECIAL = ["<unk>", "<s>", "</s>"]
WORDS = ["▁", "▁a", "a", "▁the", "é", "日", "▁▁", ".", "ab"]
BYTES = [0x0A, 0x20, 0x61, 0xC3, 0xA9, 0xE6, 0x97, 0xA5, 0xF0, 0x9F, 0xA6, 0x8A, 0xFF]


def made_of(pieces: list[str], decoder: decoders.Decoder | None) -> Tokenizer:
    vocabulary = {piece: token for token, piece in enumerate(dict.fromkeys([*SPECIAL, *pieces]))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def byte_fallback(words: list[str], *, strip: bool) -> Tokenizer:
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    stripped = [decoders.Strip(content=" ", left=1, right=0)] if strip else []
    return made_of([*(f"<0x{byte:02X}>" for byte in BYTES), *words], decoders.Sequence(parts + stripped))


def byte_level(pieces: list[bytes]) -> Tokenizer:
    return made_of(["".join(SPELLED[byte] for byte in piece) for piece in pieces], decoders.ByteLevel())


def spelled_bytes() -> dict[int, str]:
    """Return the character by which a byte-level vocabulary spells each of `BYTES`, the last of which no text has."""
    written = "\n abé日🦊"
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(written)
    return dict(zip(written.encode(), "".join(piece for piece, _ in split), strict=True)) | {0xFF: "\xff"}


SPELLED = spelled_bytes()
EVERY_KIND = [
    byte_fallback(WORDS, strip=False),
    byte_fallback(WORDS, strip=True),
    byte_level([bytes([byte]) for byte in BYTES] + ["日".encode(), b" \xf0\x9f", b"\xa6\x8aa", b"ab"]),
    made_of(["▁a", "a", "▁", "b"], decoders.Metaspace()),
    made_of(["a", "##b", "b", "."], decoders.WordPiece()),
    made_of(["a", "b</w>", "a</w>", "b"], decoders.BPEDecoder()),
    made_of(["a", "b", "日"], None),
]


def streamed(tokenizer: Tokenizer, tokens: Sequence[int], stop=(), early=0, before=()) -> tuple[str, TextStream]:
    text = TextStream(tokenizer, stop, min_tokens=early, before=before)
    return "".join("".join(text.push((token,))) for token in tokens) + text.finish(), text


def whole(tokenizer: Tokenizer, tokens: tuple[int, ...]) -> str:
    return str(tokenizer.decode(list(tokens)))


def common(one: str, other: str) -> int:
    """Return with how many characters both texts begin alike."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def first_stop(tokenizer: Tokenizer, tokens: tuple[int, ...], stops: tuple[str, ...], early: int) -> str | None:
    """Return the text before the stop string that some token after the first `early` completes; None: none does."""
    length = len(whole(tokenizer, tokens[:early]).rstrip(REPLACEMENT))
    for n in range(early + 1, len(tokens) + 1):
        text = whole(tokenizer, tokens[:n])
        ends = [
            at for stop in stops for at in range(len(text)) if text.startswith(stop, at) and at + len(stop) > length
        ]
        if ends:
            return text[: min(ends)]
    return None


@pytest.mark.parametrize("strip", [False, True])
def test_all_short_texts_of_a_byte_fallback_vocabulary_stream_as_they_decode(strip) -> None:
    tokenizer = byte_fallback(WORDS, strip=strip)
    names = ("▁", "a", "日", "</s>", "<0x0A>", "<0xC3>", "<0xA9>", "<0xF0>", "<0x9F>", "<0xA6>", "<0x8A>")
    tokens = [tokenizer.token_to_id(name) for name in names]
    every = [text for n in range(5) for text in itertools.product(tokens, repeat=n)]
    assert [text for text in every if streamed(tokenizer, text)[0] != whole(tokenizer, text)] == []


def test_all_short_texts_of_a_byte_level_vocabulary_stream_as_they_decode() -> None:
    tokenizer = byte_level([bytes([byte]) for byte in (0x0A, 0x61, 0xC3, 0xA9, 0xF0, 0x9F, 0xA6, 0x8A, 0xFF)])
    every = [text for n in range(5) for text in itertools.product(range(2, tokenizer.get_vocab_size()), repeat=n)]
    assert [text for text in every if streamed(tokenizer, text)[0] != whole(tokenizer, text)] == []


@st.composite
def texts(draw) -> tuple[Tokenizer, tuple[int, ...]]:
    """Return a tokenizer of some kind, perhaps of a random vocabulary, and a text of its tokens."""
    if draw(st.booleans()):
        tokenizer = draw(st.sampled_from(EVERY_KIND))
    elif draw(st.booleans()):
        words = st.lists(st.text("▁aé日\n<>x0A", min_size=1, max_size=6), max_size=12, unique=True)
        tokenizer = byte_fallback(draw(words), strip=draw(st.booleans()))
    else:
        pieces = st.lists(st.sampled_from(BYTES), min_size=1, max_size=5).map(bytes)
        tokenizer = byte_level(draw(st.lists(pieces, min_size=1, max_size=16)))
    return tokenizer, tuple(draw(st.lists(st.integers(0, tokenizer.get_vocab_size()), max_size=40)))


@settings(max_examples=200, deadline=None)
@given(texts())
def test_what_streams_is_what_the_tokenizer_decodes_from_all_at_once(text) -> None:
    assert streamed(*text)[0] == whole(*text)


@settings(max_examples=200, deadline=None)
@given(texts(), st.lists(st.text("ab \né日.", min_size=1, max_size=3), min_size=1, max_size=2), st.integers(0, 8))
def test_the_first_token_that_completes_a_stop_string_ends_the_text(text, stops, early) -> None:
    tokenizer, tokens = text
    expected = first_stop(tokenizer, tokens, tuple(stops), early)
    got, stream = streamed(tokenizer, tokens, tuple(stops), early)
    assert got == (whole(tokenizer, tokens) if expected is None else expected)
    assert stream.stopped == (expected is not None)


@settings(max_examples=200, deadline=None)
@given(texts(), st.integers(0, 40))
def test_a_text_that_begins_inside_a_character_begins_with_the_whole_character(text, split) -> None:
    tokenizer, tokens = text
    before, after = tokens[:split], tokens[split:]
    shown, both = whole(tokenizer, before), whole(tokenizer, tokens)
    cut = shown.endswith(REPLACEMENT)
    expected = both[common(shown, both) :] if cut else whole(tokenizer, after)
    assert streamed(tokenizer, after, before=before)[0] == expected


@settings(max_examples=200, deadline=None)
@given(texts())
def test_a_token_begins_where_the_text_before_it_ends(text) -> None:
    tokenizer, tokens = text
    offsets, full = TokenText(tokenizer).offsets(tokens), whole(tokenizer, tokens)
    assert offsets == sorted(offsets)
    assert len(offsets) == len(tokens)
    assert all(0 <= offset <= len(full) for offset in offsets)
    if REPLACEMENT not in full and tokenizer.get_vocab_size() > 12:  # of bytes; other decoders join by their own rules
        befores = [whole(tokenizer, tokens[:n]) for n in range(len(tokens))]
        assert offsets == [common(before.rstrip(REPLACEMENT), full) for before in befores]


def test_the_work_for_a_text_without_end_of_broken_characters_is_linear(monkeypatch) -> None:
    tokenizer = byte_level([b"\xff", b"\x9f", b"a"])
    decoded = []

    class Counting:
        """Tokenizer that counts the tokens it is given to decode."""

        def __getattr__(self, name: str):
            return getattr(tokenizer, name)

        def decode(self, tokens, **options):
            decoded.append(len(tokens))
            return tokenizer.decode(tokens, **options)

    for token in (3, 4):
        decoded.clear()
        streamed(Counting(), (token,) * 2000)  # type: ignore[arg-type]
        assert sum(decoded) < 20 * 2000


def test_the_stop_string_that_comes_first_is_named() -> None:
    tokens = TOKENIZER.encode("ab c b", add_special_tokens=False).ids
    for stops, first in ((("c", "b"), "b"), (("b", "ab"), "ab"), (("x", " b"), " b"), (("x",), None)):
        assert streamed(TOKENIZER, tokens, stops)[1].stopped_by == first


def test_special_tokens_that_are_to_be_shown_are_text_and_no_others() -> None:
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    tokenizer.add_special_tokens(["[CALLS]", "[END]"])
    tokens = tokenizer.encode("ok é[CALLS][END] é b[END]", add_special_tokens=False).ids
    text = TextStream(tokenizer, ("b",), shown={tokenizer.token_to_id("[CALLS]")})
    pieces = "".join(piece for token in tokens for piece in text.push((token,)))
    assert pieces + text.finish() == "ok é[CALLS] é "
    assert text.stopped_by == "b"
    hidden = TextStream(tokenizer)
    assert "".join("".join(hidden.push((token,))) for token in tokens) + hidden.finish() == "ok é é b"


def test_the_bytes_of_byte_level_tokens_make_up_the_text(tokenizer_file) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokens = TokenText(tokenizer)
    for text in ("def main():\n\treturn 'é'\n", "Grüße 🎉 漢字  \x00", " a  b"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert b"".join(map(tokens.bytes, ids)).decode() == text
    part = tokenizer.encode("🎉", add_special_tokens=False).ids[0]
    assert tokens.text(part) == "\N{REPLACEMENT CHARACTER}"
    end = tokenizer.token_to_id("<|end|>")
    assert tokens.text(end) == "<|end|>"
    assert tokens.bytes(10**6) == b""


def test_byte_fallback_tokens_are_their_byte_and_their_spaces_are_spaces() -> None:
    vocabulary = [("<unk>", 0.0), ("<0xC3>", -1.0), ("<0xA9>", -1.0), ("▁hello", -1.0)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, 0, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokens = TokenText(tokenizer)
    assert [tokens.bytes(i) for i in (1, 2, 3)] == [b"\xc3", b"\xa9", b" hello"]
