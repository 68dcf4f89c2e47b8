"""A tokenizer as the bytes of its tokens, and text as tokens with the places where they end."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tokenizers import Tokenizer

from outrider.drafters.token_text import TokenText, special_tokens

SAMPLE = "The first of 1024 words, naïve or not:\n\tif x == 10:  # Größe, 你好\n\n    return 'it''s'"
_CONTINUES = 0b11000000  # bytes 10xxxxxx go on with a character


@dataclass(frozen=True, slots=True)
class Encoded:
    """A text as tokens.

    Attributes:
        ids: tokens.
        ends: bytes of the text up to the end of each; together they are the text.
        settled: number of tokens before the last word, whose own may be others when more text follows.
    """

    ids: list[int]
    ends: list[int]
    settled: int = 0


class Vocabulary:
    """One tokenizer, between bytes and tokens.

    Attributes:
        size: number of its tokens; greater ids stand for no text.
        opening: tokens that it puts before a text, such as `<s>`.
    """

    def __init__(self, tokenizer_json: str) -> None:
        """Read the text of a `tokenizer.json`."""
        self._tokenizer = Tokenizer.from_str(tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        with_special = self._tokenizer.encode("", add_special_tokens=True).ids
        self._tokenizer.encode_special_tokens = True  # in a text, their names are text
        text, hidden = TokenText(self._tokenizer), special_tokens(self._tokenizer)
        self.size = self._tokenizer.get_vocab_size()
        self._pieces = [b"" if token in hidden else text.bytes(token) for token in range(self.size)]
        self.opening = tuple(with_special[:1])

    def piece(self, token: int) -> bytes:
        """Return what a token adds to a text; empty: it has no counterpart there, as special tokens."""
        return self._pieces[token] if 0 <= token < self.size else b""

    @cached_property
    def by_piece(self) -> dict[bytes, int]:
        """The tokens by their texts, the first of equal ones."""
        found: dict[bytes, int] = {}
        for token, piece in enumerate(self._pieces):
            if piece:
                found.setdefault(piece, token)
        return found

    @cached_property
    def hindrance(self) -> str:
        """Reason why texts cannot pass through its tokens; empty: they can."""
        if self.encode(SAMPLE.encode()) is None:
            return "its tokens do not add up to the text that they are made of"
        return ""

    @cached_property
    def longest_piece(self) -> int:
        """Bytes of its longest token."""
        return max(map(len, self._pieces), default=0)

    def first_piece(self, text: bytes) -> int:
        """Return the longest token that `text` begins with; -1: there is none."""
        for length in range(min(len(text), self.longest_piece), 0, -1):
            if (token := self.by_piece.get(text[:length])) is not None:
                return token
        return -1

    def encode(self, data: bytes) -> Encoded | None:
        """Return the tokens of a text of whole characters; None: they are not the text again, or it is no text.

        A space that the tokenizer puts before every text belongs to the first token.
        """
        try:
            encoding = self._tokenizer.encode(data.decode(), add_special_tokens=False)
        except UnicodeDecodeError:
            return None
        ids, words = encoding.ids, encoding.word_ids
        pieces = [self.piece(token) for token in ids]
        joined = b"".join(pieces)
        added = len(joined) - len(data)
        if added not in (0, 1) or joined[added:] != data or joined[:added].strip():
            return None
        ends, end = [], -added
        for piece in pieces:
            end += len(piece)
            ends.append(end)
        settled = words.index(words[-1]) if words else 0
        if not settled:  # there are no words but between spaces
            settled = next((place for place in range(len(ids) - 1, 0, -1) if pieces[place][:1].isspace()), 0)
        return Encoded(ids, ends, settled)


def whole_characters(data: bytes | bytearray) -> int:
    """Return the length of `data` without the bytes of a character that is incomplete at its end."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte < 0x80:
            break
        if byte & _CONTINUES == _CONTINUES:
            needed = 2 + (byte >= 0xE0) + (byte >= 0xF0)
            return len(data) - back if back < needed else len(data)
    return len(data)


def begins_character(data: bytes | bytearray, at: int) -> bool:
    """Return whether a character begins at `at`, or the data end there."""
    return at >= len(data) or data[at] & _CONTINUES != 0x80
