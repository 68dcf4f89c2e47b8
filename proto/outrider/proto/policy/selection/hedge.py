"""Hedge: an expert is drawn by its weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from outrider.proto.policy.selection.arms import RoundOutcome, SelectionView, Selector
from outrider.proto.policy.selection.experts import FixedShare


@dataclass(slots=True)
class Hedge(Selector):
    """Freund and Schapire 1997, figure 2: p_i = w_i / sum w, with full information from all that read along.

    Drawing guards against a text that is written to mislead a selector; `Leader` spares what it costs.
    """

    reads_along: ClassVar[bool] = True
    experts: FixedShare
    rng: np.random.Generator

    def choose(self, view: SelectionView) -> int:
        """The arm of the round that begins."""
        del view
        chances = np.exp(self.experts.log_weights)
        return int(self.rng.choice(self.experts.arms, p=chances / chances.sum()))

    def score(self, view: SelectionView, chosen: int) -> tuple[int, ...]:
        """All idle arms, the least read first."""
        idle = [arm for arm in view.arms if arm != chosen and view.behind[arm]]
        return tuple(sorted(idle, key=lambda arm: -view.behind[arm]))

    def learn(self, outcome: RoundOutcome) -> None:
        """What the round gave."""
        self.experts.learn(outcome)
