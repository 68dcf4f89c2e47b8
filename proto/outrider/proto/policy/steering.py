"""Which steering vectors the edge requests: how precise, and with how many of the commits.

A vector makes drafts better and commits longer. It is worth a commit's time, times what the drafter gains by a vector
of that age; it costs the time that its bytes take on the downlink. Sent with every k-th commit it costs a k-th, and is
up to k - 1 commits older when drafts are made with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from outrider.proto.errors import InvalidArgument
from outrider.proto.types import Commit, SteeringPrecision

EVERY = (1, 2, 4, 8)  # commits a vector
DEFAULT_GAIN = ((1, 0.1), (64, 0.0))  # where the drafter's own is not known
MAX_VECTOR_AGE = 64  # positions behind the first draft; drafters are trained for vectors up to a window old
VECTOR_BYTES = 12  # of a vector in a commit beside its numbers
_TOKEN_BYTES, _NUMBER_BYTES = 2, 4
_INT8_KEEPS = 0.99  # of the gain: rounding to max / 127 is an error of about 1 % of a vector's length
_DRAFTED = 0.5  # share of tokens that were drafts where a drafter's gain was measured, about
_SURE = 1.0  # standard errors of what a byte takes
_DEAREST_S = 1.0  # a byte, where nothing is known: beyond any link
_PAYS = 0.1  # a change must bring so much more than it costs
_SETTLES = 8  # commits until another change: some must come with the new vectors before they say anything
_FIRST_TRY, _LAST_TRY = 48, 768  # commits without vectors before they are tried again; twice as many every time
_TRY = 32  # commits


@dataclass(frozen=True, slots=True)
class SteeringRate:
    """How often vectors come, and how precise.

    Attributes:
        precision: of their numbers.
        every: commits for each vector; 0: none come.
    """

    precision: SteeringPrecision = SteeringPrecision.INT8
    every: int = 1

    def bytes_of(self, rank: int) -> float:
        """Return their mean bytes in a commit."""
        return (rank * self.precision.number_bytes + VECTOR_BYTES) / self.every if self.every else 0.0


ALL, LEAST, NONE = SteeringRate(), SteeringRate(every=EVERY[-1]), SteeringRate(every=0)
FIRST = SteeringRate(every=2)  # commits with and without show what a vector takes; with all it is a guess
RATES = (*(SteeringRate(precision, every) for precision in SteeringPrecision for every in EVERY), NONE)


@dataclass(frozen=True, slots=True)
class SteeringView:
    """What the edge has measured when it chooses. Seconds; 0: not known yet.

    Attributes:
        commit_s: seconds between commits.
        commit_tokens: tokens in a commit.
        lead: positions from the newest that the verifier has processed to the one that the next draft follows.
        byte_s: seconds a byte of the downlink.
        doubt_s: standard error of `byte_s`; infinite while nothing is known.
        queued_s: how much round trips have grown lately, one after the other: what is sent piles up.
    """

    commit_s: float
    commit_tokens: float
    lead: float
    byte_s: float
    doubt_s: float
    queued_s: float


class Gain:
    """A drafter's relative gain in tokens a round against no vector, by the vector's age in positions.

    Straight lines join the known gains; the first one holds for younger vectors, and after the last age the gain falls
    to 0 at twice that age.
    """

    def __init__(self, known: tuple[tuple[int, float], ...] = ()) -> None:
        """Take what is known.

        Args:
            known: (age, gain), ages ascending, each once; empty: `DEFAULT_GAIN`.

        Raises:
            InvalidArgument: the ages do not ascend from 0 or more.
        """
        ages = [age for age, _ in known]
        if ages != sorted(set(ages)) or min(ages, default=0) < 0:
            raise InvalidArgument("must be in the order of ages, each once, from 0 on", field="steering.gain")
        points = known or DEFAULT_GAIN
        if points[-1][1]:
            points = (*points, (max(1, 2 * points[-1][0]), 0.0))
        young = np.interp(range(MAX_VECTOR_AGE + 1), [age for age, _ in points], [gain for _, gain in points])
        self._at = [*young.tolist(), 0.0, 0.0]  # by age; a list, since numpy takes 20 times as long over eight numbers

    @property
    def max_age(self) -> int:
        """Age up to which a vector, and every younger one, is better than none; 0 where none is."""
        return next((age for age, gain in enumerate(self._at[1:], 1) if gain <= 0), len(self._at)) - 1

    def by_every(self, lead: float, commit_tokens: float) -> dict[int, float]:
        """Return the mean gain over a vector's age, by commits a vector; its first drafts follow after `lead`."""
        gains = [self._of(lead + commit_tokens * late) for late in range(EVERY[-1])]
        return {every: sum(gains[:every]) / every for every in EVERY}

    def _of(self, age: float) -> float:
        age = min(age, MAX_VECTOR_AGE + 1.0)
        whole = int(age)
        return self._at[whole] + (age - whole) * (self._at[whole + 1] - self._at[whole])


