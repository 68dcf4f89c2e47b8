"""A watch over an event loop from a thread beside it: a loop that stands still can tell nobody so by itself.

A call that blocks in a handler stops every stream, the health service and each clean end of the process. Time counts
only as far as the thread could look: where the whole process was stopped, or the machine slept, no loop was late.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Self

LOOK_S = 0.5
HUNG_S = 5.0
LOST_S = 60.0

log = logging.getLogger(__name__)


class Stillness:
    """The time for which something that should go on has stood still."""

    def __init__(self, every_s: float, now: float) -> None:
        """Expect looks about every `every_s` seconds from `now` on."""
        self._every_s = every_s
        self._looked_at = now
        self._beats = -1
        self._seconds = 0.0

    def look(self, beats: int, now: float) -> float:
        """Return the seconds since `beats` last changed, with two periods of looking at most for each look."""
        passed_s = min(now - self._looked_at, 2 * self._every_s)
        self._looked_at = now
        self._seconds = self._seconds + passed_s if beats == self._beats else 0.0
        self._beats = beats
        return self._seconds


class LoopWatch:
    """The watch over one event loop, begun in it; a context manager for as long as it runs.

    Attributes:
        hung: whether the loop stood still at the last look.
    """

    def __init__(
        self,
        name: str,
        on_lost: Callable[[], None],
        show: Callable[[], None] = lambda: None,
        *,
        hung_s: float = HUNG_S,
        lost_s: float = LOST_S,
    ) -> None:
        """Watch the loop of the process `name`.

        Args:
            name: name for the log.
            on_lost: called once, in a thread of its own, when the loop has been hung for `lost_s` seconds.
            show: called in that thread whenever `hung` changes.
            hung_s: time without a turn after which it counts as hung, in seconds.
            lost_s: time after which it is given up, in seconds.
        """
        self.hung = False
        self._name = name
        self._on_lost = on_lost
        self._show = show
        self._hung_s = hung_s
        self._lost_s = lost_s
        self._beats = 0
        self._still = Stillness(LOOK_S, time.monotonic())
        self._ended = threading.Event()
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def begin(self) -> None:
        loop = asyncio.get_running_loop()
        self._beat(loop)
        threading.Thread(
            target=self._run, args=(loop, threading.get_ident()), name="outrider-loop-watch", daemon=True
        ).start()

    def stop(self) -> None:
        self._ended.set()
        if self._timer is not None:
            self._timer.cancel()

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._beats += 1
        self._timer = loop.call_later(LOOK_S, self._beat, loop)

    def _run(self, loop: asyncio.AbstractEventLoop, thread: int) -> None:
        while not self._ended.wait(LOOK_S):
            if not loop.is_running():
                return
            if self.look(time.monotonic(), thread):
                log.critical("the event loop of %s is given up", self._name)
                self._on_lost()
                return

    def look(self, now: float, thread: int) -> bool:
        """Note at `now` whether the loop of `thread` goes on, and return whether it is lost."""
        still_s = self._still.look(self._beats, now)
        if self.hung != (still_s > self._hung_s):
            self.hung = not self.hung
            if self.hung:
                log.critical("the event loop of %s stands still, in:\n%s", self._name, _stack(thread))
            else:
                log.warning("the event loop of %s goes on", self._name)
            self._show()
        return still_s > self._hung_s + self._lost_s


def _stack(thread: int) -> str:
    frame = sys._current_frames().get(thread)
    return "".join(traceback.format_stack(frame)) if frame is not None else "a thread that has ended\n"


def end_process() -> None:
    """End this process at once, as one that has failed: what does not answer would hold up an orderly end."""
    logging.shutdown()
    os._exit(1)
