"""Single tokens as bytes: what they add to a text, whole characters or not."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models

from outrider.edge.daemon.answers import TokenText


def test_the_bytes_of_byte_level_tokens_make_the_text_again(tokenizer_file) -> None:
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
