"""Upper confidence bounds: MetaSD's, and two that forget."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.proto.policy.selection.arms import RoundOutcome, SelectionView, Selector, best_arm, require_arms
from outrider.proto.policy.selection.objective import Objective, Throughput
from outrider.proto.policy.selection.rewards import BlockDivergence, Reward


@dataclass(slots=True, kw_only=True)
class _Ucb(Selector):
    """Every arm once, then the arm whose worth at its upper bound is the highest; bounds are the subclass's."""

    arms: int
    reward: Reward = field(default_factory=BlockDivergence)
    objective: Objective = field(default_factory=Throughput)
    pulls: list[float] = field(init=False)
    sums: list[float] = field(init=False)

    def __post_init__(self) -> None:
        require_arms(self.arms)
        self.pulls, self.sums = [0.0] * self.arms, [0.0] * self.arms

    def choose(self, view: SelectionView) -> int:
        """The arm of the round that begins."""
        if 0.0 in self.pulls:
            return self.pulls.index(0.0)
        bounds = self.bounds()
        return best_arm([self.objective.worth(self.reward, bounds[arm], view, arm) for arm in view.arms], view.current)

    def bounds(self) -> Sequence[float]:
        """[arms] the most that each arm's mean reward may plausibly be."""
        raise NotImplementedError

    def learn(self, outcome: RoundOutcome) -> None:
        """What the round gave."""
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
        """[arms] the most that each arm's mean reward may plausibly be."""
        return self._bounds(2 * math.log(sum(self.pulls)), self.strength)


@dataclass(slots=True, kw_only=True)
class DiscountedUcb(_Ucb):
    """Discounted UCB (Garivier and Moulines 2011, section 2.1).

    mean_i + 2 B sqrt(xi ln n_t / N_t(i)), B = 1, where every count and sum fades by `discount` in each round, also
    those of arms that are not played. Their theorem has xi above 1/2; with so short a memory that explores for ever,
    and rewards this little scattered need far less.
    """

    discount: float = 0.97
    xi: float = 0.005

    def bounds(self) -> Sequence[float]:
        """[arms] the most that each arm's mean reward may plausibly be."""
        return self._bounds(self.xi * math.log(max(1.0, sum(self.pulls))), 2.0)

    def learn(self, outcome: RoundOutcome) -> None:
        """What the round gave."""
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
        """[arms] the most that each arm's mean reward may plausibly be."""
        return self._bounds(self.xi * math.log(len(self.newest)), 1.0)

    def learn(self, outcome: RoundOutcome) -> None:
        """What the round gave."""
        _Ucb.learn(self, outcome)
        self.newest.append((outcome.arm, self.reward.of(outcome)))
        if len(self.newest) > self.window:
            arm, reward = self.newest.popleft()
            self.pulls[arm] -= 1
            self.sums[arm] -= reward
