"""Which requests for texts run, and until when: the limit, the end of the daemon, and clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

from starlette.types import Receive

from outrider.edge.daemon.errors import ApiError
from outrider.edge.daemon.metrics import HttpMetrics
from outrider.proto.errors import OutriderError, Unavailable

WATCH_EVERY_S = 0.25
SHUTTING_DOWN = "the daemon is shutting down"
RETRY_S = 1.0
RETRY_AFTER_END_S = 5.0

T = TypeVar("T")


class Limiter:
    """Counts the requests for texts that run, and lets in no more than there is room for.

    Args:
        max_requests: at once.
        http_metrics: show the count.
    """

    def __init__(self, max_requests: int, http_metrics: HttpMetrics) -> None:
        self.draining = False
        self.cut = asyncio.Event()  # set: what still runs ends now
        self._max_requests = max_requests
        self._http_metrics = http_metrics
        self._empty = asyncio.Event()
        self._empty.set()

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Hold a place for as long as a request runs.

        Raises:
            ApiError: 503 while draining, 429 when all places are taken.
        """
        if self.draining:
            raise ApiError(503, SHUTTING_DOWN, code="unavailable", retry_after_s=RETRY_AFTER_END_S)
        if self._http_metrics.running >= self._max_requests:
            message = f"{self._max_requests} requests run already; try again, or raise --max-requests"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after_s=RETRY_S)
        self._http_metrics.running += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._http_metrics.running -= 1
            if not self._http_metrics.running:
                self._empty.set()

    async def drain(self, grace_s: float) -> None:
        """Take no more, give what runs `grace_s` to end, then cut it."""
        self.draining = True
        for wait_s in (grace_s, RETRY_S):
            try:
                async with asyncio.timeout(wait_s):
                    await self._empty.wait()
            except TimeoutError:
                self.cut.set()


def cut_off() -> Unavailable:
    """Return the error of a text that was cut."""
    return Unavailable(SHUTTING_DOWN, retry_after_s=RETRY_AFTER_END_S)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do `work` unless the client leaves first, which cancels it; the request's body must have been read."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_until_gone(receive))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_hopeless(
    items: AsyncGenerator[T], cut: asyncio.Event, hopeless: Callable[[], OutriderError | None]
) -> AsyncGenerator[T]:
    """Yield the same items until `cut` is set, or until there is no hope for the first of them.

    Raises:
        Unavailable: the daemon is shutting down.
        OutriderError: the reason that `hopeless` returns.
    """
    cutting = asyncio.create_task(cut.wait())
    wait_s: float | None = WATCH_EVERY_S
    try:
        async with aclosing(items):
            while True:
                coming = asyncio.create_task(_next(items))
                try:
                    while not coming.done():
                        await asyncio.wait([coming, cutting], timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                        error = hopeless() if wait_s is not None else None
                        if not coming.done() and (cutting.done() or error is not None):
                            raise error or cut_off()
                finally:
                    await _cancel(coming)
                try:
                    item = coming.result()
                except StopAsyncIteration:
                    return
                wait_s = None
                yield item
    finally:
        cutting.cancel()


async def _next(items: AsyncGenerator[T]) -> T:
    return await anext(items)


async def _cancel(task: asyncio.Task[Any]) -> None:
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
