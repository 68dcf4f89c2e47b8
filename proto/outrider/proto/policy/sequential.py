"""Tests of a drafter's version against the one before it that may be looked at after every text.

Both versions are scored on the same texts, so a text gives one number: the difference of their hit rates. A test bets
on its sign. With differences d_1, d_2, ... in [-1, 1] and stakes s_i in [0, .75] that depend on earlier texts alone,

    K_n = (1 + s_1 d_1) ... (1 + s_n d_n)

is a non-negative supermartingale if no text is expected to have d > 0, given those before it. So the chance that K ever
reaches 1 / alpha is alpha at most (Ville 1939), whenever one looks and whatever makes one stop. The stakes are those
that let K grow fastest if the texts to come are like those so far: mean over mean square (Waudby-Smith and Ramdas,
"Estimating means of bounded random variables by betting", 2024, section B.3).

A drafter gets version after version, each with its own chance of an error. The j-th of them is tested with
alpha_j = alpha 6 / (pi^2 j^2), which add up to alpha: the chance that any of them ever meets with one.

A version is retired if it loses over all texts, or its margin in one kind of text. That is `MARGIN` of the kind's own
hits or `MAX_COST` of all hits, whichever is more: to rule out a loss of .01 in a tenth of the texts would take hundreds
of these, and it costs .001. As shares settle margins change, each before its text is bet on, so K bounds the chance of
a kind that loses the largest of them. Any of these tests may say so, so their errors add up, and alpha_j is divided:
half for all texts together, and of the rest a share 6 / (pi^2 k^2) for the k-th kind that came, fixed before its first
bet. That a version gains is for its trainer to show (`outrider.cloud.learning.judge`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from outrider.proto.errors import InvalidArgument

ERROR = 0.01  # chance that any version which is no worse anywhere is ever retired, or any that is no better passes
MARGIN = 0.01  # limit of the loss of hit rate in a kind of text, and
MAX_COST = 0.005  # that of its loss times its share of the texts, where it is rarer than half of them
CLIP = 0.25  # limit of the difference of hit rates of one text, so that none weighs too much
MAX_STAKE = 0.75
MIN_CLASS_SHARE = 0.1  # share of texts of a kind that is common
MAX_SLOWDOWN = 1.05  # of drafting a token, against the version before
_DOUBT = 0.25  # mean square before the first text


def candidate_error(number: int, error: float = ERROR) -> float:
    """Return alpha_j of the j-th version, or kind of text, j = `number` >= 1; they add up to `error`."""
    return error * 6 / (math.pi * number) ** 2


def class_margin(share: float) -> float:
    """Return the loss of hit rate that a kind of text with this share of all texts may have, shares in (0, 1]."""
    return max(MARGIN, MAX_COST / max(share, MIN_CLASS_SHARE))


def clipped(difference: float) -> float:
    """Return a text's difference of hit rates in parts of `CLIP`; raises `InvalidArgument` unless it is in [-1, 1]."""
    if not -1 <= difference <= 1:
        raise InvalidArgument(f"must be in [-1, 1], not {difference}", field="difference")
    return min(1.0, max(-1.0, difference / CLIP))


