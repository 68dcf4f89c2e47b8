"""Bandits: selectors that learn from their own rounds alone.

Upper confidence bounds (MetaSD's, and two that forget), Thompson sampling, EXP3 and Sequential Halving.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.edge.policies.selection.base import best_arm, require_arms
from outrider.edge.policies.selection.rewards import BlockDivergence, BlockEfficiency, Objective, Reward, Throughput
from outrider.proto.errors import InvalidArgument
from outrider.proto.policy.selection import RoundOutcome, SelectionView, Selector


@dataclass(slots=True, kw_only=True)
class _Ucb(Selector):
    """Selector that tries every arm once, then the arm whose worth is highest at its upper bound; see subclasses."""

    arms: int
    reward: Reward = field(default_factory=BlockDivergence)
    objective: Objective = field(default_factory=Throughput)
    pulls: list[float] = field(init=False)
    sums: list[float] = field(init=False)

    def __post_init__(self) -> None:
        require_arms(self.arms)
        self.pulls, self.sums = [0.0] * self.arms, [0.0] * self.arms

    def choose(self, view: SelectionView) -> int:
        if 0.0 in self.pulls:
            return self.pulls.index(0.0)
        bounds = self.bounds()
        return best_arm([self.objective.worth(self.reward, bounds[arm], view, arm) for arm in view.arms], view.current)

    def bounds(self) -> Sequence[float]:
        """Return upper bounds of the arms' mean rewards [arms]."""
        raise NotImplementedError

    def learn(self, outcome: RoundOutcome) -> None:
        self.pulls[outcome.arm] += 1
        self.sums[outcome.arm] += self.reward.of(outcome)

    def _bounds(self, log_rounds: float, width: float) -> list[float]:
        return [total / n + width * math.sqrt(log_rounds / n) for total, n in zip(self.sums, self.pulls, strict=True)]


@dataclass(slots=True, kw_only=True)
class MetaSdUcb(_Ucb):
    """MetaSD-UCB (arXiv 2604.05417), with either reward.

    mean_i + strength * sqrt(2 ln t / n_i) over the rounds so far: UCB1 of Auer et al. 2002 with an exploration
    strength. With `Alignment` as the objective it is the paper's. Regret grows with ln t where drafters do not change.
    UCB1 has strength 1, for rewards scattered over all of [0, 1]; these are less so, and need less.
    """

    strength: float = 0.3

    def bounds(self) -> Sequence[float]:
        return self._bounds(2 * math.log(sum(self.pulls)), self.strength)


@dataclass(slots=True, kw_only=True)
class DiscountedUcb(_Ucb):
    """Discounted UCB (Garivier and Moulines 2011, section 2.1).

    mean_i + 2 B sqrt(xi ln n_t / N_t(i)), B = 1, where every count and sum fades by `discount` in each round, also
    those of arms that are not played. Their theorem has xi above 1/2; with a memory this short that explores for
    ever, and rewards with this little scatter need far less.
    """

    discount: float = 0.97
    xi: float = 0.005

    def bounds(self) -> Sequence[float]:
        return self._bounds(self.xi * math.log(max(1.0, sum(self.pulls))), 2.0)

    def learn(self, outcome: RoundOutcome) -> None:
        self.pulls = [self.discount * n for n in self.pulls]
        self.sums = [self.discount * total for total in self.sums]
        _Ucb.learn(self, outcome)


@dataclass(slots=True, kw_only=True)
class SlidingUcb(_Ucb):
    """Sliding-window UCB (Garivier and Moulines 2011, section 2.2).

    mean_i + B sqrt(xi ln min(t, window) / N_t(i)), B = 1, over the newest `window` rounds; an arm that has left the
    window is played again. For xi see `DiscountedUcb`.
    """

    window: int = 60
    xi: float = 0.05
    newest: deque[tuple[int, float]] = field(init=False, default_factory=deque)

    def bounds(self) -> Sequence[float]:
        return self._bounds(self.xi * math.log(len(self.newest)), 1.0)

    def learn(self, outcome: RoundOutcome) -> None:
        _Ucb.learn(self, outcome)
        self.newest.append((outcome.arm, self.reward.of(outcome)))
        if len(self.newest) > self.window:
            arm, reward = self.newest.popleft()
            self.pulls[arm] -= 1
            self.sums[arm] -= reward


