"""Who may have a text now: not too many requests at once, none while the daemon ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from outrider.edge.daemon.errors import ApiError
from outrider.edge.daemon.metrics import HttpMetrics
from outrider.proto.errors import Unavailable

SHUTTING_DOWN = "the daemon is shutting down"
RETRY_S = 1.0
RETRY_AFTER_END_S = 5.0


class Gate:
    """Counts the requests for texts that run.

    Args:
        most: at once.
        figures: which show the count.
    """

    def __init__(self, most: int, figures: HttpMetrics) -> None:
        self.draining = False
        self.cut = asyncio.Event()  # set: what still runs ends now
        self._most = most
        self._figures = figures
        self._empty = asyncio.Event()
        self._empty.set()

    @contextmanager
    def enter(self) -> Iterator[None]:
        """For as long as a request runs.

        Raises:
            ApiError: 503 while draining, 429 when all places are taken.
        """
        if self.draining:
            raise ApiError(503, SHUTTING_DOWN, code="unavailable", retry_after_s=RETRY_AFTER_END_S)
        if self._figures.running >= self._most:
            message = f"{self._most} requests run already; try again, or raise --max-requests"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after_s=RETRY_S)
        self._figures.running += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._figures.running -= 1
            if not self._figures.running:
                self._empty.set()

    async def drain(self, grace_s: float) -> None:
        """Take no more, let what runs end for so long, then cut it."""
        self.draining = True
        for wait_s in (grace_s, RETRY_S):
            try:
                async with asyncio.timeout(wait_s):
                    await self._empty.wait()
            except TimeoutError:
                self.cut.set()


def cut_off() -> Unavailable:
    """What a text that was cut is told."""
    return Unavailable(SHUTTING_DOWN, retry_after_s=RETRY_AFTER_END_S)
