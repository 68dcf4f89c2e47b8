"""Places of n-grams in a prefix that grows and is truncated."""

from __future__ import annotations

from collections.abc import Iterator

PLACES_READ = 16  # newest places of an n-gram; a common word has thousands, and a bound keeps a token's price constant


class NgramPlaces:
    """Places where the n-grams of one length ended: the last ones in a dict, earlier ones by links between places."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._last: dict[tuple[int, ...], int] = {}
        self._earlier: list[int] = []  # [length]; for each end, the end of the same n-gram before it; -1: none

    def append(self, tokens: list[int]) -> None:
        """Add the n-gram that ends with the newest of `tokens`."""
        gram = tuple(tokens[-self._n :])
        self._earlier.append(self._last.get(gram, -1))
        self._last[gram] = len(tokens) - 1

    def pop(self, tokens: list[int]) -> None:
        """Forget the n-gram that ends with the newest of `tokens`."""
        gram = tuple(tokens[-self._n :])
        earlier = self._earlier.pop()
        if earlier < 0:
            del self._last[gram]
        else:
            self._last[gram] = earlier

    def before(self, length: int) -> Iterator[int]:
        """Yield up to `PLACES_READ` earlier ends, newest first, of the n-gram that ends the first `length` tokens."""
        place = self._earlier[length - 1] if length >= self._n else -1
        for _ in range(PLACES_READ):
            if place < 0:
                return
            yield place
            place = self._earlier[place]
