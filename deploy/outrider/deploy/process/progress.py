"""Words on standard error about what a command waits for, so that nothing is silent for long.

On a terminal a line says what goes on, at which stage, and for how long already. Elsewhere, as in a log, it is a plain
line, once what goes on has taken two seconds. In a log of JSON objects there is none.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from outrider.proto.plumbing.logs import STAGES, only_json

if TYPE_CHECKING:
    from rich.live import Live

SILENT_S = 2.0
SHOWN_AFTER_S = 0.5  # what is quicker needs no words
LOOKS_A_SECOND = 4.0


def waiting(what: str) -> AbstractContextManager[object]:
    """Say what goes on inside the `with` block, and nothing afterwards."""
    if sys.stderr is None or sys.stderr.closed or only_json():
        return nullcontext()
    return _shown(what) if sys.stderr.isatty() else _logged(what)


@contextmanager
def stage(what: str) -> Iterator[None]:
    """Do what `waiting` does, and leave a line with the time that it took."""
    began = time.monotonic()
    with waiting(what):
        yield
    say(f"{what}: {time.monotonic() - began:.1f} s")


class _Newest(logging.Filter):
    """The newest message of `STAGES`, whose records go on to the log as its level says."""

    words = ""

    def filter(self, record: logging.LogRecord) -> bool:
        """Note a record, and return whether it is logged."""
        self.words = f": {record.getMessage()}"
        return record.levelno >= logging.getLogger().level


@contextmanager
def _noting(newest: _Newest) -> Iterator[None]:
    logger = logging.getLogger(STAGES)
    level = logger.level
    logger.addFilter(newest)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeFilter(newest)


@contextmanager
def _shown(what: str) -> Iterator[None]:
    """Keep a line up to date on a terminal, below whatever is written to standard error meanwhile."""
    began = time.monotonic()
    showing: list[Live] = []
    newest = _Newest()

    def show() -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        def line() -> Text:
            words = f"{what}{newest.words} … {time.monotonic() - began:.0f} s"
            return Text(words, style="dim", no_wrap=True, overflow="ellipsis")

        # Standard output may be a file, whose text has no place on the terminal.
        live = Live(
            get_renderable=line,
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=False,
            refresh_per_second=LOOKS_A_SECOND,
        )
        live.start(refresh=True)
        showing.append(live)

    soon = threading.Timer(SHOWN_AFTER_S, show)
    soon.daemon = True
    soon.start()
    try:
        with _noting(newest):
            yield
    finally:
        soon.cancel()
        soon.join()
        for live in showing:
            live.stop()


@contextmanager
def _logged(what: str) -> Iterator[None]:
    late = threading.Timer(SILENT_S, _say, (f"{what} …",))
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


def say(line: str) -> None:
    """Write a line to standard error, unless that is a log of JSON objects."""
    if not only_json():
        _say(line)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")  # at once, since others may write there too
    sys.stderr.flush()