def saved_s(rate: SteeringRate, view: SteeringView, gain_by_every: dict[int, float]) -> float:
    """Return the seconds that a commit's vectors save, their way not counted: n (1 + g) tokens take the time of n.

    A vector adds drafts that are right, and g was measured where half of the tokens were such drafts. Where fewer are,
    because a long link lets them come too late, it adds as much less.
    """
    if not rate.every or not view.commit_tokens:
        return 0.0
    drafted = 1 - 1 / max(1.0, view.commit_tokens)
    gain = gain_by_every[rate.every] * (_INT8_KEEPS if rate.precision is SteeringPrecision.INT8 else 1.0)
    gain *= min(1.0, drafted / _DRAFTED)
    return view.commit_s * gain / (1 + gain)


def choose(view: SteeringView, now: SteeringRate, rank: int, gain: Gain) -> SteeringRate:
    """Return the rate that saves the most time, less its bytes' time on the downlink; `now` where no other surely does.

    Fewer bytes are requested where that pays even if a byte takes as little time as it may, more where that pays even
    if it takes as much. What is not known well changes nothing, so that noise does not make the rate flap. Where
    commits pile up on the downlink, fewer are requested too if a byte may take so much that it pays.
    """
    if not view.commit_s:
        return now
    by_every = gain.by_every(view.lead, view.commit_tokens)
    if all(saved_s(rate, view, by_every) <= 0 for rate in RATES):
        return NONE  # however little a byte takes
    saved, sent = saved_s(now, view, by_every), now.bytes_of(rank)
    doubt_s = _SURE * view.doubt_s
    min_s, max_s = max(0.0, view.byte_s - doubt_s), min(_DEAREST_S, view.byte_s + doubt_s)
    if view.queued_s > view.commit_s:
        min_s = max_s
    best, most_saved = now, 0.0
    for rate in RATES:
        more_saved, more_sent = saved_s(rate, view, by_every) - saved, rate.bytes_of(rank) - sent
        more_taken = more_sent * (max_s if more_sent > 0 else min_s)
        brings = more_saved - more_taken
        if brings > _PAYS * min(abs(more_saved), abs(more_taken)) and brings > most_saved:
            best, most_saved = rate, brings
    return best


class SteeringPolicy(Protocol):
    """Rule of which vectors to request. Sessions with the same drafter may share one."""

    @property
    def rate(self) -> SteeringRate:
        """Rate to request now."""
        ...

    @property
    def max_age(self) -> int:
        """Positions after which a vector is of no use."""
        ...

    def after_commit(self, view: SteeringView) -> None:
        """Take in that a commit has come."""
        ...


@dataclass(frozen=True, slots=True)
class FixedSteering:
    """Requests the same rate always."""

    rate: SteeringRate = ALL
    max_age: int = MAX_VECTOR_AGE

    def after_commit(self, view: SteeringView) -> None:
        """Change nothing."""


class PricedSteering:
    """Requests what `choose` returns; what was dropped is tried again after a while, ever less often.

    Without vectors commits are small and differ little in size, which says hardly what a byte takes. A try finds out
    whether the link has recovered, unless the small differences show it before.
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

    def after_commit(self, view: SteeringView) -> None:
        """Keep to the rate, or change it."""
        self._commits += 1
        if self._commits < (_TRY if self._trying else _SETTLES):
            return
        rate = choose(view, self.rate, self._rank, self._gain)
        tries = rate == self.rate == NONE and self._commits >= self._pause
        if tries:
            rate = LEAST
        elif rate == self.rate:
            return
        else:
            self._pause = min(2 * self._pause, _LAST_TRY) if self._trying and rate == NONE else _FIRST_TRY
        self.rate, self._commits, self._trying = rate, 0, tries


def commit_bytes(commit: Commit) -> int:
    """Return the approximate bytes of a commit on the wire, without what all commits have."""
    size = 0
    for token in commit.tokens:
        numbers = (token.logp is not None) + (token.logprob is not None)
        size += _TOKEN_BYTES + _NUMBER_BYTES * numbers + (_TOKEN_BYTES + _NUMBER_BYTES) * len(token.top)
    return size + (len(commit.steering.values) + VECTOR_BYTES if commit.steering is not None else 0)
