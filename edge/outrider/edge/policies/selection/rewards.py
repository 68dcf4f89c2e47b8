"""Rewards of a round, and the worth of an arm with such rewards.

For a target p and a drafter q at one prefix, with TV = sum |p - q| / 2 and k drafts in a block:

    block divergence    1/k sum_j (1 - TV_j)               needs both distributions (MetaSD, arXiv 2604.05417)
    of a draft x ~ q    min(1, p(x) / q(x))                mean 1 - TV: sum_x q min(1, p/q) = sum_x min(p, q)
    of a token x ~ p    min(1, q(x) / p(x))                mean 1 - TV by the same sum, and for idle drafters too
    block efficiency    accepted / k                       mean (E[N] - 1) / k, whatever the coupling

Both one-sample estimates are unbiased at every single prefix, and so is their mean over all drafts of a block, for the
block divergence along the drafter's own chain. Their mean over the verified drafts only is biased, since a block is cut
short where agreement was low. Their sum is not, since E[sum over verified] = E[sum over verified of 1 - TV] (optional
stopping), so ratios of sums over many rounds are consistent. With shared noise a draft is accepted when both sides draw
the same token, which has a chance of its own, between (1 - TV) / (1 + TV) and 1 - TV: there block divergence ranks
drafters but does not give E[N]; block efficiency does. All of this is enumerated in the tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from outrider.proto.policy.selection import RoundOutcome, SelectionView


class Reward(Protocol):
    """A number between 0 and 1 that a round gives its arm, and E[N] by its mean."""

    def of(self, outcome: RoundOutcome) -> float:
        """Return the round's reward."""
        ...

    def tokens(self, mean: float, drafts: int) -> float:
        """Return E[N], the mean number of committed tokens of a round of `drafts` by an arm with this mean reward."""
        ...


class BlockDivergence:
    """MetaSD's r^BD, estimated from the drafts' own probabilities.

    Where those are not known (a drafter without probabilities) the share of verified drafts that were accepted stands
    in for them: one coin for each chance, with more scatter.
    """

    def of(self, outcome: RoundOutcome) -> float:
        if outcome.agreement == outcome.agreement:  # not NaN
            return outcome.agreement
        return outcome.accepted / outcome.verified if outcome.verified else 0.0

    def tokens(self, mean: float, drafts: int) -> float:
        """Return E[N] by Leviathan et al. 2023, equation 1, with the mean as the acceptance of every draft."""
        return drafts + 1.0 if mean >= 1 else (1 - mean ** (drafts + 1)) / (1 - mean)


class BlockEfficiency:
    """MetaSD's r^BE: accepted drafts over all drafts of a round."""

    def of(self, outcome: RoundOutcome) -> float:
        return outcome.accepted / outcome.view.drafts if outcome.view.drafts else 0.0

    def tokens(self, mean: float, drafts: int) -> float:
        """Return E[N] exactly: the accepted drafts and the target's own token."""
        return 1 + drafts * mean


class Objective(Protocol):
    """Ranking of arms by their rewards; rises with the reward."""

    def worth(self, reward: Reward, mean: float, view: SelectionView, arm: int) -> float:
        """Return the worth of an arm with this mean reward, 0 or more."""
        ...


@dataclass(frozen=True, slots=True)
class Alignment:
    """The reward itself, MetaSD's objective: all drafters are equally fast and switches are free."""

    def worth(self, reward: Reward, mean: float, view: SelectionView, arm: int) -> float:
        del reward, view, arm
        return mean


@dataclass(frozen=True, slots=True)
class Throughput:
    """Committed tokens a second, E[N]/E[T], the long-run rate of rewards in rounds (renewal-reward theorem).

    Seconds of a round are known for each arm before it is chosen, so only E[N] is learned, and a link that changes
    is a new view, not a new lesson. A switch is shared by the rounds that the choice is expected to last.
    """

    stay_rounds: float = 8.0

    def worth(self, reward: Reward, mean: float, view: SelectionView, arm: int) -> float:
        tokens = reward.tokens(min(1.0, max(0.0, mean)), view.drafts)
        return tokens / (view.round_s[arm] + view.switch_s[arm] / self.stay_rounds)
