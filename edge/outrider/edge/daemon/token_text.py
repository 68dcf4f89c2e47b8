"""Single tokens as text and as the bytes that they stand for, which need not be whole characters."""

from __future__ import annotations

import json
import re

from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenText:
    """Of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoders = _kinds(json.loads(tokenizer.to_str()).get("decoder"))
        self._byte_level = "ByteLevel" in decoders
        self._byte_fallback = "ByteFallback" in decoders
        self._special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}

    def text(self, token: int) -> str:
        """For people; U+FFFD where it holds a part of a character only."""
        return self.bytes(token).decode(errors="replace")

    def bytes(self, token: int) -> bytes:
        """That it adds to a text, special tokens by their names."""
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if piece not in self._special:
            if self._byte_level and all(character in _BYTE_OF for character in piece):
                return bytes(_BYTE_OF[character] for character in piece)
            found = _BYTE.fullmatch(piece) if self._byte_fallback else None
            if found:
                return bytes([int(found[1], 16)])
            if self._byte_fallback:
                return str(piece).replace("▁", " ").encode()
        return str(self._tokenizer.decode([token], skip_special_tokens=False)).encode()


def _kinds(decoder: object) -> set[str]:
    """Types of a decoder in a tokenizer.json and of those inside it."""
    if not isinstance(decoder, dict):
        return set()
    inner = [_kinds(part) for part in decoder.get("decoders", [])]
    return {str(decoder.get("type"))}.union(*inner)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable Latin-1 for itself, the others from U+0100 on, in order."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
