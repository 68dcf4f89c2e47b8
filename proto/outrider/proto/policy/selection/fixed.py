"""The two selectors that learn nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outrider.proto.policy.selection.arms import RoundOutcome, SelectionView, Selector, require_arms


@dataclass(slots=True)
class StaticSelector(Selector):
    """Always the same drafter."""

    arm: int = 0

    def choose(self, view: SelectionView) -> int:
        """The arm of the round that begins."""
        del view
        return self.arm

    def learn(self, outcome: RoundOutcome) -> None:
        """Nothing to learn."""


@dataclass(slots=True)
class RandomSelector(Selector):
    """Every drafter alike, anew in each round."""

    arms: int
    rng: np.random.Generator

    def __post_init__(self) -> None:
        require_arms(self.arms)

    def choose(self, view: SelectionView) -> int:
        """The arm of the round that begins."""
        del view
        return int(self.rng.integers(self.arms))

    def learn(self, outcome: RoundOutcome) -> None:
        """Nothing to learn."""
