"""Work for a client for as long as that client is there, and no longer than it is worth."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.types import Receive

from outrider.edge.daemon.gate import cut_off
from outrider.proto.errors import OutriderError

LOOK_EVERY_S = 0.25

T = TypeVar("T")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do `work` unless the client leaves first, which cancels it. The request's body has been read."""
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


async def watched(
    items: AsyncGenerator[T], cut: asyncio.Event, hopeless: Callable[[], OutriderError | None]
) -> AsyncGenerator[T]:
    """The same items; ends with an error once `cut` is set, or when there is no hope for the first of them.

    Raises:
        Unavailable: the daemon is shutting down.
        OutriderError: what `hopeless` says.
    """
    cutting = asyncio.create_task(cut.wait())
    wait_s: float | None = LOOK_EVERY_S
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
                    await _ended(coming)
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


async def _ended(task: asyncio.Task[Any]) -> None:
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
