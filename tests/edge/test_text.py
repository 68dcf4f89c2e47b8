"""Tokens to text, stop strings that span tokens, and single tokens as bytes."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models

from outrider.cloud.models.family_index import target_folder, tokenizer_file
from outrider.drafters.token_text import TokenText
from outrider.edge.text import TextStream

TOKENIZER = Tokenizer.from_file(str(tokenizer_file(target_folder("reference"))))


def stream(tokens: list[int], stop: tuple[str, ...] = (), min_tokens: int = 0) -> tuple[str, TextStream]:
    text = TextStream(TOKENIZER, stop, min_tokens=min_tokens)
    out = "".join("".join(text.push((token,))) for token in tokens)
    return out + text.finish(), text


def test_stop_strings_among_the_first_tokens_are_text_and_hidden_tokens_count() -> None:
    tokens = TOKENIZER.encode("<|user|>b b b").ids
    lengths = [TOKENIZER.decode(tokens[:n]) for n in range(len(tokens) + 1)]
    second = next(n for n, text in enumerate(lengths) if text.count("b") == 2)
    assert stream(tokens, ("b",))[0] == ""
    assert stream(tokens, ("b",), second - 1)[0] == "b "
    assert stream(tokens, ("b",), second)[0] == "b b "
    assert stream(tokens, ("b",), len(tokens))[0] == "b b b"


def test_the_stop_string_that_comes_first_is_named() -> None:
    tokens = TOKENIZER.encode("ab c b", add_special_tokens=False).ids
    for stops, first in ((("c", "b"), "b"), (("b", "ab"), "ab"), (("x", " b"), " b"), (("x",), None)):
        assert stream(tokens, stops)[1].stopped_by == first


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
