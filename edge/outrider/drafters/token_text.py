"""Tokens as text, one after the other and all at once, and single ones as bytes, whatever the tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from itertools import accumulate

from tokenizers import Tokenizer

from outrider.proto.types import common_length


def special_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that texts leave out."""
    return frozenset(token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special)


class TokenDecoder:
    """Decoder of one text, token by token, whose pieces make up what the tokenizer decodes from all tokens at once.

    A piece that was returned never changes. So what a later token may change is held back: a character that is not
    complete, and a run of byte tokens such as `<0x0A>`, all of which become U+FFFD where one is wrong.

    Args:
        tokenizer: any.
        hidden: tokens that the text leaves out.
        before: tokens that come before the text. Where they end inside a character, the text begins with it.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: Collection[int], before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._window: list[int] = []  # the last tokens, from which the text's end is decoded
        self._text: str | None = ""  # the window's; None: not decoded yet
        self._done = 0  # characters of it that have been returned
        self._before = ""  # text of the window's tokens that came before the text, until a piece has been returned
        context = self._end_of(before)
        if (text := self._decode(context)).endswith(_REPLACEMENT):
            self._window, self._before, self._text = context, text, text

    def push(self, token: int) -> str:
        """Return the text that is certain now that `token` has come."""
        piece = self._tokenizer.id_to_token(token)
        if piece is None or token in self._hidden:
            return ""
        self._window.append(token)
        if _BYTE.fullmatch(piece):
            self._text = None
            return ""
        text = self._text = self._decode(self._window)
        start, end = self._start(text), len(text) - text.endswith(_REPLACEMENT)
        if end > start:
            self._done, self._before = end, ""
        if len(self._window) > _MAX_WINDOW:
            self._forget(text)
        return text[start:end]

    def rest(self) -> str:
        """Return what is held back, as it decodes so far."""
        if self._text is None:
            self._text = self._decode(self._window)
        return self._text[self._start(self._text) :]

    def _start(self, text: str) -> int:
        """Return where in the window's text the next piece begins: at the first character that tokens have changed."""
        return common_length(self._before, text) if self._before else self._done

    def _forget(self, text: str) -> None:
        """Shorten the window to its last tokens, if their text ends as the window's does and has a character more."""
        rest, window = text[self._done :], self._window[-_CONTEXT:]
        shorter = self._decode(window)
        if not self._before and len(shorter) > len(rest) and shorter.endswith(rest):
            self._window, self._done, self._text = window, len(shorter) - len(rest), shorter

    def _end_of(self, tokens: Sequence[int]) -> list[int]:
        """Return the last tokens that are not hidden, and all of a run of byte tokens."""
        found: list[int] = []
        for token in reversed(tokens):
            piece = self._tokenizer.id_to_token(token)
            if piece is None or token in self._hidden:
                continue
            if len(found) >= _CONTEXT and not _BYTE.fullmatch(piece):
                break
            found.append(token)
        return found[::-1]

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))


class TokenText:
    """Single tokens of one tokenizer as text, and as bytes, which may be a part of a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoders = _kinds(json.loads(tokenizer.to_str()).get("decoder"))
        self._byte_level = "ByteLevel" in decoders
        self._byte_fallback = "ByteFallback" in decoders
        self._hidden = special_tokens(tokenizer)
        self._special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}

    def text(self, token: int) -> str:
        """Return a token for people; U+FFFD where it holds only a part of a character."""
        return self.bytes(token).decode(errors="replace")

    def offsets(self, tokens: tuple[int, ...]) -> list[int]:
        """Return [n] how many characters of their text come before each of `tokens`, special ones aside."""
        decoder, found, start = TokenDecoder(self._tokenizer, self._hidden), list[int](), 0
        for end, token in enumerate(tokens, 1):
            piece = decoder.push(token) if end < len(tokens) else decoder.push(token) + decoder.rest()
            if piece or end == len(tokens):
                found += (start + at for at in self._starts(tokens[len(found) : end], piece))
                start += len(piece)
        return found

    def _starts(self, tokens: tuple[int, ...], text: str) -> list[int]:
        """Return [n] how many characters of their joint `text` end before each of `tokens`."""
        encoded = text.encode()
        sizes = [0 if token in self._hidden else len(self.bytes(token)) for token in tokens]
        left = accumulate(reversed(sizes))  # counted from the end, since some decoders strip the beginning
        starts = [len(encoded[: max(0, len(encoded) - size)].decode(errors="ignore")) for size in left]
        return starts[::-1]

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


_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 4  # tokens, which hold a whole character
_MAX_WINDOW = 12  # tokens
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BYTE_OF = _byte_alphabet()
