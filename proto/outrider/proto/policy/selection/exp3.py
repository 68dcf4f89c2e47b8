"""EXP3: weights that grow with each arm's gains, for rewards that follow no law."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from outrider.proto.errors import InvalidArgument
from outrider.proto.policy.selection.arms import RoundOutcome, SelectionView, Selector, require_arms
from outrider.proto.policy.selection.objective import Objective, Throughput, share_of_best
from outrider.proto.policy.selection.rewards import BlockEfficiency, Reward


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
        """[arms] of being chosen."""
        weights = np.exp(self.log_weights - self.log_weights.max())
        return (1 - self.gamma) * weights / weights.sum() + self.gamma / self.arms

    def choose(self, view: SelectionView) -> int:
        """The arm of the round that begins."""
        del view
        return int(self.rng.choice(self.arms, p=self.chances))

    def learn(self, outcome: RoundOutcome) -> None:
        """What the round gave; must be told before the next choice, as the chances are those of this one."""
        reward = self.reward.of(outcome)
        gain = share_of_best(self.objective, self.reward, reward, outcome.view, outcome.arm)
        self.log_weights[outcome.arm] += self.gamma / self.arms * gain / self.chances[outcome.arm]
