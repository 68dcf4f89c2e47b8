"""Thompson sampling: every arm as good as a draw from what is believed of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from outrider.proto.policy.selection.arms import RoundOutcome, SelectionView, Selector, best_arm, require_arms
from outrider.proto.policy.selection.objective import Objective, Throughput
from outrider.proto.policy.selection.rewards import BlockDivergence, Reward


@dataclass(slots=True, kw_only=True)
class Thompson(Selector):
    """Thompson 1933; Agrawal and Goyal 2012, algorithm 1, with Beta(1 + accepted, 1 + missed) for each arm.

    Beta and not Gaussian: a judged draft hits or misses, a Bernoulli trial whose conjugate is the Beta distribution;
    its scatter follows from the counts, where a Gaussian would need a scale for each arm. A round gives as many trials
    as it had judged drafts. The draw is an acceptance, which `BlockDivergence.tokens` turns into E[N].
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
        """The arm of the round that begins."""
        draws = self.rng.beta(1 + self.accepted, 1 + self.missed)
        worths = [self.objective.worth(self._chain, float(draws[arm]), view, arm) for arm in view.arms]
        return best_arm(worths, view.current)

    def learn(self, outcome: RoundOutcome) -> None:
        """What the round gave."""
        self.accepted[outcome.arm] += outcome.accepted
        self.missed[outcome.arm] += outcome.judged - outcome.accepted