@dataclass(slots=True, kw_only=True)
class Thompson(Selector):
    """Thompson 1933; Agrawal and Goyal 2012, algorithm 1, with Beta(1 + accepted, 1 + missed) for each arm.

    Beta and not Gaussian: a verified draft hits or misses, a Bernoulli trial whose conjugate is the Beta distribution;
    its scatter follows from the counts, where a Gaussian would need a scale for each arm. A round gives as many trials
    as it had verified drafts. The draw is an acceptance, which `BlockDivergence.tokens` turns into E[N].
    """

    arms: int
    rng: np.random.Generator
    objective: Objective = field(default_factory=Throughput)
    accepted: np.ndarray = field(init=False)
    missed: np.ndarray = field(init=False)
    _chain: Reward = field(init=False, default_factory=BlockDivergence)

    def __post_init__(self) -> None:
        require_arms(self.arms)
        self.accepted, self.missed = np.zeros(self.arms), np.zeros(self.arms)

    def choose(self, view: SelectionView) -> int:
        draws = self.rng.beta(1 + self.accepted, 1 + self.missed)
        worths = [self.objective.worth(self._chain, float(draws[arm]), view, arm) for arm in view.arms]
        return best_arm(worths, view.current)

    def learn(self, outcome: RoundOutcome) -> None:
        self.accepted[outcome.arm] += outcome.accepted
        self.missed[outcome.arm] += outcome.verified - outcome.accepted


@dataclass(slots=True, kw_only=True)
class Exp3(Selector):
    """Auer, Cesa-Bianchi, Freund and Schapire 2002, figure 1.

    p_i = (1 - gamma) w_i / sum w + gamma / K; after gain x of arm i: w_i *= exp(gamma / K * x / p_i). Weights are kept
    as logarithms. The gain is the round's share of the best possible tokens a second: its seconds are known for each
    arm, so that E[N / T] = E[N] / T.
    """

    arms: int
    rng: np.random.Generator
    gamma: float = 0.15
    reward: Reward = field(default_factory=BlockEfficiency)
    objective: Objective = field(default_factory=Throughput)
    log_weights: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        require_arms(self.arms)
        if not 0 < self.gamma <= 1:
            raise InvalidArgument("must be above 0, at most 1", field="exp3.gamma")
        self.log_weights = np.zeros(self.arms)

    @property
    def chances(self) -> np.ndarray:
        """Chances of being chosen, [arms]."""
        weights = np.exp(self.log_weights - self.log_weights.max())
        chances: np.ndarray = (1 - self.gamma) * weights / weights.sum() + self.gamma / self.arms
        return chances

    def choose(self, view: SelectionView) -> int:
        del view
        return int(self.rng.choice(self.arms, p=self.chances))

    def learn(self, outcome: RoundOutcome) -> None:
        """Learn from the round that has ended, before the next choice, while the chances are those of this one."""
        view, reward = outcome.view, self.reward.of(outcome)
        best = max(self.objective.worth(self.reward, 1.0, view, arm) for arm in view.arms)
        gain = self.objective.worth(self.reward, reward, view, outcome.arm) / best  # in [0, 1]
        self.log_weights[outcome.arm] += self.gamma / self.arms * gain / self.chances[outcome.arm]


@dataclass(slots=True, kw_only=True)
class SequentialHalving(Selector):
    """Karnin, Koren and Somekh 2013, algorithm 1.

    ceil(log2 K) phases, in each of which every arm that is left is played max(1, floor(budget / (arms left * phases)))
    times; then ceil(arms left / 2) stay. The last one is kept.

    An arm's rounds of a phase come one after the other: as few switches as phases have arms. A phase is decided by its
    own rounds, at the prices of its end without switches, since the arm is to be kept.
    """

    arms: int
    budget: int = 32
    reward: Reward = field(default_factory=BlockEfficiency)
    objective: Objective = field(default_factory=lambda: Throughput(stay_rounds=math.inf))
    left: list[int] = field(init=False)
    rewards: dict[int, list[float]] = field(init=False)

    def __post_init__(self) -> None:
        require_arms(self.arms)
        if self.budget < 1:
            raise InvalidArgument("must be 1 round or more", field="halving.budget")
        self.left = list(range(self.arms))
        self.rewards = {arm: [] for arm in self.left}

    @property
    def rounds_each(self) -> int:
        """Rounds of this phase for every arm that is left."""
        return max(1, self.budget // (len(self.left) * max(1, math.ceil(math.log2(self.arms)))))

    def choose(self, view: SelectionView) -> int:
        del view
        return next((arm for arm in self.left if len(self.rewards[arm]) < self.rounds_each), self.left[0])

    def learn(self, outcome: RoundOutcome) -> None:
        if len(self.left) == 1 or outcome.arm not in self.left:  # the last round of an arm that is out
            return
        self.rewards[outcome.arm].append(self.reward.of(outcome))
        if any(len(self.rewards[arm]) < self.rounds_each for arm in self.left):
            return

        def worth(arm: int) -> float:
            mean = sum(self.rewards[arm]) / len(self.rewards[arm])
            return self.objective.worth(self.reward, mean, outcome.view, arm)

        self.left = sorted(self.left, key=worth, reverse=True)[: math.ceil(len(self.left) / 2)]
        self.rewards = {arm: [] for arm in self.left}
