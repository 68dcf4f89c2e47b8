"""The learning rate over a budget of steps or minutes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True)
class Budget(ABC):
    """A limit on training by `steps` or `minutes`, one of them; the subclass shapes the learning rate."""

    steps: int | None
    minutes: float | None
    warm_up_steps: int

    def spent(self, step: int, elapsed_s: float) -> float:
        """Return the share of the budget used before optimizer step `step` (from 0); 1 or more: it is over."""
        if self.minutes is not None:
            return elapsed_s / (60 * self.minutes)
        return step / (self.steps or 1)

    def rate(self, step: int, elapsed_s: float) -> float:
        """Return the factor of the learning rates at `step`: linear warm-up, then `fall`."""
        warm = (step + 1) / (self.warm_up_steps + 1)
        return max(0.0, min(1.0, warm, self.fall(self.spent(step, elapsed_s))))

    @abstractmethod
    def fall(self, spent: float) -> float:
        """Return the factor of the peak when a share `spent` of the budget is used."""


@dataclass(frozen=True)
class LinearBudget(Budget):
    """Constant, then linear to zero over the last `decay_fraction`."""

    decay_fraction: float

    def fall(self, spent: float) -> float:
        """Return the factor, which is above 1 before the decay begins."""
        return (1 - spent) / self.decay_fraction if self.decay_fraction else 1.0


@dataclass(frozen=True)
class CosineBudget(Budget):
    """Half a cosine from the peak to zero (Loshchilov and Hutter 2017, equation 5, without restarts)."""

    def fall(self, spent: float) -> float:
        """Return the factor, between 1 and 0."""
        return 0.5 * (1 + math.cos(math.pi * min(1.0, spent)))
