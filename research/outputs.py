"""Outputs of results, checked before the work, and progress of the work."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console, RenderableType
from rich.progress import Progress

from outrider.bench.record import check_file, save

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

LINE_S = 30.0  # between lines of progress in a log

Made = TypeVar("Made", bound="DataclassInstance")


def hand_out(json: Path | None, make: Callable[[], Made], table: Callable[[Made], RenderableType]) -> None:
    """Print the result of `make` as a table of 100 characters, and write it to `json` if that is given.

    Raises:
        ConfigError: the file cannot be written; raised before the work if possible.
    """
    if json:
        check_file(json, "json")
    made = make()
    Console(width=100, highlight=False).print(table(made))
    if json:
        save(made, json)


@contextmanager
def progress(console: Console, doing: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar on a terminal, or a line now and then in a log.

    Yields:
        a function to call after each of `total` parts of the work.
    """
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
