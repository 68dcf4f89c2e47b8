"""Which steering codes the edge asks for: how precise, and with how many of the commits.

A code makes drafts better and commits longer. It is worth what a commit's time is worth, times what the drafter gains
by a code of that age; it costs the time that its bytes take on the downlink. Sent with every k-th commit it costs a
k-th, and is up to k - 1 commits older when drafts are made with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from outrider.proto.errors import InvalidArgument
from outrider.proto.types import Commit, SteeringPrecision

EVERY = (1, 2, 4, 8)  # commits a code
DEFAULT_GAIN = ((1, 0.1), (64, 0.0))  # where the drafter's own is not known
OLDEST_CODE = 64  # positions behind the first draft; drafters are trained for codes up to a window old
CODE_BYTES = 12  # of a code in a commit beside its numbers
_TOKEN_BYTES, _NUMBER_BYTES = 2, 4
_INT8_KEEPS = 0.99  # of the gain: rounding to max / 127 is an error of about 1 % of a code's length
_DRAFTED = 0.5  # share of tokens that were drafts where a drafter's gain was measured, about
_SURE = 1.0  # standard errors of what a byte takes
_DEAREST_S = 1.0  # a byte, where nothing is known: beyond any link
_PAYS = 0.1  # a change must bring so much more than it costs
_SETTLES = 8  # commits until another change: some must come with the new codes before they say anything
_FIRST_TRY, _LAST_TRY = 48, 768  # commits without codes before they are tried again; twice as many every time
_TRY = 32  # commits


@dataclass(frozen=True, slots=True)
class CodeRate:
    """Codes with every so many commits, so precise; `every` 0: none."""

    precision: SteeringPrecision = SteeringPrecision.INT8
    every: int = 1

    def bytes_of(self, rank: int) -> float:
        """A commit, on average."""
        return (rank * self.precision.number_bytes + CODE_BYTES) / self.every if self.every else 0.0


ALL, LEAST, NONE = CodeRate(), CodeRate(every=EVERY[-1]), CodeRate(every=0)
FIRST = CodeRate(every=2)  # commits with and without show what a code takes on the downlink; with all it is a guess
RATES = (*(CodeRate(precision, every) for precision in SteeringPrecision for every in EVERY), NONE)


@dataclass(frozen=True, slots=True)
class SteeringView:
    """What the edge has measured when it chooses. Seconds; 0: not known yet.

    Attributes:
        commit_s: between commits.
        commit_tokens: in one.
        lead: positions from the newest that the verifier has processed to the one that the next draft follows.
        byte_s: of the downlink.
        doubt_s: standard error of `byte_s`; infinite while nothing is known.
        queued_s: by so much have round trips grown of late, one after the other: what is sent piles up.
    """

    commit_s: float
    commit_tokens: float
    lead: float
    byte_s: float
    doubt_s: float
    queued_s: float


class Gain:
    """A drafter's relative gain in tokens a round against no code, by the code's age in positions.

    Straight lines between what is known; before the first age its gain; behind the last they fall to 0 at twice it.
    """

    def __init__(self, known: tuple[tuple[int, float], ...] = ()) -> None:
        """`known`: (age, gain), ages ascending, each once; empty: `DEFAULT_GAIN`.

        Raises:
            InvalidArgument: the ages do not ascend from 0 or more.
        """
        ages = [age for age, _ in known]
        if ages != sorted(set(ages)) or min(ages, default=0) < 0:
            raise InvalidArgument("must be in the order of ages, each once, from 0 on", field="steering.gain")
        points = known or DEFAULT_GAIN
        if points[-1][1]:
            points = (*points, (max(1, 2 * points[-1][0]), 0.0))
        young = np.interp(range(OLDEST_CODE + 1), [age for age, _ in points], [gain for _, gain in points])
        self._at = [*young.tolist(), 0.0, 0.0]  # by age; a list, since numpy takes 20 times as long over eight numbers

    @property
    def oldest(self) -> int:
        """The age up to which a code, and every younger one, is better than none; 0 where none is."""
        return next((age for age, gain in enumerate(self._at[1:], 1) if gain <= 0), len(self._at)) - 1

    def by_every(self, lead: float, commit_tokens: float) -> dict[int, float]:
        """With a code in every so many commits, on average over its age; a code's first drafts follow `lead` behind."""
        gains = [self._of(lead + commit_tokens * late) for late in range(EVERY[-1])]
        return {every: sum(gains[:every]) / every for every in EVERY}

    def _of(self, age: float) -> float:
        age = min(age, OLDEST_CODE + 1.0)
        whole = int(age)
        return self._at[whole] + (age - whole) * (self._at[whole + 1] - self._at[whole])


