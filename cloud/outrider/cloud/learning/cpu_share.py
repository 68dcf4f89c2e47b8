"""A limit on the processor time that training takes from those who serve."""

from __future__ import annotations

from collections.abc import Callable


class CpuShare:
    """A share of one core's time, as a budget that fills while the clock runs.

    Args:
        share: of one core, 0 to 1.
        clock: seconds that pass.
        cpu: seconds of processor time that this process has used.
        burst_s: seconds of processor time that an idle trainer may save up.
    """

    def __init__(
        self, share: float, clock: Callable[[], float], cpu: Callable[[], float], *, burst_s: float = 10.0
    ) -> None:
        self._share, self._clock, self._cpu, self._burst_s = share, clock, cpu, burst_s
        self._since, self._used = clock(), cpu()
        self._saved_s = 0.0

    def wait_s(self) -> float:
        """Return how many seconds to rest before the next step; 0: none."""
        now, used = self._clock(), self._cpu()
        earned = (now - self._since) * self._share
        self._saved_s = min(self._burst_s, self._saved_s + earned) - (used - self._used)
        self._since, self._used = now, used
        return 0.0 if self._saved_s >= 0 else -self._saved_s / max(self._share, 1e-3)
