"""What a person sees while a drafter trains: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from outrider.cloud.training.acceptance import Acceptance

SECONDS_BETWEEN_LINES = 15.0


class Reporter(Protocol):
    """Somewhere to say how a stage goes."""

    def stage(self, name: str) -> None:
        """A new stage begins."""

    def advance(self, share: float, text: str) -> None:
        """`share` (0 to 1) of the stage is done; `text` is its figures."""

    def say(self, text: str) -> None:
        """Something worth keeping."""

    def __enter__(self) -> Reporter: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class BarReporter:
    """A rich progress bar."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[figures]}"),
        )
        self._task = self._progress.add_task("starting", total=1.0, figures="")

    def stage(self, name: str) -> None:
        """A new stage begins."""
        self._progress.reset(self._task, description=name, total=1.0, figures="")

    def advance(self, share: float, text: str) -> None:
        """Show how far the stage is."""
        self._progress.update(self._task, completed=min(share, 1.0), figures=text)

    def say(self, text: str) -> None:
        """Print for good."""
        self._progress.console.print(text, highlight=False, markup=False)

    def __enter__(self) -> BarReporter:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


class LineReporter:
    """Plain lines, at most one every `SECONDS_BETWEEN_LINES` of a stage's progress."""

    def __init__(self) -> None:
        self._name = ""
        self._last = 0.0

    def stage(self, name: str) -> None:
        """A new stage begins."""
        self._name = name
        self._last = time.monotonic()
        self.say(name)

    def advance(self, share: float, text: str) -> None:
        """Show how far the stage is."""
        now = time.monotonic()
        if now - self._last >= SECONDS_BETWEEN_LINES:
            self._last = now
            self.say(f"{self._name} {share:.1%} {text}")

    def say(self, text: str) -> None:
        """Print for good."""
        print(text, flush=True)  # noqa: T201

    def __enter__(self) -> LineReporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def reporter_for_stdout() -> Reporter:
    """A bar if a person watches, lines if a file does."""
    return BarReporter() if Console(file=sys.stdout).is_terminal else LineReporter()


def duration(seconds: float) -> str:
    """`75` is `1:15`."""
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    return f"{minutes}:{rest:02d}"


def acceptance_table(figures: Mapping[str, Acceptance]) -> str:
    """One line a text, and the mean of each kind."""
    lines = [
        f"  {name:<20} T=0 {a.greedy:.3f}  T=1 {a.sampled:.3f}  1-TV {a.overlap:.3f}  KL {a.kl:.3f}"
        f"  ({a.positions} positions)"
        for name, a in figures.items()
    ]
    return "\n".join(lines)
