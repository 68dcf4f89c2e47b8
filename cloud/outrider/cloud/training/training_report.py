"""Progress reports of a training run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from outrider.cloud.training.measured_acceptance import MeanAcceptance

SECONDS_BETWEEN_LINES = 15.0


class Reporter:
    """Plain lines, `SECONDS_BETWEEN_LINES` apart or more within a stage."""

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


class _BarReporter(Reporter):
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("starting", total=1.0, metrics="")

    def stage(self, name: str) -> None:
        self._progress.reset(self._task, description=name, total=1.0, metrics="")

    def advance(self, share: float, text: str) -> None:
        self._progress.update(self._task, completed=min(share, 1.0), metrics=text)

    def say(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, markup=False)


@contextmanager
def reporter_for_stdout() -> Iterator[Reporter]:
    """Report by a bar on a terminal, by lines in a file."""
    if not Console(file=sys.stdout).is_terminal:
        yield Reporter()
        return
    columns = TextColumn("[bold]{task.description}"), BarColumn(), TaskProgressColumn()
    with Progress(*columns, TextColumn("{task.fields[metrics]}")) as progress:
        yield _BarReporter(progress)


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
