"""Rewards of a round, and the statistics behind them.

For a target p and a drafter q at one prefix, with TV = sum |p - q| / 2 and k drafts in a block:

    block divergence    1/k sum_j (1 - TV_j)               needs both distributions (MetaSD, arXiv 2604.05417)
    of a draft x ~ q    min(1, p(x) / q(x))                mean 1 - TV: sum_x q min(1, p/q) = sum_x min(p, q)
    of a token x ~ p    min(1, q(x) / p(x))                mean 1 - TV by the same sum, and for idle drafters too
    block efficiency    accepted / k                       mean (E[N] - 1) / k, whatever the coupling

What is unbiased: both one-sample estimates at every single prefix, and so their mean over all drafts of a block, for
the block divergence along the drafter's own chain. What is not: their mean over the verified drafts only, since a block
is cut short where agreement was low. Sums are: E[sum over verified] = E[sum over verified of 1 - TV] (optional
stopping), so that ratios of sums over many rounds are consistent. With shared noise a draft is accepted when both sides
draw the same token, which has a chance of its own, between (1 - TV) / (1 + TV) and 1 - TV: there block divergence ranks
drafters but does not give E[N]; block efficiency does. All of this is enumerated in the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from outrider.proto.policy.selection import RoundOutcome, SelectionView


class Reward(Protocol):
    """A number between 0 and 1 that a round gives its arm, and what its mean says of E[N]."""

    def of(self, outcome: RoundOutcome) -> float:
        """Return the round's reward."""
        ...

    def tokens(self, mean: float, drafts: int) -> float:
        """Return E[N], the mean committed tokens of a round of `drafts` by an arm with this mean reward."""
        ...


class BlockDivergence:
    """MetaSD's r^BD, estimated from the drafts' own probabilities.

    Where those are not known (a drafter without probabilities) the share of verified drafts that were accepted stands
    in: one coin for each chance, more scattered.
    """

    def of(self, outcome: RoundOutcome) -> float:
        """Return the round's reward."""
        if outcome.agreement == outcome.agreement:  # not NaN
            return outcome.agreement
        return outcome.accepted / outcome.verified if outcome.verified else 0.0

    def tokens(self, mean: float, drafts: int) -> float:
        """Return E[N] by Leviathan et al. 2023, equation 1, with the mean as the acceptance of every draft."""
        return drafts + 1.0 if mean >= 1 else (1 - mean ** (drafts + 1)) / (1 - mean)


class BlockEfficiency:
    """MetaSD's r^BE: accepted drafts over all drafts of a round."""

    def of(self, outcome: RoundOutcome) -> float:
        """Return the round's reward."""
        return outcome.accepted / outcome.view.drafts if outcome.view.drafts else 0.0

    def tokens(self, mean: float, drafts: int) -> float:
        """Return E[N] exactly: the accepted drafts and the target's own token."""
        return 1 + drafts * mean


def block_divergence(target: np.ndarray, drafter: np.ndarray) -> float:
    """Return mean(1 - TV) over a block, from full distributions: `target` and `drafter` [k, vocab] each; k >= 1."""
    return float(np.minimum(target, drafter).sum(axis=-1).mean())


def draft_agreement(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return min(1, p(x) / q(x)) [k] of drafts x ~ q; `p` and `q` [k] are probabilities of x, q > 0."""
    return np.minimum(1.0, p / q)


def committed_agreement(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return min(1, q(x) / p(x)) [n] of committed tokens x ~ p; p > 0.

    For idle drafters: it needs the target's log-probability, which each commit carries, and one reading pass.
    """
    return np.minimum(1.0, q / p)


def coupled_acceptance(p: np.ndarray, q: np.ndarray) -> float:
    """Return the chance that both sides draw the same token with shared Gumbel noise; `p` and `q` [vocab].

    sum_i 1 / sum_j max(p_j / p_i, q_j / q_i) over the tokens that both can draw (Daliri et al. 2024, arXiv
    2408.07978): both draw i when i comes first in two exponential races with the same clocks.
    """
    both = (p > 0) & (q > 0)
    if not both.any():
        return 0.0
    races = np.maximum(p[None, :] / p[both, None], q[None, :] / q[both, None])
    return float((1 / races.sum(axis=1)).sum())


def signal_strength(best: Sequence[float], other: Sequence[float]) -> float:
    """Return Delta^2 / max Var of two arms' rewards; rounds to tell them apart go with its inverse (MetaSD's R).

    Args:
        best: [n] rewards of one arm, n >= 2.
        other: [m] of the other, m >= 2.
    """
    gap = float(np.mean(best) - np.mean(other))
    scatter = max(float(np.var(best)), float(np.var(other)))
    return gap**2 / scatter if scatter else float("inf") if gap else 0.0


STAY_ROUNDS = 8.0  # rounds that a choice is expected to last; they share its switch


class Objective(Protocol):
    """Ranks arms by their rewards; rises with the reward."""

    def worth(self, reward: Reward, mean: float, view: SelectionView, arm: int) -> float:
        """Return the worth of an arm with this mean reward, 0 or more."""
        ...


@dataclass(frozen=True, slots=True)
class Alignment:
    """The reward itself, MetaSD's objective: all drafters are equally fast and switches are free."""

    def worth(self, reward: Reward, mean: float, view: SelectionView, arm: int) -> float:
        """Return the mean reward."""
        del reward, view, arm
        return mean


@dataclass(frozen=True, slots=True)
class Throughput:
    """Committed tokens a second, E[N]/E[T]: of rewards in rounds the long-run rate (renewal-reward theorem).

    Seconds of a round are known for each arm before it is chosen, so only E[N] is learned, and a link that changes
    is a new view, not a new lesson. A switch is shared by the rounds that it is expected to last.
    """

    stay_rounds: float = STAY_ROUNDS

    def worth(self, reward: Reward, mean: float, view: SelectionView, arm: int) -> float:
        """Return tokens a second."""
        tokens = reward.tokens(min(1.0, max(0.0, mean)), view.drafts)
        return tokens / (view.round_s[arm] + view.switch_s[arm] / self.stay_rounds)


def share_of_best(objective: Objective, reward: Reward, mean: float, view: SelectionView, arm: int) -> float:
    """Return the worth over the most that any arm could be worth now, in [0, 1], which EXP3 needs."""
    most = max(objective.worth(reward, 1.0, view, other) for other in view.arms)
    return objective.worth(reward, mean, view, arm) / most
