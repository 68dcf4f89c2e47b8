"""SIGTERM, as of a job that is stopped: an orderly end instead of a sudden one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STATUS = 128 + signal.SIGTERM

Handler = Callable[[int, FrameType | None], None]


class Terminated(KeyboardInterrupt):
    """SIGTERM came; unwinds like Ctrl-C."""


@contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """While inside, the first SIGTERM raises `Terminated` in the main thread; later ones do not disturb the end."""

    def raise_once(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise Terminated

    with _handled(raise_once, signal.SIGTERM):
        yield


class StopAtStep:
    """Lets work that goes in steps end between two of them.

    Before the first step there is nothing to keep: SIGTERM and Ctrl-C end it at once. From then on they make `told`
    true, and the work ends itself.
    """

    def __init__(self) -> None:
        self._told = False
        self._has_stepped = False

    def told(self) -> bool:
        """Whether to end now."""
        return self._told

    def stepped(self, _: int) -> None:
        """A step is done."""
        self._has_stepped = True

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While inside, the signals are taken so."""
        with _handled(self._take, signal.SIGTERM, signal.SIGINT):
            yield

    def _take(self, number: int, _: FrameType | None) -> None:
        if self._has_stepped:
            self._told = True
        else:
            raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


@contextmanager
def _handled(handler: Handler, *numbers: int) -> Iterator[None]:
    """Signals can only be caught in the main thread; elsewhere whoever has that thread takes them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)
