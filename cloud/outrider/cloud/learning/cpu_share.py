"""A limit on the processor time that training takes from those who serve."""

from __future__ import annotations

from collections.abc import Callable

PERIOD_S = 10.0


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
