"""Which verified rows become lessons: a bounded number a second, misses first, each with a known probability."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from outrider.cloud.learning.record import LessonKind

PRIORITY = (LessonKind.MISSED, LessonKind.SUFFIX, LessonKind.OWN, LessonKind.ACCEPTED)
FLOOR = 0.05  # share of the rate that every kind may have, whatever comes before it
BURST_S = 2.0  # a rate's worth that can be kept at once
MEMORY_S = 10.0  # over which the kinds' rates are measured


class Inclusion:
    """The rule that keeps rows at `positions_s` a second on average.

    A kind's probability rests on earlier steps alone, so 1 / probability is an exact weight of what is kept. Where more
    comes than was foreseen, all rows of a step are skipped, whatever they hold: the bucket may fall into debt once.
    """

    def __init__(self, positions_s: float, now: float, seed: int | None = None) -> None:
        """Begin at time `now`, in seconds; `seed` is for tests."""
        self._rate = positions_s
        self._level = positions_s * BURST_S
        self._at = self._began = now
        self._offered = np.zeros(len(LessonKind))  # of each kind, faded
        self._random = np.random.default_rng(seed)

    @property
    def probabilities(self) -> np.ndarray:
        """Chance that a row is kept, by kind, [4]."""
        known_s = MEMORY_S * -math.expm1(-(self._at - self._began) / MEMORY_S)
        rates = self._offered / max(known_s, 1e-9)
        shares = np.minimum(rates, FLOOR * self._rate)
        left = self._rate - float(shares.sum())
        for kind in PRIORITY:
            more = min(max(0.0, left), float(rates[kind] - shares[kind]))
            shares[kind] += more
            left -= more
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(rates > 0, np.minimum(1.0, shares / rates), 1.0)

    def draw(self, kinds: Sequence[int], now: float) -> tuple[np.ndarray, np.ndarray]:
        """Choose among the rows of one step.

        Args:
            kinds: [m] kind of each row.
            now: present time, in seconds.

        Returns:
            The places of the kept rows, [r] int64 ascending, and their weights 1 / probability, [r] float64.
        """
        elapsed_s = max(0.0, now - self._at)
        self._at += elapsed_s
        self._level = min(self._level + elapsed_s * self._rate, self._rate * BURST_S)
        self._offered *= math.exp(-elapsed_s / MEMORY_S)
        chances = self.probabilities
        of_kinds = np.asarray(kinds, np.int64)
        self._offered += np.bincount(of_kinds, minlength=len(LessonKind))
        if self._level <= 0:
            return np.empty(0, np.int64), np.empty(0)
        of_rows = chances[of_kinds]
        kept = np.flatnonzero(self._random.random(len(of_rows)) < of_rows)
        self._level -= len(kept)
        return kept, 1 / of_rows[kept]
