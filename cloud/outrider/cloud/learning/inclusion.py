"""Which verified rows become lessons: a bounded number a second, misses first, each with a known probability."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from enum import IntEnum

MAX_SHARE = 0.015  # of the steps' time, below the 2 % that are promised
FLOOR = 0.05  # share of the rate that every kind may have, whatever comes before it
BURST_S = 2.0  # a rate's worth of rows, and of steps the share, that can be saved up
MEMORY_S = 10.0  # over which costs and the kinds' rates are measured
REFRESH_S = 0.1  # for which probabilities hold, since they cost more than a draw
BUSY_S = 1.0  # that steps are taken to have filled before the first
ROW_S, ROWS = 1e-4, 10.0  # cost of a row before it is known, and the rows by which that counts


class LessonKind(IntEnum):
    """The verdict on the draft at a row's position."""

    ACCEPTED = 0  # the draft is the target's token
    MISSED = 1  # the draft is another, and the target's own token is committed
    OWN = 2  # there was no draft, and the target's own token is committed


PRIORITY = (LessonKind.MISSED, LessonKind.OWN, LessonKind.ACCEPTED)


class Inclusion:
    """The rule that keeps rows at the rate asked for, or at that which a share of the steps' time pays for.

    A kind's probability rests on earlier steps alone, so 1 / probability is an exact weight of what is kept. Where more
    comes than was foreseen, or a row costs more, all rows of a step are skipped, whatever they hold: neither the rows
    nor the CPU time that have been saved up are spent twice.

    Args:
        positions_s: rows a second that are kept, on average, at most.
        max_share: limit of the CPU time that lessons cost, as a share of the steps' time.
        now: present time, in seconds.
        seed: for tests.
    """

    def __init__(self, positions_s: float, max_share: float, now: float, seed: int | None = None) -> None:
        self._max_rate, self._share = positions_s, max_share
        self._at = self._refreshed = self._began = now
        # All of these fade, so that they are of the last `MEMORY_S` or so.
        self._offered = [0.0] * len(LessonKind)  # rows of each kind
        self._rows, self._spent_s, self._steps_s = 0.0, 0.0, BUSY_S
        self._probabilities = [1.0] * len(LessonKind)
        self._rate = self._paid_rate()
        self._saved_rows, self._saved_s = self._rate * BURST_S, 0.0
        self._random = random.Random(seed)

    def draw(self, kinds: Sequence[int], now: float, step_s: float) -> tuple[list[int], list[float]]:
        """Choose among the rows of one step.

        Args:
            kinds: [m] kind of each row.
            now: present time, in seconds.
            step_s: time of the step in seconds, with the wait for an accelerator.

        Returns:
            The indices of the kept rows, [r] ascending, and their weights 1 / probability, [r].
        """
        elapsed_s = max(0.0, now - self._at)
        self._at += elapsed_s
        self._saved_rows = min(self._saved_rows + elapsed_s * self._rate, self._rate * BURST_S)
        self._saved_s = min(self._saved_s + self._share * step_s, self._share * BURST_S)
        self._steps_s += step_s
        if now - self._refreshed >= REFRESH_S:
            self._refresh(now)
        for kind in kinds:
            self._offered[kind] += 1
        if self._saved_s < 0 or self._saved_rows <= 0:
            return [], []
        chances, drawn = self._probabilities, self._random.random
        kept = [index for index, kind in enumerate(kinds) if drawn() < chances[kind]]
        self._saved_rows -= len(kept)
        return kept, [1 / chances[kinds[index]] for index in kept]

    def spend(self, cpu_s: float, rows: int = 0) -> None:
        """Take off what lessons have cost, `cpu_s` seconds of CPU time, and what for: `rows` that were kept."""
        self._saved_s -= cpu_s
        self._spent_s += cpu_s
        self._rows += rows

    def _refresh(self, now: float) -> None:
        """Take the costs, and the kinds of the rows until now, into the probabilities of those after."""
        elapsed_s = max(0.0, now - self._refreshed)
        self._refreshed += elapsed_s
        fade = math.exp(-elapsed_s / MEMORY_S)
        self._offered = [offered * fade for offered in self._offered]
        self._rows, self._spent_s, self._steps_s = self._rows * fade, self._spent_s * fade, self._steps_s * fade
        self._rate = self._paid_rate()
        known_s = max(self._known_s(self._began), 1e-9)
        rates = [offered / known_s for offered in self._offered]
        shares = [min(rate, FLOOR * self._rate) for rate in rates]
        left = self._rate - sum(shares)
        for kind in PRIORITY:
            more = min(max(0.0, left), rates[kind] - shares[kind])
            shares[kind] += more
            left -= more
        self._probabilities = [
            min(1.0, share / rate) if rate > 0 else 1.0 for share, rate in zip(shares, rates, strict=True)
        ]

    def _paid_rate(self) -> float:
        """Return the rows a second that are asked for, or fewer if the steps of late pay for fewer."""
        rows_for_a_second = (self._rows + ROWS) / (self._spent_s + ROWS * ROW_S)
        busy = self._steps_s / self._known_s(self._began - BUSY_S)
        return min(self._max_rate, self._share * busy * rows_for_a_second)

    def _known_s(self, began: float) -> float:
        """Return the seconds that what fades stands for, if it began at time `began`."""
        return MEMORY_S * -math.expm1(-(self._refreshed - began) / MEMORY_S)
