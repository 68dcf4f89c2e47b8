"""Events that wait for the engine, which takes them between its steps, and drafts before its commits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple

from outrider.proto.types import Branches, Draft, EdgeFrame


class _Event(NamedTuple):
    run: Callable[[], None]
    session: Hashable
    drafts: bool


class Inbox:
    """Events from any thread, in their order, but that drafts may be taken before others, though none of their session.

    Drafts that come while a step runs are of use to its commit: one may be what follows a miss.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        """Wait for whoever takes the events; `ring` is called after each, in the thread that it comes from."""
        self._events: deque[_Event] = deque()
        self._lock = threading.Lock()
        self._ring = ring

    def __len__(self) -> int:
        return len(self._events)

    def post(self, run: Callable[[], None], session: Hashable = None, frame: EdgeFrame | None = None) -> None:
        """Append the event `run`, which may pass a frame to a session."""
        with self._lock:
            self._events.append(_Event(run, session, isinstance(frame, Draft | Branches)))
        self._ring()

    def take(self) -> list[Callable[[], None]]:
        """Return all events; they wait no longer."""
        with self._lock:
            events = [event.run for event in self._events]
            self._events.clear()
            return events

    def take_drafts(self) -> list[Callable[[], None]]:
        """Return the events that bring drafts and have no other of their session before them; they wait no longer."""
        taken, left, blocked = list[Callable[[], None]](), deque[_Event](), set[Hashable]()
        with self._lock:
            for event in self._events:
                if event.drafts and event.session not in blocked:
                    taken.append(event.run)
                else:
                    left.append(event)
                    blocked.add(event.session)
            self._events = left
        return taken
