"""Branches of a chain: which misses are likely enough to draft for before they are known.

A miss costs a round trip before the edge's next drafts are there, unless the edge has drafted for the very token that
takes the draft's place ("Speculative Speculative Decoding", Kumar, Dao and May 2026, calls this a speculation cache).
With shared noise the drafter's second and third best under the same noise are that token in half of the misses. A
branch at draft i with runner-up r is taken with probability

    c_1 ... c_(i-1) (1 - c_i) h_r,

where c are the calibrated chances of the drafts and h_r is the share of misses whose token was runner-up r.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

RUNNERS_UP = 2
MAX_BRANCHES = 64  # of a chain
MIN_CHANCE = 0.01  # that a draft of a branch becomes text, below which it is not worth its time, on mains
_FIRST_SHARES = (0.4, 0.14)  # of the embedded family: 0.435 and 0.151 at T = 0, 0.321 and 0.125 at T = 1
_FIRST_WEIGHT = 10.0
_FADE = 0.98
_SHORTEST, _LONGEST = 2, 10
BRANCH_BYTES = 6  # of a branch of one token on the wire, for vocabularies below 2^14
LEAST_GAIN = 0.02  # tokens that a branch of one token adds to a step, below which it is not sent
MAX_LEAVES = 12  # in a message


@dataclass(frozen=True, slots=True)
class LikelyBranch:
    """A branch worth drafting, taken with this `chance`: `token` in place of the chain's draft at `index`.

    Attributes:
        drafts: drafts that are worth their time after it.
    """

    chance: float
    index: int
    token: int
    drafts: int


@dataclass(slots=True)
class MissShares:
    """The share of misses whose token was each runner-up; it fades, so that a change of subject is noticed."""

    hits: list[float] = field(default_factory=lambda: [share * _FIRST_WEIGHT for share in _FIRST_SHARES])
    misses: float = _FIRST_WEIGHT

    def add(self, runners_up: Sequence[int], token: int) -> None:
        """Count a miss of a draft with these runners-up, in whose place `token` came."""
        self.misses = self.misses * _FADE + 1
        self.hits = [
            hits * _FADE + (rank < len(runners_up) and runners_up[rank] == token) for rank, hits in enumerate(self.hits)
        ]

    def of(self, rank: int) -> float:
        return self.hits[rank] / self.misses


_SCORE_EDGES = (0.3, 0.6, 0.9)
_FIRST_OTHER, _FIRST_OTHER_WEIGHT = 0.1, 6.0  # share of misses at which another drafter is right, before any is known


@dataclass(slots=True)
class OtherShares:
    """The share of a chain's misses at which another drafter had the token, by the score of its proposal; it fades.

    Only misses count at which the other proposed another token than the chain.
    """

    hits: list[float] = field(default_factory=lambda: [_FIRST_OTHER * _FIRST_OTHER_WEIGHT] * (len(_SCORE_EDGES) + 1))
    misses: list[float] = field(default_factory=lambda: [_FIRST_OTHER_WEIGHT] * (len(_SCORE_EDGES) + 1))

    def add(self, score: float, hit: bool) -> None:
        """Count a miss of the chain at which the other proposed another token with this score; NaN: unknown."""
        bin_ = bisect.bisect_right(_SCORE_EDGES, score)
        self.misses[bin_] = self.misses[bin_] * _FADE + 1
        self.hits[bin_] = self.hits[bin_] * _FADE + hit

    def of(self, score: float) -> float:
        bin_ = bisect.bisect_right(_SCORE_EDGES, score)
        return self.hits[bin_] / self.misses[bin_]


def likely_leaves(
    chances: Sequence[float], runners_up: Sequence[Sequence[int]], shares: MissShares, first: int, least: float
) -> list[tuple[int, int, float]]:
    """Return the branches of one token that are worth a row of a step, likeliest first.

    Where the target's token is one of them, the same step gives the token after it too.

    Args:
        chances: [n] calibrated chance that each draft of the chain agrees, given that all before it do.
        runners_up: [n] tokens that the drafter would have proposed next at each, best first.
        shares: shares of misses.
        first: index of the first draft whose runners-up are wanted.
        least: chance below which one is not worth its row and bytes.

    Returns:
        Index in the chain, token, and its chance given that the chain agrees before it, of each.
    """
    survival, found = 1.0, []
    for index, (chance, tokens) in enumerate(zip(chances, runners_up, strict=True)):
        if index >= first:
            for rank, token in enumerate(tokens[:RUNNERS_UP]):
                taken = (1 - chance) * shares.of(rank)
                if survival * taken >= least:
                    found.append((survival * taken, index, token, taken))
        survival *= chance
        if survival < least:
            break
    found.sort(reverse=True)
    return [(index, token, taken) for _, index, token, taken in found[:MAX_LEAVES]]


def likely_branches(
    chances: Sequence[float],
    runners_up: Sequence[Sequence[int]],
    shares: MissShares,
    acceptance: float,
    min_chance: float = MIN_CHANCE,
) -> Iterator[LikelyBranch]:
    """Yield the branches worth drafting, from the chain's beginning on.

    The first three arguments are those of `likely_leaves`. A draft of a branch agrees with chance `acceptance`, given
    that all before it do, and is worth its time while its chance to become text is at least `min_chance`.
    """
    survival = 1.0
    for index, (chance, tokens) in enumerate(zip(chances, runners_up, strict=True)):
        missed = survival * (1 - chance)
        for rank, token in enumerate(tokens[:RUNNERS_UP]):
            taken = missed * shares.of(rank)
            drafts = int(math.log(min_chance / taken) / math.log(acceptance)) if taken > min_chance else 0
            if drafts >= _SHORTEST:
                yield LikelyBranch(taken, index, token, min(_LONGEST, drafts))
        survival *= chance
        if survival < min_chance:
            return
