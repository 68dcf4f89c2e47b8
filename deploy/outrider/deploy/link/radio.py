"""A radio that sleeps when nothing moves, and takes its time to wake."""

from __future__ import annotations

import math
import random

# Measured after 10 s idle on LTE and 5G by probes of the radio's states (Narayanan et al., SIGCOMM 2021).
WAKE_S = (0.3, 1.0)


class Radio:
    """The radio of one link, which is asleep at first.

    Args:
        idle_s: silence in both directions after which it sleeps, in seconds.
        seed: seed of the times that it takes to wake, uniform in `WAKE_S`.
    """

    def __init__(self, idle_s: float, seed: int = 0) -> None:
        self._idle_s = idle_s
        self._random = random.Random(f"radio {seed}")
        self._used_at = self._awake_at = -math.inf

    def use(self, now: float) -> float:
        """Return the seconds that what comes at `now`, in either direction, waits for the radio to be awake."""
        if now - self._used_at > self._idle_s:
            self._awake_at = now + self._random.uniform(*WAKE_S)
        self._used_at = max(now, self._awake_at)
        return max(0.0, self._awake_at - now)
