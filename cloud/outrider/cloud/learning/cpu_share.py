"""Limits on the processor time that a trainer takes from those who serve."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

PERIOD_S = 10.0  # over which a share is measured
LOOK_S = 2.0  # between looks at the load
MAX_WAIT_S = 60.0  # for idle time, after which a step is made
WAITING, OPEN, RESTING = "waiting for idle time", "training", "nothing to learn from"

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
    """Permission for one training step after the other, given while the machine is idle enough.

    Training waits while verifiers take more than a share of the machine, but not for ever: after `max_wait_s` of it one
    step is made whatever they do, so a fleet that never idles is still learned from, a little.

    Args:
        cpu_s: returns the processor time in seconds that each verifier of this machine has used, by name.
        clock: seconds that pass.
        cores: processor cores of this machine.
        max_load: share of them that verifiers may take, 0 to 1; at 1 training never waits.
        max_wait_s: seconds of waiting after which a step is made.

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
        max_wait_s: float = MAX_WAIT_S,
    ) -> None:
        self._cpu_s, self._clock = cpu_s, clock
        self._cores, self._max_load, self._max_wait_s = cores, max_load, max_wait_s
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
        if now - self._waiting_since < self._max_wait_s:
            return False
        self._waiting_since = now
        self.hurried += 1
        log.warning("no idle time for %g s, as verifiers take %.0f %% of it", self._max_wait_s, 100 * (self.load or 0))
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
