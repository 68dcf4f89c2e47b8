"""The learning rate's course over a budget of steps or of minutes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """How long to train: exactly one of `steps` and `minutes`; the rest shapes the learning rate."""

    steps: int | None
    minutes: float | None
    warm_up_steps: int
    decay_fraction: float

    def spent(self, step: int, elapsed_s: float) -> float:
        """Share of the budget used before optimizer step `step` (from 0): 1 or more means it is over."""
        if self.minutes is not None:
            return elapsed_s / (60 * self.minutes)
        return step / (self.steps or 1)

    def rate(self, step: int, elapsed_s: float) -> float:
        """Factor of the learning rates at that step: linear warm-up, constant, linear decay to zero."""
        warm = (step + 1) / (self.warm_up_steps + 1)
        left = 1 - self.spent(step, elapsed_s)
        decay = left / self.decay_fraction if self.decay_fraction else 1.0
        return max(0.0, min(1.0, warm, decay))
