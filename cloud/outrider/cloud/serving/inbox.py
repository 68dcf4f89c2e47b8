"""Events that wait for the engine, which takes them between its steps, and drafts before its commits."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple

from outrider.proto.types import Branches, Draft, EdgeFrame


class _Event(NamedTuple):
    run: Callable[[], None]
    session: Hashable
    drafts: bool


class WaitingEvents:
    """Events in their order; those that bring drafts may be taken before others, but never before one of their session.

    Drafts that come while a step runs are of use to its commit: one may be what follows a miss.
    """

    def __init__(self) -> None:
        self._events: deque[_Event] = deque()

    def __len__(self) -> int:
        return len(self._events)

    def add(self, run: Callable[[], None], session: Hashable = None, frame: EdgeFrame | None = None) -> None:
        """Append the event `run`, which may pass a frame to a session."""
        self._events.append(_Event(run, session, isinstance(frame, Draft | Branches)))

    def take(self) -> list[Callable[[], None]]:
        """Return all events; they wait no longer."""
        events = [event.run for event in self._events]
        self._events.clear()
        return events

    def take_drafts(self) -> list[Callable[[], None]]:
        """Return the events that bring drafts and have no other of their session before them; they wait no longer."""
        taken, left, blocked = list[Callable[[], None]](), deque[_Event](), set[Hashable]()
        for event in self._events:
            if event.drafts and event.session not in blocked:
                taken.append(event.run)
            else:
                left.append(event)
                blocked.add(event.session)
        self._events = left
        return taken


class Inbox:
    """Events from any thread for one that takes them."""

    def __init__(self) -> None:
        self._events = WaitingEvents()
        self._bell = threading.Condition()

    def __len__(self) -> int:
        return len(self._events)

    def post(self, run: Callable[[], None], session: Hashable = None, frame: EdgeFrame | None = None) -> None:
        """Append an event, as `WaitingEvents.add` does."""
        with self._bell:
            self._events.add(run, session, frame)
            self._bell.notify()

    def take(self, wake_at: float) -> tuple[list[Callable[[], None]], float]:
        """Return the events, and the seconds of waiting for one, until `wake_at` at most on the monotonic clock."""
        waited_s = 0.0
        with self._bell:
            began = time.monotonic()
            if not self._events and wake_at > began:
                self._bell.wait(wake_at - began)
                waited_s = time.monotonic() - began
            return self._events.take(), waited_s

    def take_drafts(self) -> list[Callable[[], None]]:
        """Return what `WaitingEvents.take_drafts` does."""
        with self._bell:
            return self._events.take_drafts()
