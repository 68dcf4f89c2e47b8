"""Longest suffix of a text within documents, by a suffix array over their tokens read backwards.

Source: Manber and Myers 1993, "Suffix arrays", with prefix doubling in numpy, cut at `LONGEST` tokens: a longer match
says nothing more. Read backwards, the ends of a text sort next to the positions that they match, so one binary search
over bytes finds the longest match. REST (He et al. 2023) searches such an array by n-grams of falling length instead.

A million tokens take some 1.3 s to index and 12 bytes each, and a search some 50 us; a walk rarely needs one.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LONGEST = 32
POSITIONS_READ = 64  # newest positions of a match whose next tokens are counted
POSITIONS_SORTED = 1024  # positions of a match from which the newest are taken; only short matches have more
END = 0xFFFFFFFF  # after each document; no token has this number
_BIG_ENDIAN = ">u4"  # compared as bytes, so the largest digit comes first
_WIDTH = 4


@dataclass(frozen=True, slots=True)
class Match:
    """A position in a document after which the text may go on as the document does.

    Attributes:
        position: position in the index's tokens of the token that followed.
        length: tokens before it that equal the end of the text, `LONGEST` at most.
        share: share of the longest match's newest positions at which the same token followed.
    """

    position: int
    length: int
    share: float


class SuffixIndex:
    """Documents of tokens, searchable for the ends of a text; immutable, for any thread.

    Attributes:
        tokens: [n] uint32, the documents one after the other with `END` after each.
        walked: the same as Python's integers, which are faster out of a memoryview than out of an array.
    """

    def __init__(self, documents: Sequence[np.ndarray]) -> None:
        """Index documents of tokens [m] each, the oldest first."""
        end = np.array([END], dtype=np.uint32)
        parts = [part for document in documents for part in (document.astype(np.uint32), end)]
        self.tokens = np.concatenate(parts) if parts else np.empty(0, dtype=np.uint32)
        self.walked: Sequence[int] = self.tokens.data
        backwards = self.tokens[::-1]
        self._bytes = backwards.astype(_BIG_ENDIAN).tobytes()
        self._sorted = _suffix_array(backwards).data

    def __len__(self) -> int:
        return len(self.tokens)

    def longest(self, text: Sequence[int], min_length: int) -> Match | None:
        """Return the newest position at which most of the longest matches of the end of `text` go on alike.

        None: fewer than `min_length` tokens match, or no document goes on there.
        """
        wanted = np.array(text[-LONGEST:][::-1], dtype=_BIG_ENDIAN).tobytes()
        at = bisect.bisect_left(self._sorted, wanted, key=lambda position: self._suffix(position, len(wanted)))
        around = [self._sorted[i] for i in (at - 1, at) if 0 <= i < len(self._sorted)]
        length = max((_common(wanted, self._suffix(position, len(wanted))) for position in around), default=0)
        while length >= min_length:
            match = self._most_common(wanted[: length * _WIDTH], at)
            if match is not None:
                return match
            length -= 1  # the longest match ends its document
        return None

    def _suffix(self, position: int, size: int) -> bytes:
        return self._bytes[position * _WIDTH : position * _WIDTH + size]

    def _most_common(self, wanted: bytes, near: int) -> Match | None:
        """Return the newest position of the token that most often follows `wanted`; `near` indexes into its range."""
        size = len(wanted)
        low = bisect.bisect_left(self._sorted, wanted, hi=near, key=lambda position: self._suffix(position, size))
        high = bisect.bisect_right(self._sorted, wanted, lo=near, key=lambda position: self._suffix(position, size))
        backwards = sorted(self._sorted[low : min(high, low + POSITIONS_SORTED)])[:POSITIONS_READ]  # the newest first
        positions = [len(self.tokens) - position for position in backwards]
        following = [token for token in self.tokens[positions].tolist() if token != END]
        if not following:
            return None
        counts = Counter(following)  # in the order of their first, so the newest of equally common tokens is taken
        token = max(counts, key=counts.__getitem__)
        position = next(position for position in positions if self.tokens[position] == token)
        return Match(position, size // _WIDTH, counts[token] / len(following))


def _common(one: bytes, other: bytes) -> int:
    """Return how many tokens two byte strings begin with in common."""
    shared = min(len(one), len(other))
    differ = int.from_bytes(one[:shared]) ^ int.from_bytes(other[:shared])
    return (shared - (differ.bit_length() + 7) // 8) // _WIDTH


def _suffix_array(tokens: np.ndarray) -> np.ndarray:
    """Return the starts of all suffixes of `tokens` [n] in the order of their first `LONGEST` tokens, [n] int32."""
    count = len(tokens)
    if not count:
        return np.empty(0, dtype=np.int32)
    key = tokens.astype(np.int64)
    depth = 1
    while True:
        order = np.argsort(key, kind="stable")
        ordered = key[order]
        ranks = np.empty(count, dtype=np.int64)
        ranks[order] = np.concatenate(([0], np.cumsum(ordered[1:] != ordered[:-1])))
        if depth >= LONGEST or ranks[order[-1]] == count - 1:
            return order.astype(np.int32)
        later = np.zeros(count, dtype=np.int64)  # of the suffix `depth` tokens later; 0 beyond the end, which is first
        later[: max(0, count - depth)] = ranks[depth:] + 1
        key = ranks * (count + 1) + later
        depth *= 2
