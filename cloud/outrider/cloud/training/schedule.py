"""The learning rate's course over a budget of steps or of minutes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True)
class Budget(ABC):
    """How long to train: exactly one of `steps` and `minutes`; the subclass shapes the learning rate."""

    steps: int | None
    minutes: float | None
    warm_up_steps: int

    def spent(self, step: int, elapsed_s: float) -> float:
        """Share of the budget used before optimizer step `step` (from 0): 1 or more means it is over."""
        if self.minutes is not None:
            return elapsed_s / (60 * self.minutes)
        return step / (self.steps or 1)

    def rate(self, step: int, elapsed_s: float) -> float:
        """Factor of the learning rates at that step: linear warm-up, and what `fall` leaves."""
        warm = (step + 1) / (self.warm_up_steps + 1)
        return max(0.0, min(1.0, warm, self.fall(self.spent(step, elapsed_s))))

    @abstractmethod
    def fall(self, spent: float) -> float:
        """What is left of the peak when a share `spent` of the budget is used."""


@dataclass(frozen=True)
class LinearBudget(Budget):
    """Constant, then linear to zero over the last `decay_fraction`."""

    decay_fraction: float

    def fall(self, spent: float) -> float:
        """Above 1 before the decay begins."""
        return (1 - spent) / self.decay_fraction if self.decay_fraction else 1.0


@dataclass(frozen=True)
class CosineBudget(Budget):
    """Half a cosine from the peak to zero (Loshchilov and Hutter 2017, equation 5, without restarts)."""

    def fall(self, spent: float) -> float:
        """Between 1 and 0."""
        return 0.5 * (1 + math.cos(math.pi * min(1.0, spent)))
