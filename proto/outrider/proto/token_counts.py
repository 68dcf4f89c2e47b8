"""Occurrences of tokens in a prefix, which penalties depend on, kept as the prefix grows and shrinks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_FIRST_SIZE = 1024
_FEW = 32  # up to here single additions are faster than numpy's


class TokenCounts:
    """Occurrences of each token in a prefix: a prompt, then text.

    Extending and truncating by m tokens takes O(m), whatever the length of the prefix. Memory: 8 bytes for each id up
    to the largest that came, and a list of the tokens.
    """

    def __init__(self, prompt_length: int, tokens: Sequence[int] = ()) -> None:
        """Count `tokens`, of which the first `prompt_length` and no others are prompt."""
        self._prompt_length = prompt_length
        self._tokens: list[int] = []
        self._counts = np.zeros((2, _FIRST_SIZE), dtype=np.int32)  # in the prompt, in the text
        self.extend(tokens)

    @property
    def length(self) -> int:
        return len(self._tokens)

    @property
    def used(self) -> np.ndarray:
        """[n] int64, the distinct tokens of the prefix, ascending."""
        return np.flatnonzero(self._counts[0] | self._counts[1])

    def extend(self, tokens: Sequence[int]) -> None:
        if not len(tokens):
            return
        largest = max(tokens)
        if largest >= (size := self._counts.shape[1]):
            self._counts = np.pad(self._counts, ((0, 0), (0, max(size, largest + 1 - size))))
        left = max(0, self._prompt_length - len(self._tokens))
        self._add(0, tokens[:left], 1)
        self._add(1, tokens[left:], 1)
        self._tokens.extend(tokens)

    def followed_by(self, tokens: Sequence[int]) -> TokenCounts:
        """Return other counts, of the same prefix with `tokens` after it."""
        longer = TokenCounts(self._prompt_length)
        longer._tokens, longer._counts = list(self._tokens), self._counts.copy()
        longer.extend(tokens)
        return longer

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, which are at most all."""
        removed = self._tokens[length:]
        left = max(0, self._prompt_length - length)
        self._add(0, removed[:left], -1)
        self._add(1, removed[left:], -1)
        del self._tokens[length:]

    def in_prompt(self, tokens: np.ndarray) -> np.ndarray:
        return self._of(0, tokens)

    def in_text(self, tokens: np.ndarray) -> np.ndarray:
        return self._of(1, tokens)

    def _of(self, part: int, tokens: np.ndarray) -> np.ndarray:
        found: np.ndarray = self._counts[part].take(tokens, mode="clip")
        return np.where(tokens < self._counts.shape[1], found, 0)

    def _add(self, part: int, tokens: Sequence[int], by: int) -> None:
        counts = self._counts[part]
        if len(tokens) > _FEW:
            counts += by * np.bincount(tokens, minlength=len(counts)).astype(np.int32)
            return
        for token in tokens:
            counts[token] += by