def saved_s(rate: CodeRate, view: SteeringView, gain_by_every: dict[int, float]) -> float:
    """Seconds that a commit's codes save, their way not counted: n (1 + g) tokens take the time of n.

    What a code adds is drafts that are right, and g was measured where half of the tokens were such drafts. Where fewer
    are, as on a link so long that they come too late, it adds as much less.
    """
    if not rate.every or not view.commit_tokens:
        return 0.0
    drafted = 1 - 1 / max(1.0, view.commit_tokens)
    gain = gain_by_every[rate.every] * (_INT8_KEEPS if rate.precision is SteeringPrecision.INT8 else 1.0)
    gain *= min(1.0, drafted / _DRAFTED)
    return view.commit_s * gain / (1 + gain)


def choose(view: SteeringView, now: CodeRate, rank: int, gain: Gain) -> CodeRate:
    """The rate that saves the most time, their bytes' time on the downlink taken off; `now` where no other surely does.

    Fewer bytes are asked for where that pays even if a byte takes as little time as it may, more where it pays even if
    it takes as much: what is not known well changes nothing, so noise does not make it flap. Where commits pile up on
    the downlink, fewer are asked for too if a byte may take so much that it pays.
    """
    if not view.commit_s:
        return now
    by_every = gain.by_every(view.lead, view.commit_tokens)
    if all(saved_s(rate, view, by_every) <= 0 for rate in RATES):
        return NONE  # however little a byte takes
    saved, sent = saved_s(now, view, by_every), now.bytes_of(rank)
    doubt_s = _SURE * view.doubt_s
    least_s, most_s = max(0.0, view.byte_s - doubt_s), min(_DEAREST_S, view.byte_s + doubt_s)
    if view.queued_s > view.commit_s:
        least_s = most_s
    best, most = now, 0.0
    for rate in RATES:
        more_saved, more_sent = saved_s(rate, view, by_every) - saved, rate.bytes_of(rank) - sent
        more_taken = more_sent * (most_s if more_sent > 0 else least_s)
        brings = more_saved - more_taken
        if brings > _PAYS * min(abs(more_saved), abs(more_taken)) and brings > most:
            best, most = rate, brings
    return best


class SteeringPolicy(Protocol):
    """Which codes to ask for. Sessions with the same drafter may share one."""

    @property
    def rate(self) -> CodeRate:
        """What to ask for now."""
        ...

    @property
    def oldest(self) -> int:
        """Positions behind which a code is of no use any more."""
        ...

    def after_commit(self, view: SteeringView) -> None:
        """A commit has come."""
        ...


@dataclass(frozen=True, slots=True)
class FixedCodes:
    """Always the same."""

    rate: CodeRate = ALL
    oldest: int = OLDEST_CODE

    def after_commit(self, view: SteeringView) -> None:
        """Changes nothing."""


class PricedCodes:
    """As `choose` says. What was dropped is tried again after a while, for a few codes, and ever less often.

    Without codes commits are small and differ little in size, so what a byte takes is hardly known any more; a try is
    how it is found out that the link has recovered, unless the small differences show it before.
    """

    def __init__(self, rank: int, gain: tuple[tuple[int, float], ...] = ()) -> None:
        """`rank`: numbers in a code; `gain`: as `Gain` takes it."""
        self.rate = FIRST
        self._rank = rank
        self._gain = Gain(gain)
        self.oldest = self._gain.oldest
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
    """Of a commit on the wire, about, but for what all have."""
    size = _TOKEN_BYTES * len(commit.tokens) + _NUMBER_BYTES * (len(commit.logp) + len(commit.logprobs))
    size += sum((_TOKEN_BYTES + _NUMBER_BYTES) * len(top) for top in commit.top_logprobs)
    return size + (len(commit.steering.values) + CODE_BYTES if commit.steering is not None else 0)
