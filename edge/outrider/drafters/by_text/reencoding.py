"""Tokens of a growing text: what is appended, or cut and written otherwise, is encoded with some tokens before it."""

from __future__ import annotations

from outrider.drafters.by_text.vocabulary import Encoded, Vocabulary, begins_character
from outrider.proto.types import common_length

LOOK_BACK = 8  # tokens before the first changed byte that are encoded again
OVERLAP = 2  # tokens of both encodings that must agree before the new one is believed; its first lack their left side
FRESH_STARTS = (256, 64, 16)  # bytes before the end from which to begin where no encoding gives the text


class Reencoding:
    """Tokens of one text, kept up to date.

    The tokens of the first `agreed` bytes may end differently once more text follows, so the last `look_back` of them
    are encoded again with what is new, from further back where the encodings do not meet. The result is what encoding
    the whole text gives (for tokenizers whose choice at one place depends on a few words around it).

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
        places = {end: place for place, end in enumerate(ends)}
        run = 0
        for token in range(first, known):
            place = places.get(self.ends[token])
            if place is None or window.ids[place] != self.ids[token]:
                run = 0
                continue
            run = run + 1 if run and window.ids[place - 1] == self.ids[token - 1] else 1
            if run == OVERLAP:
                return self._take(token + 1, Encoded(window.ids[place + 1 :], ends[place + 1 :]))
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
