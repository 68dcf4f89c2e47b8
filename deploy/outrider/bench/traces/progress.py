"""How far a long piece of work is: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress

LINE_S = 30.0


@contextmanager
def shown(console: Console, doing: str, total: int) -> Iterator[Callable[[], None]]:
    """Gives what is to be called after each of `total` parts of the work."""
    if console.is_terminal:
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task(doing, total=total)
            yield lambda: bar.advance(task)
        return
    done, said_at = itertools.count(1), time.monotonic()

    def advance() -> None:
        nonlocal said_at
        part, now = next(done), time.monotonic()
        if now - said_at >= LINE_S and part < total:
            said_at = now
            console.print(f"{doing}: {part} of {total}", style="dim")

    yield advance
