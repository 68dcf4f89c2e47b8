"""Turns at something scarce: each owner has one at a time, and owners have them in turn."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque


class FairTurns:
    """A few turns at once, in one event loop.

    Args:
        most: turns at once.
    """

    def __init__(self, most: int) -> None:
        self._free = most
        self._having: set[str] = set()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # who waits longest is first

    async def take(self, owner: str) -> None:
        """Wait for a turn of `owner`; `give_back` ends it. If cancelled meanwhile, no turn is taken."""
        if self._free and owner not in self._having:  # all who wait then have their turn
            self._begin(owner)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(owner)
            raise

    def give_back(self, owner: str) -> None:
        """End the turn of `owner`, and begin that of the next."""
        self._free += 1
        self._having.discard(owner)
        if owner in self._waiting:
            self._waiting.move_to_end(owner)
        for another in list(self._waiting):
            if not self._free:
                return
            if another not in self._having:
                self._begin_next(another)

    def _begin_next(self, owner: str) -> None:
        """Begin the turn of the first of an owner's that still waits."""
        waiting = self._waiting.pop(owner)
        while waiting:
            turn = waiting.popleft()
            if not turn.done():
                self._begin(owner)
                turn.set_result(None)
                break
        if waiting:
            self._waiting[owner] = waiting  # behind all others

    def _begin(self, owner: str) -> None:
        self._free -= 1
        self._having.add(owner)
