"""Tokens as text: as they come, up to a stop string, which only this side can see, and one by one."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class TextStream:
    """Decoder of one text, token by token; a piece that was returned never changes.

    A stop string is never emitted, also where it spans tokens: text that could be its beginning is held back until
    it turns out not to be.

    Args:
        tokenizer: the target's.
        stop: strings that end the text.
        shown: special tokens that the text has by their names, unlike all others.

    Attributes:
        stopped_by: the stop string that ended the text; None: none has.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), shown: Collection[int] = ()) -> None:
        self.stopped_by: str | None = None
        self._tokenizer = tokenizer
        self._hidden = special_tokens(tokenizer).difference(shown) if shown else frozenset()
        self._decoder = DecodeStream(skip_special_tokens=not shown)
        self._skips_special = not shown
        self._stop = stop
        self._tokens: list[int] = []
        self._decoded = ""
        self._taken = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self.stopped_by is not None

    def push(self, tokens: tuple[int, ...]) -> tuple[str, ...]:
        """Return the text that each of `tokens` adds for certain, as far as the token that completes a stop string.

        Fewer pieces than tokens mean that the rest of the tokens are not part of the text.
        """
        pieces: list[str] = []
        for token in tokens:
            if self.stopped:
                break
            pieces.append(self._push_one(token))
        return tuple(pieces)

    def _push_one(self, token: int) -> str:
        if token in self._hidden:
            return ""
        self._tokens.append(token)
        self._decoded += self._decoder.step(self._tokenizer, token) or ""
        return self._take(self._final_length())

    def finish(self) -> str:
        """Return the rest, held back as the possible beginning of a stop string or of a character."""
        if self.stopped:
            return ""
        whole = str(self._tokenizer.decode(self._tokens, skip_special_tokens=self._skips_special))
        if whole.startswith(self._decoded):
            self._decoded = whole
        self._final_length()
        return self._take(len(self._decoded))

    def _take(self, until: int) -> str:
        piece = self._decoded[self._taken : until]
        self._taken = max(self._taken, until)
        return piece

    def _final_length(self) -> int:
        """Return the length of the text that no later token can change."""
        if self.stopped or not self._stop:
            return len(self._decoded)
        found = [
            (at, stop)
            for stop in self._stop
            if (at := self._decoded.find(stop, max(0, self._taken - len(stop) + 1))) >= 0
        ]
        if found:
            at, self.stopped_by = min(found, key=lambda each: each[0])
            self._decoded = self._decoded[:at]
            return len(self._decoded)
        held = max(_overlap(self._decoded, stop) for stop in self._stop)
        return max(self._taken, len(self._decoded) - held)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


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
