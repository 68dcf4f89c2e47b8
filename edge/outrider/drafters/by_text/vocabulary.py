"""A tokenizer as the bytes of its tokens, and text as tokens with the positions where they end, also as it grows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tokenizers import Tokenizer

from outrider.drafters.token_text import TokenText, special_tokens
from outrider.proto.types import common_length

SAMPLE = "The first of 1024 words, naïve or not:\n\tif x == 10:  # Größe, 你好\n\n    return 'it''s'"
LOOK_BACK = 8  # tokens before the first changed byte that are encoded again
OVERLAP = 2  # tokens of both encodings that must agree before the new one is believed; its first lack their left side
FRESH_STARTS = (256, 64, 16)  # bytes before the end from which to begin where no encoding gives the text
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
            settled = next((index for index in range(len(ids) - 1, 0, -1) if pieces[index][:1].isspace()), 0)
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


class Reencoding:
    """Tokens of one text, kept up to date.

    The tokens of the first `agreed` bytes may end differently once more text follows, so the last `look_back` of them
    are encoded again with what is new, from further back where the encodings do not meet. The result is what encoding
    the whole text gives (for tokenizers whose choice at one position depends on a few words around it).

    Args:
        vocabulary: tokenizer of the tokens.
        look_back: tokens to encode again; 0: none, and the seam may differ from the whole.

    Attributes:
        ids: tokens of the text from `base` on.
        ends: bytes of the text up to the end of each.
        base: bytes that no token stands for, since no encoding gave them.
    """

    def __init__(self, vocabulary: Vocabulary, look_back: int = LOOK_BACK) -> None:
        self.ids: list[int] = []
        self.ends: list[int] = []
        self.base = 0
        self._vocabulary = vocabulary
        self._look_back = look_back

    def renew(self, text: bytes | bytearray, agreed: int) -> int | None:
        """Make the tokens those of `text`, whose first `agreed` bytes the present tokens stand for.

        Returns:
            Number of first tokens that stay as they are; None: no tokens give this text.
        """
        known = self._known(agreed)
        back = self._look_back
        while known and back:
            first = self._character_before(text, max(0, known - back))
            found = self._spliced(text, first, known)
            if found is not None:
                return found
            if first == 0:
                break
            back *= 4
        if known and not self._look_back:
            found = self._appended(text, known)
            if found is not None:
                return found
        return self._afresh(text)

    def _known(self, agreed: int) -> int:
        """Return how many of the tokens end within the first `agreed` bytes."""
        known = len(self.ends)
        while known and self.ends[known - 1] > agreed:
            known -= 1
        return known

    def _character_before(self, text: bytes | bytearray, first: int) -> int:
        while first and not begins_character(text, self.ends[first - 1]):
            first -= 1
        return first

    def _start(self, first: int) -> int:
        return self.ends[first - 1] if first else self.base

    def _spliced(self, text: bytes | bytearray, first: int, known: int) -> int | None:
        """Encode from token `first` on, and take that from where it met the `known` tokens."""
        start = self._start(first)
        window = self._vocabulary.encode(bytes(text[start:]))
        if window is None:
            return None
        ends = [start + end for end in window.ends]
        if first == 0:
            return self._take(0, Encoded(window.ids, ends))
        by_end = {end: index for index, end in enumerate(ends)}
        run = 0
        for token in range(first, known):
            index = by_end.get(self.ends[token])
            if index is None or window.ids[index] != self.ids[token]:
                run = 0
                continue
            run = run + 1 if run and window.ids[index - 1] == self.ids[token - 1] else 1
            if run == OVERLAP:
                return self._take(token + 1, Encoded(window.ids[index + 1 :], ends[index + 1 :]))
        return None

    def _appended(self, text: bytes | bytearray, known: int) -> int | None:
        start = self._start(known)
        rest = self._vocabulary.encode(bytes(text[start:]))
        return None if rest is None else self._take(known, Encoded(rest.ids, [start + end for end in rest.ends]))

    def _afresh(self, text: bytes | bytearray) -> int | None:
        """Encode from as early as can be."""
        for start in (0, *(len(text) - back for back in FRESH_STARTS if back < len(text))):
            while not begins_character(text, start):
                start += 1
            window = self._vocabulary.encode(bytes(text[start:]))
            if window is not None:
                self.base = start
                self.ids, self.ends, had = [], [], self.ids
                self._take(0, Encoded(window.ids, [start + end for end in window.ends]))
                return common_length(had, self.ids) if start == 0 else 0
        return None

    def _take(self, kept: int, rest: Encoded) -> int:
        """Put `rest` after the first `kept` tokens, and return how many at the beginning stay the same."""
        same = kept + common_length(self.ids[kept:], rest.ids)
        self.ids[kept:], self.ends[kept:] = rest.ids, rest.ends
        return same
