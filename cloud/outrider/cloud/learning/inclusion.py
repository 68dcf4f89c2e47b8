"""Which verified rows become lessons: a bounded number a second, misses first, each with a known probability."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from enum import IntEnum

FLOOR = 0.05  # share of the rate that every kind may have, whatever comes before it
BURST_S = 2.0  # a rate's worth that can be kept at once
MEMORY_S = 10.0  # over which the kinds' rates are measured
REFRESH_S = 0.1  # for which probabilities hold, since they cost more than a draw


class LessonKind(IntEnum):
    """The verdict on the draft at a row's position."""

    ACCEPTED = 0  # the draft is the target's token
    MISSED = 1  # the draft is another, and the target's own token is committed
    OWN = 2  # there was no draft, and the target's own token is committed


PRIORITY = (LessonKind.MISSED, LessonKind.OWN, LessonKind.ACCEPTED)


class Inclusion:
    """The rule that keeps rows at a rate a second on average.

    A kind's probability rests on earlier steps alone, so 1 / probability is an exact weight of what is kept. Where more
    comes than was foreseen, all rows of a step are skipped, whatever they hold: the bucket may fall into debt once.
    """

    def __init__(self, rate: Callable[[float], float], now: float, seed: int | None = None) -> None:
        """Begin at time `now`, in seconds.

        Args:
            rate: returns the rows a second from a time on, in seconds.
            now: as above.
            seed: for tests.
        """
        self._rate_at = rate
        self._rate = rate(now)
        self._level = self._rate * BURST_S
        self._at = self._refreshed = self._began = now
        self._offered = [0.0] * len(LessonKind)  # of each kind, faded
        self._probabilities = [1.0] * len(LessonKind)
        self._random = random.Random(seed)

    def draw(self, kinds: Sequence[int], now: float, *, paid: bool = True) -> tuple[list[int], list[float]]:
        """Choose among the rows of one step.

        Args:
            kinds: [m] kind of each row.
            now: present time, in seconds.
            paid: whether any may be kept; all are counted.

        Returns:
            The places of the kept rows, [r] ascending, and their weights 1 / probability, [r].
        """
        self._refill(now)
        if now - self._refreshed >= REFRESH_S:
            self._refresh(now)
        for kind in kinds:
            self._offered[kind] += 1
        if not paid or self._level <= 0:
            return [], []
        chances, drawn = self._probabilities, self._random.random
        kept = [place for place, kind in enumerate(kinds) if drawn() < chances[kind]]
        self._level -= len(kept)
        return kept, [1 / chances[kinds[place]] for place in kept]

    def _refill(self, now: float) -> None:
        elapsed_s = max(0.0, now - self._at)
        self._at += elapsed_s
        self._level = min(self._level + elapsed_s * self._rate, self._rate * BURST_S)

    def _refresh(self, now: float) -> None:
        """Take the rate, and the kinds of the rows until now, into the probabilities of those after."""
        self._rate = positions_s = self._rate_at(now)
        elapsed_s = max(0.0, now - self._refreshed)
        self._refreshed += elapsed_s
        fade = math.exp(-elapsed_s / MEMORY_S)
        self._offered = [offered * fade for offered in self._offered]
        known_s = max(MEMORY_S * -math.expm1(-(self._refreshed - self._began) / MEMORY_S), 1e-9)
        rates = [offered / known_s for offered in self._offered]
        shares = [min(rate, FLOOR * positions_s) for rate in rates]
        left = positions_s - sum(shares)
        for kind in PRIORITY:
            more = min(max(0.0, left), rates[kind] - shares[kind])
            shares[kind] += more
            left -= more
        self._probabilities = [
            min(1.0, share / rate) if rate > 0 else 1.0 for share, rate in zip(shares, rates, strict=True)
        ]
