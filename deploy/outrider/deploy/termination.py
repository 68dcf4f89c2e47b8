"""An orderly end on SIGTERM, which a stopped job gets, and on Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

STATUS = 128 + signal.SIGTERM

Handler = Callable[[int, FrameType | None], None]


class Terminated(KeyboardInterrupt):
    """SIGTERM, raised to unwind like Ctrl-C."""


@contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """Raise `Terminated` in the main thread at the first SIGTERM inside; ignore later ones."""

    def raise_once(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise Terminated

    with _handled(raise_once, signal.SIGTERM):
        yield


async def until_stopped(stop: asyncio.Event | None = None) -> None:
    """Wait for SIGINT, SIGTERM or `stop`."""
    import asyncio  # here, since every command imports this module, and `outrider --help` is to be quick

    stop = stop or asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()


class StopAtStep:
    """Signals that end work between two of its steps.

    Before the first step there is nothing to keep, so SIGTERM and Ctrl-C end the work at once. Later they only make
    `stopping` true, for the work to end itself.
    """

    def __init__(self) -> None:
        self._stopping = False
        self._has_stepped = False

    def stopping(self) -> bool:
        """Return whether to end now."""
        return self._stopping

    def stepped(self, _: int) -> None:
        """Note that a step is done."""
        self._has_stepped = True

    @contextmanager
    def listening(self) -> Iterator[StopAtStep]:
        """Take the signals inside the `with` block."""
        with _handled(self._take, signal.SIGTERM, signal.SIGINT):
            yield self

    def _take(self, number: int, _: FrameType | None) -> None:
        if self._has_stepped:
            self._stopping = True
        else:
            raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


@contextmanager
def _handled(handler: Handler, *numbers: int) -> Iterator[None]:
    """Handle signals inside the `with` block; only the main thread can, so elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)