@dataclass(slots=True)
class SignTest:
    """Sequential test of whether numbers in [-1, 1] have a mean above 0.

    Attributes:
        count, total, squares: number of numbers, their sum, and the sum of their squares.
        log_wealth: log K after the newest one.
        max_log_wealth: largest log K so far, which decides: what was shown once stays shown.
    """

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    log_wealth: float = 0.0
    max_log_wealth: float = 0.0

    @property
    def stake(self) -> float:
        """Share of the wealth that goes on the next number."""
        return min(MAX_STAKE, max(0.0, self.total / (_DOUBT + self.squares)))

    def add(self, number: float) -> None:
        """Bet on the next number; raises `InvalidArgument` unless it is in [-1, 1]."""
        if not -1 <= number <= 1:
            raise InvalidArgument(f"must be in [-1, 1], not {number}", field="number")
        self.log_wealth += math.log1p(self.stake * number)
        self.max_log_wealth = max(self.max_log_wealth, self.log_wealth)
        self.count += 1
        self.total += number
        self.squares += number * number

    def shows(self, error: float) -> bool:
        """Return whether the mean is shown to be above 0; wrong with a chance of `error` at most, ever."""
        return self.max_log_wealth >= -math.log(error)

    def row(self) -> list[float]:
        """Return its state as numbers to save."""
        return [self.count, self.total, self.squares, self.log_wealth, self.max_log_wealth]

    @classmethod
    def from_row(cls, row: Sequence[float]) -> Self:
        """Restore what `row` returned; raises `ValueError` or `TypeError` if it is malformed."""
        count, total, squares, log_wealth, max_log_wealth = (float(number) for number in row)
        if not (count >= 0 and squares >= 0 and abs(total) <= count and max_log_wealth >= max(0.0, log_wealth)):
            raise ValueError(f"no such test: {row}")
        return cls(int(count), total, squares, log_wealth, max_log_wealth)


class LossTest:
    """Test of whether a version hits less than the one before it, on texts that neither was trained on.

    Args:
        number: which version of its name is tested, from 1.
    """

    def __init__(self, number: int = 1) -> None:
        if number < 1:
            raise InvalidArgument("must be 1 or more", field="number")
        self.number = number
        self._all = SignTest()
        self._of_class: dict[int, SignTest] = {}
        self._difference = 0.0  # sum, not clipped

    @property
    def texts(self) -> int:
        return self._all.count

    @property
    def difference(self) -> float:
        """Mean difference of hit rates, not clipped; 0 without texts."""
        return self._difference / self.texts if self.texts else 0.0

    @property
    def evidence(self) -> float:
        """Natural log of the wealth that bets on its being worse have made."""
        return self._all.log_wealth

    def add(self, difference: float, prompt_class: int = 0) -> None:
        """Count a text of this kind: hit rate of the version less that of the one before, in [-1, 1]."""
        over_margin = self.over_margin(difference, prompt_class)
        self._all.add(-clipped(difference))
        self._of_class.setdefault(prompt_class, SignTest()).add(-over_margin)
        self._difference += difference

    def over_margin(self, difference: float, prompt_class: int) -> float:
        """Return a number in [-1, 1] for the next text that is below 0 where its kind loses more than its margin."""
        before = self._of_class[prompt_class].count if prompt_class in self._of_class else 0
        margin = class_margin((before + 1) / (self.texts + 1)) / CLIP
        return (clipped(difference) + margin) / (1 + margin)

    @property
    def lost(self) -> bool:
        return self.lost_class is not None or self._all.shows(candidate_error(self.number) / 2)

    @property
    def lost_class(self) -> int | None:
        """Kind of text that is shown to lose more than the margin; None: there is none."""
        error = candidate_error(self.number) / 2
        kinds = enumerate(self._of_class.items(), 1)
        return next((kind for number, (kind, each) in kinds if each.shows(candidate_error(number, error))), None)

    def rows(self) -> list[list[float]]:
        """Return its state as rows of numbers to save: over all texts, then by kind."""
        every = [(-1, self._all), *self._of_class.items()]
        return [[self.number, self._difference], *([kind, *each.row()] for kind, each in every)]

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[float]]) -> Self:
        """Restore what `rows` returned; raises `ValueError` or `TypeError` if it is malformed.

        Older releases saved kinds to keep in the first row, and a test of the gain before each of the loss.
        """
        (number, difference, *_), *every = rows
        restored = cls(int(number))
        found = {int(row[0]): SignTest.from_row(row[1:][-5:]) for row in every}
        if -1 not in found:
            raise ValueError("the row over all texts is missing")
        restored._all = found.pop(-1)
        restored._of_class = found
        restored._difference = float(difference)
        return restored
