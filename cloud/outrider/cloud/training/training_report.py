"""Progress reports of a training run."""

from __future__ import annotations

import time
from collections.abc import Mapping

from outrider.cloud.training.measured_acceptance import MeanAcceptance

SECONDS_BETWEEN_LINES = 15.0


class Reporter:
    """A printer of plain lines, `SECONDS_BETWEEN_LINES` apart or more within a stage."""

    def __init__(self) -> None:
        self._name = ""
        self._last = 0.0

    def stage(self, name: str) -> None:
        """Begin a new stage."""
        self._name = name
        self._last = time.monotonic()
        self.say(name)

    def advance(self, share: float, text: str) -> None:
        """Show that `share` (0 to 1) of the stage is done; `text` has its metrics."""
        now = time.monotonic()
        if now - self._last >= SECONDS_BETWEEN_LINES:
            self._last = now
            self.say(f"{self._name} {share:.1%} {text}")

    def say(self, text: str) -> None:
        """Print text that stays."""
        print(text, flush=True)  # noqa: T201


def duration(seconds: float) -> str:
    """Return `seconds` as minutes and seconds: `1:15` for 75."""
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    return f"{minutes}:{rest:02d}"


def acceptance_table(metrics: Mapping[str, MeanAcceptance]) -> str:
    """Return one line for each text, and for the mean of each kind."""
    lines = [
        f"  {name:<20} T=0 {a.greedy:.3f}  T=1 {a.sampled:.3f}  1-TV {a.overlap:.3f}  KL {a.kl:.3f}"
        f"  ({a.positions} positions)"
        for name, a in metrics.items()
    ]
    return "\n".join(lines)
