"""An orderly end on SIGTERM, which a stopped job gets, and on Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from outrider.deploy.process.end_watch import WATCH, stays_ignored

if TYPE_CHECKING:
    import asyncio


def set_when_asked_to_end() -> asyncio.Event:
    """Return an event that SIGINT, SIGTERM and a closed terminal set from now on; the caller ends in order then.

    A server calls it before it says that it serves.
    """
    import asyncio  # here, since every command imports this module, and `outrider --help` is to be quick

    stop = asyncio.Event()
    WATCH.leave_to_command()
    on_signals(stop.set, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return stop


def on_signals(act: Callable[[], object], *numbers: int) -> None:
    """Call `act` in the running event loop at each of these signals, except one that stays ignored.

    The loop's own way to do so would take the signals from `EndWatch`.
    """
    import asyncio

    loop = asyncio.get_running_loop()

    def tell(*_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(act)

    for number in numbers:
        if not stays_ignored(number):
            signal.signal(number, tell)


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Make a folder for the `with` block, which is also removed where a signal ends the process in the middle."""
    import shutil
    import tempfile

    with tempfile.TemporaryDirectory(prefix=prefix) as folder:
        WATCH.at_end(lambda: shutil.rmtree(folder, ignore_errors=True))
        yield Path(folder)


@contextmanager
def handlers_restored() -> Iterator[None]:
    """Restore the handlers of signals after the `with` block, which may not be all of the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopAtStep:
    """Signals that end work between two of its steps.

    Before the first step there is nothing to keep, so SIGTERM and Ctrl-C end the work at once. Later they only make
    `stopping` true, for the work to end itself.
    """

    def __init__(self) -> None:
        self._stopping = False
        self._has_stepped = False

    def stopping(self) -> bool:
        return self._stopping

    def stepped(self, _: int) -> None:
        self._has_stepped = True
        WATCH.leave_to_command()

    @contextmanager
    def listening(self) -> Iterator[StopAtStep]:
        with handlers_restored():
            if threading.current_thread() is threading.main_thread():  # no other one can
                for number in (signal.SIGTERM, signal.SIGINT):
                    if not stays_ignored(number):
                        signal.signal(number, self._take)
            yield self

    def _take(self, _number: int, _frame: FrameType | None) -> None:
        if self._has_stepped:
            self._stopping = True
        else:
            raise KeyboardInterrupt


def has_terminal() -> bool:
    """Return whether a terminal controls this process, as one does that was started in it, until it is closed."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
