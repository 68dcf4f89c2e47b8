"""Several texts of one request at once, their events as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from outrider.edge.events import Event, Finished

Item = tuple[int, Event]


async def merged(sources: Sequence[AsyncGenerator[Event]]) -> AsyncGenerator[Item]:
    """(index, event) of every source until each has finished.

    The first error of any is raised, and ends the others; so does leaving early. A reader that is slow holds the
    sources back.
    """
    queue: asyncio.Queue[Item | BaseException] = asyncio.Queue(maxsize=2 * len(sources))
    pumps = [asyncio.create_task(_pump(i, source, queue)) for i, source in enumerate(sources)]
    left = len(sources)
    try:
        while left:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            left -= isinstance(item[1], Finished)
            yield item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(index: int, source: AsyncGenerator[Event], queue: asyncio.Queue[Item | BaseException]) -> None:
    try:
        async with aclosing(source):
            async for event in source:
                await queue.put((index, event))
    except Exception as error:  # whatever it is, it belongs to whoever reads
        await queue.put(error)
