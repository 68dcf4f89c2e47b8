"""Counting values into buckets, cheaply enough for every commit: a list of integers and a sum."""

from __future__ import annotations

import itertools
from bisect import bisect_left

SECONDS = (
    *(0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0),
)
TOKENS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 128.0, 256.0, 512.0)


class Tally:
    """How many values fell into each bucket, and their sum. One thread adds; any may read.

    Args:
        bounds: [b] upper bounds of the buckets, inclusive and rising; one more bucket takes what is above the last.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """One more value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """Values so far."""
        return sum(self.counts)

    def cumulative(self) -> tuple[int, ...]:
        """[b + 1] how many values are at or below each bound; the last: all."""
        return tuple(itertools.accumulate(self.counts))
