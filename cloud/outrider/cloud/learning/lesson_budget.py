"""A budget of lessons: CPU time in proportion to the time of the steps that they come from."""

from __future__ import annotations

import math

from outrider.cloud.learning.cpu_share import CpuShare

MAX_SHARE = 0.015  # of the steps' time, below the 2 % that are promised
BURST_S = 2.0  # of steps, whose share can be saved up
MEMORY_S = 10.0  # over which cost and rates are measured
BUSY_S = 1.0  # that steps are taken to have filled before the first
ROW_S, ROWS = 1e-4, 10.0  # cost of a row before it is known, and the rows by which that counts


class LessonBudget:
    """A bucket of CPU time that steps fill and lessons empty, and the rate of rows that it pays for.

    The bucket bounds the cost whatever a row costs: nothing is begun in debt. The rate keeps it from getting there, so
    that it is the rule of inclusion that chooses among rows. Both rest on earlier steps alone.
    """

    def __init__(self, share: float, now: float) -> None:
        """Let lessons cost `share` of the steps' time, from time `now` in seconds on."""
        self._share = share
        self.steps_s = self.spent_s = 0.0
        self._bucket = CpuShare(share, lambda: self.steps_s, lambda: self.spent_s, burst_s=share * BURST_S)
        self._rows = 0
        self._at, self._began = now, now - BUSY_S
        self._noted = 0, 0.0, 0.0
        self._recent_rows = self._recent_spent_s = 0.0
        self._recent_steps_s = BUSY_S

    def step(self, step_s: float) -> bool:
        """Add a step that took `step_s` seconds, and return whether lessons may be taken from it.

        On an accelerator, the CPU's part says little of what a step costs; the wait for it belongs to the step.
        """
        self.steps_s += step_s
        return self._bucket.wait_s() == 0

    def spend(self, cpu_s: float, rows: int = 0) -> None:
        """Take off what lessons have cost, `cpu_s` seconds of CPU time, and what for: `rows` that were kept."""
        self.spent_s += cpu_s
        self._rows += rows

    def rows_s(self, now: float) -> float:
        """Return the rows a second that the steps of late pay for, at time `now` in seconds."""
        fade = math.exp(-max(0.0, now - self._at) / MEMORY_S)
        rows, spent_s, steps_s = self._noted
        self._recent_rows = self._recent_rows * fade + self._rows - rows
        self._recent_spent_s = self._recent_spent_s * fade + self.spent_s - spent_s
        self._recent_steps_s = self._recent_steps_s * fade + self.steps_s - steps_s
        self._noted, self._at = (self._rows, self.spent_s, self.steps_s), max(now, self._at)
        known_s = MEMORY_S * -math.expm1(-(self._at - self._began) / MEMORY_S)
        rows_for_a_second = (self._recent_rows + ROWS) / (self._recent_spent_s + ROWS * ROW_S)
        return self._share * self._recent_steps_s / known_s * rows_for_a_second
