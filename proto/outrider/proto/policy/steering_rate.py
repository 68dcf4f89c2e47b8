"""Which steering vectors the edge requests: how precise, and with how many of the commits.

A vector makes drafts better and commits longer. It is worth a commit's time, times the drafter's gain by a vector of
that age; it costs the time of its bytes on the downlink. Sent with every k-th commit it costs a k-th, and is up to
k - 1 commits older when drafts are made with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from outrider.proto.errors import InvalidArgument
from outrider.proto.policy.measurements import VECTOR_BYTES, Measurements, Pace
from outrider.proto.types import SteeringPrecision

EVERY = (1, 2, 4, 8)  # commits a vector
DEFAULT_GAIN = ((1, 0.1), (64, 0.0))  # where the drafter's own is not known
MAX_VECTOR_AGE = 64  # positions before the first draft; drafters are trained for vectors up to a window old
_INT8_KEEPS = 0.99  # share of the gain: rounding to max / 127 is an error of about 1 % of a vector's length
_DRAFTED = 0.5  # approximate share of drafts among the tokens where a drafter's gain was measured
_SURE = 1.0  # standard errors of the time of a byte
_DEAREST_S = 1.0  # time of a byte where nothing is known: beyond any link
_PAYS = 0.1  # share by which a change must bring more than it costs
_SETTLES = 8  # commits until another change, since the first with the new vectors show little
_FIRST_TRY, _LAST_TRY = 48, 768  # commits without vectors before they are tried again; twice as many every time
_TRY = 32  # commits


@dataclass(frozen=True, slots=True)
class SteeringRate:
    """One steering vector of this precision for `every` commits; 0: none come."""

    precision: SteeringPrecision = SteeringPrecision.INT8
    every: int = 1

    def bytes_of(self, rank: int) -> float:
        """Return the mean bytes that vectors of this rank add to a commit."""
        return (rank * self.precision.number_bytes + VECTOR_BYTES) / self.every if self.every else 0.0


ALL, RAREST, NONE = SteeringRate(), SteeringRate(every=EVERY[-1]), SteeringRate(every=0)
FIRST = SteeringRate(every=2)  # commits with and without a vector show its price
RATES = (*(SteeringRate(precision, every) for precision in SteeringPrecision for every in EVERY), NONE)


class Gain:
    """A drafter's relative gain in tokens a round against no vector, by the vector's age in positions.

    Straight lines join the `known` (age, gain); the first one holds for younger vectors, and after the last age the
    gain falls to 0 at twice that age. None known: `DEFAULT_GAIN`.

    Raises:
        InvalidArgument: the ages do not ascend from 0 or more, each once.
    """

    def __init__(self, known: tuple[tuple[int, float], ...] = ()) -> None:
        ages = [age for age, _ in known]
        if ages != sorted(set(ages)) or min(ages, default=0) < 0:
            raise InvalidArgument("must be in the order of ages, each once, from 0 on", field="steering.gain")
        points = known or DEFAULT_GAIN
        if points[-1][1]:
            points = (*points, (max(1, 2 * points[-1][0]), 0.0))
        young = np.interp(range(MAX_VECTOR_AGE + 1), [age for age, _ in points], [gain for _, gain in points])
        self._at = [*young.tolist(), 0.0, 0.0]  # by age; a list, since numpy is 20 times slower on eight numbers

    @property
    def max_age(self) -> int:
        """Age up to which a vector, and every younger one, is better than none, in positions; 0: no vector is."""
        return next((age for age, gain in enumerate(self._at[1:], 1) if gain <= 0), len(self._at)) - 1

    def by_every(self, first_age: float, commit_tokens: float) -> dict[int, float]:
        """Return the mean gain of a vector that is `first_age` old at its first drafts, by commits a vector."""
        gains = [self._of(first_age + commit_tokens * late) for late in range(EVERY[-1])]
        return {every: sum(gains[:every]) / every for every in EVERY}

    def _of(self, age: float) -> float:
        age = min(age, MAX_VECTOR_AGE + 1.0)
        whole = int(age)
        return self._at[whole] + (age - whole) * (self._at[whole + 1] - self._at[whole])


def saved_s(rate: SteeringRate, pace: Pace, gain_by_every: dict[int, float]) -> float:
    """Return the seconds that a commit's vectors save, without their way: n (1 + g) tokens take the time of n.

    A vector adds right drafts, and g was measured where half of the tokens were such drafts. With fewer of them, on a
    long link where they come too late, it adds proportionally less.
    """
    if not rate.every or not pace.commit_tokens:
        return 0.0
    drafted = 1 - 1 / max(1.0, pace.commit_tokens)
    gain = gain_by_every[rate.every] * (_INT8_KEEPS if rate.precision is SteeringPrecision.INT8 else 1.0)
    gain *= min(1.0, drafted / _DRAFTED)
    return pace.commit_s * gain / (1 + gain)


def choose(measured: Measurements, now: SteeringRate, rank: int, gain: Gain) -> SteeringRate:
    """Return the rate that saves the most time, less its bytes' time on the downlink; `now` unless another surely does.

    Fewer bytes are requested if that pays at the lowest likely price of a byte, more if it pays at the highest, so that
    noise does not make the rate flap. While commits pile up on the downlink, fewer are requested too if that pays at
    the highest likely price.
    """
    pace, downlink = measured.pace, measured.downlink.best
    if not pace.commit_s:
        return now
    by_every = gain.by_every(measured.lookahead.value, pace.commit_tokens)
    if all(saved_s(rate, pace, by_every) <= 0 for rate in RATES):
        return NONE  # at any price of a byte
    saved, sent = saved_s(now, pace, by_every), now.bytes_of(rank)
    byte_s, doubt_s = downlink.byte_s, _SURE * downlink.doubt_s
    min_s, max_s = max(0.0, byte_s - doubt_s), min(_DEAREST_S, byte_s + doubt_s)
    if downlink.queued_s > pace.commit_s:
        min_s = max_s
    best, most_saved = now, 0.0
    for rate in RATES:
        more_saved, more_sent = saved_s(rate, pace, by_every) - saved, rate.bytes_of(rank) - sent
        more_taken = more_sent * (max_s if more_sent > 0 else min_s)
        brings = more_saved - more_taken
        if brings > _PAYS * min(abs(more_saved), abs(more_taken)) and brings > most_saved:
            best, most_saved = rate, brings
    return best


class SteeringPolicy(Protocol):
    """A rule of which vectors to request, which sessions with the same drafter may share."""

    @property
    def rate(self) -> SteeringRate: ...

    @property
    def max_age(self) -> int:
        """Positions after which a vector is of no use."""
        ...

    def after_commit(self, measured: Measurements) -> None: ...


@dataclass(frozen=True, slots=True)
class FixedSteering:
    """Requests the same rate always."""

    rate: SteeringRate = ALL
    max_age: int = MAX_VECTOR_AGE

    def after_commit(self, measured: Measurements) -> None:
        """Change nothing."""


class PricedSteering:
    """Requests what `choose` returns, and tries vectors again some time after it has dropped them, ever less often.

    Without vectors commits are small and differ little in size, which shows little of a byte's price.
    """

    def __init__(self, rank: int, gain: tuple[tuple[int, float], ...] = ()) -> None:
        """Begin at a rate that measures; `rank`: numbers in a vector, `gain`: for `Gain`."""
        self.rate = FIRST
        self._rank = rank
        self._gain = Gain(gain)
        self.max_age = self._gain.max_age
        self._commits = 0  # since the rate changed
        self._pause = _FIRST_TRY
        self._trying = False

    def after_commit(self, measured: Measurements) -> None:
        self._commits += 1
        if self._commits < (_TRY if self._trying else _SETTLES):
            return
        rate = choose(measured, self.rate, self._rank, self._gain)
        tries = rate == self.rate == NONE and self._commits >= self._pause
        if tries:
            rate = RAREST
        elif rate == self.rate:
            return
        else:
            self._pause = min(2 * self._pause, _LAST_TRY) if self._trying and rate == NONE else _FIRST_TRY
        self.rate, self._commits, self._trying = rate, 0, tries
