"""A clock that stands still while anything happens, and then moves on to what happens next."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class VirtualClock:
    """Events in the order of their times; those of one time in the order in which they were scheduled.

    Attributes:
        now: seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Let `event` happen at `time`, which is not before now."""
        heapq.heappush(self._events, (time, next(self._order), event))

    def advance(self) -> None:
        """Let the next event happen.

        Raises:
            RuntimeError: nothing will ever happen again.
        """
        if not self._events:
            raise RuntimeError(f"nothing will ever happen again after {self.now:.3f} s")
        self.now, _, event = heapq.heappop(self._events)
        event()
