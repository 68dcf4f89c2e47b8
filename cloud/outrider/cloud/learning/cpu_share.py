"""Limits on the processor time that learning takes from those who serve."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping

PERIOD_S = 10.0  # over which a share is measured
LOOK_S = 2.0  # between looks at the load
WAITING, OPEN, RESTING = "waiting for idle time", "training", "nothing to learn from"
MAX_SHARE = 0.015  # of the steps' time, below the 2 % that are promised
BURST_S = 2.0  # of steps, whose share can be saved up
MEMORY_S = 10.0  # over which cost and rates are measured
BUSY_S = 1.0  # that steps are taken to have filled before the first
ROW_S, ROWS = 1e-4, 10.0  # cost of a row before it is known, and the rows by which that counts

log = logging.getLogger(__name__)


class CpuShare:
    """A share of one core's time, as a budget that fills while the clock runs; one thread asks for it.

    Args:
        share: of one core, 0 to 1.
        clock: seconds that pass.
        cpu: seconds of processor time that this process has used.
        burst_s: seconds of processor time that an idle trainer may save up.

    Attributes:
        limit: share of one core.
        lately: share that was used in the last whole period of `PERIOD_S`; 0 before the first one.
    """

    def __init__(
        self, share: float, clock: Callable[[], float], cpu: Callable[[], float], *, burst_s: float = 10.0
    ) -> None:
        self.limit, self._clock, self._cpu, self._burst_s = share, clock, cpu, burst_s
        self._since, self._used = clock(), cpu()
        self._saved_s = 0.0
        self.lately = 0.0
        self._period = self._since, self._used

    def wait_s(self) -> float:
        """Return how many seconds to rest before the next step; 0: none."""
        now, used = self._clock(), self._cpu()
        earned = (now - self._since) * self.limit
        self._saved_s = min(self._burst_s, self._saved_s + earned) - (used - self._used)
        self._since, self._used = now, used
        began, used_before = self._period
        if now - began >= PERIOD_S:
            self.lately = (used - used_before) / (now - began)
            self._period = now, used
        return 0.0 if self._saved_s >= 0 else -self._saved_s / max(self.limit, 1e-3)


class IdleGate:
    """Leave for one training step after the other.

    Training waits while verifiers take more than a share of the machine, but not for ever: after `patience_s` of it one
    step is made whatever they do, so a fleet that never idles is still learned from, a little.

    Args:
        cpu_s: returns the processor time that each verifier on this machine has used so far, in seconds by name.
        clock: seconds that pass.
        cores: processor cores of this machine.
        max_load: share of them that verifiers may take, 0 to 1; at 1 training never waits.
        patience_s: seconds of waiting after which a step is made.

    Attributes:
        load: share of the cores that verifiers took lately, 0 to 1; None: not known yet.
        watched: verifiers that said what they use.
        state: what training does at present, in a few words.
        hurried: steps made though there was no idle time.
    """

    def __init__(
        self,
        cpu_s: Callable[[], Mapping[str, float]],
        clock: Callable[[], float],
        cores: int,
        max_load: float,
        patience_s: float,
    ) -> None:
        self._cpu_s, self._clock = cpu_s, clock
        self._cores, self._max_load, self._patience_s = cores, max_load, patience_s
        self._used: Mapping[str, float] | None = None
        self._looked_at = 0.0
        self._waiting_since: float | None = None
        self.load: float | None = None
        self.watched = 0
        self.state = RESTING
        self.hurried = 0

    @property
    def waited_s(self) -> float:
        """Seconds that the next step has waited for."""
        return 0.0 if self._waiting_since is None else self._clock() - self._waiting_since

    def rest(self) -> None:
        """Note that there is nothing to learn from, so nothing waits."""
        self.state, self._waiting_since = RESTING, None

    def opens(self) -> bool:
        """Return whether a step may be made now; ask again in a while if not."""
        if self._max_load < 1:
            self._look()
        if self._max_load >= 1 or (self.load is not None and self.load <= self._max_load):
            self.state, self._waiting_since = OPEN, None
            return True
        now = self._clock()
        if self._waiting_since is None:
            self._waiting_since = now
        self.state = WAITING
        if now - self._waiting_since < self._patience_s:
            return False
        self._waiting_since = now
        self.hurried += 1
        log.warning("no idle time for %g s, as verifiers take %.0f %% of it", self._patience_s, 100 * (self.load or 0))
        return True

    def _look(self) -> None:
        """Measure the load since the last look, if that was long enough ago."""
        now = self._clock()
        if self._used is not None and now - self._looked_at < LOOK_S:
            return
        used, before = self._cpu_s(), self._used
        if before is not None:
            # One that has restarted counts from there, and one that is new from now.
            spent = sum(
                seconds - before[name] if seconds >= before[name] else seconds
                for name, seconds in used.items()
                if name in before
            )
            self.load = min(1.0, spent / ((now - self._looked_at) * self._cores))
        self._used, self._looked_at, self.watched = used, now, len(used)


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
