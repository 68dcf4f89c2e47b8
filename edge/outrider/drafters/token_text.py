"""Single tokens as text and as bytes, whatever the tokenizer."""

from __future__ import annotations

import itertools
import json
import re

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


def special_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that texts leave out."""
    return frozenset(token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special)


class TokenText:
    """Single tokens of one tokenizer as text, and as bytes, which may be a part of a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoders = _kinds(json.loads(tokenizer.to_str()).get("decoder"))
        self._byte_level = "ByteLevel" in decoders
        self._byte_fallback = "ByteFallback" in decoders
        self._special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}

    def text(self, token: int) -> str:
        """Return a token for people; U+FFFD where it holds only a part of a character."""
        return self.bytes(token).decode(errors="replace")

    def offsets(self, tokens: tuple[int, ...]) -> list[int]:
        """Return [n] how many characters of their text come before each of `tokens`, special ones aside."""
        decoder = DecodeStream(skip_special_tokens=True)
        pieces = [decoder.step(self._tokenizer, token) or "" for token in tokens]
        return list(itertools.accumulate(map(len, pieces), initial=0))[: len(tokens)]

    def bytes(self, token: int) -> bytes:
        """Return what a token adds to a text; special tokens add their names."""
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if piece not in self._special:
            if self._byte_level and all(character in _BYTE_OF for character in piece):
                return bytes(_BYTE_OF[character] for character in piece)
            if self._byte_fallback:
                found = _BYTE.fullmatch(piece)
                return bytes([int(found[1], 16)]) if found else str(piece).replace("▁", " ").encode()
        return str(self._tokenizer.decode([token], skip_special_tokens=False)).encode()


def _kinds(decoder: object) -> set[str]:
    """Return the types of a decoder in a tokenizer.json and of those inside it."""
    if not isinstance(decoder, dict):
        return set()
    inner = [_kinds(part) for part in decoder.get("decoders", [])]
    return {str(decoder.get("type"))}.union(*inner)


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's characters for bytes: printable Latin-1 for itself, the others from U+0100 on, in order."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BYTE_OF = _byte_alphabet()
