"""Base of several selectors, and the one that draws blindly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.proto.errors import InvalidArgument
from outrider.proto.policy.selection import RoundOutcome, SelectionView, Selector


def require_arms(arms: int) -> None:
    """Refuse a selector without arms."""
    if arms < 1:
        raise InvalidArgument("must be 1 or more drafters", field="selector.arms")


def best_arm(values: Sequence[float], current: int | None) -> int:
    """Return the arm of the highest value; of equal ones the current arm, which costs no switch, else the first."""
    best = max(values)
    if current is not None and values[current] == best:
        return current
    return values.index(best)


def idle_by_uncomputed_tokens(view: SelectionView, chosen: int) -> tuple[int, ...]:
    """Return the idle arms that can catch up, the one with the most uncomputed tokens first."""
    idle = [arm for arm in view.arms if arm != chosen and view.num_uncomputed_tokens[arm]]
    return tuple(sorted(idle, key=lambda arm: -view.num_uncomputed_tokens[arm]))


@dataclass(slots=True)
class RandomSelector(Selector):
    """Draw a drafter uniformly for each round."""

    arms: int
    rng: np.random.Generator

    def __post_init__(self) -> None:
        require_arms(self.arms)

    def choose(self, view: SelectionView) -> int:
        """Choose the arm of the round that begins."""
        del view
        return int(self.rng.integers(self.arms))

    def learn(self, outcome: RoundOutcome) -> None:
        """Nothing to learn."""
