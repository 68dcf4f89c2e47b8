"""Sequential Halving: a budget of trials, after each phase of which the worse half is dropped."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from outrider.proto.errors import InvalidArgument
from outrider.proto.policy.selection.arms import RoundOutcome, SelectionView, Selector, require_arms
from outrider.proto.policy.selection.objective import Objective, Throughput
from outrider.proto.policy.selection.rewards import BlockEfficiency, Reward


@dataclass(slots=True, kw_only=True)
class SequentialHalving(Selector):
    """Karnin, Koren and Somekh 2013, algorithm 1.

    ceil(log2 K) phases, in each of which every arm that is left is played max(1, floor(budget / (arms left * phases)))
    times; then ceil(arms left / 2) stay. The last one is kept.

    An arm's rounds of a phase come one after the other: as few switches as phases have arms. A phase is judged by its
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
        """That every arm that is left is played in this phase."""
        return max(1, self.budget // (len(self.left) * max(1, math.ceil(math.log2(self.arms)))))

    def choose(self, view: SelectionView) -> int:
        """The arm of the round that begins."""
        del view
        return next((arm for arm in self.left if len(self.rewards[arm]) < self.rounds_each), self.left[0])

    def learn(self, outcome: RoundOutcome) -> None:
        """What the round gave."""
        if len(self.left) == 1:
            return
        self.rewards[outcome.arm].append(self.reward.of(outcome))
        if any(len(self.rewards[arm]) < self.rounds_each for arm in self.left):
            return

        def worth(arm: int) -> float:
            mean = sum(self.rewards[arm]) / len(self.rewards[arm])
            return self.objective.worth(self.reward, mean, outcome.view, arm)

        self.left = sorted(self.left, key=worth, reverse=True)[: math.ceil(len(self.left) / 2)]
        self.rewards = {arm: [] for arm in self.left}
