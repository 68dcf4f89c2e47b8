"""The client SDK without async."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

from outrider.edge.client import Client
from outrider.edge.config import EdgeConfig
from outrider.edge.events import Completion, Event
from outrider.proto.types import Sampling

T = TypeVar("T")


class SyncClient:
    """`Client` without async: a thread of its own runs the event loop. Use as a context manager."""

    def __init__(self, config: EdgeConfig) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="outrider-client", daemon=True)
        self._thread.start()
        self._client = self._call(_make(config))

    def __enter__(self) -> Self:
        self._call(self._client.prepare())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the loop and its thread."""
        self._call(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def complete(self, prompt: str | Sequence[int], sampling: Sampling | None = None, **options: Any) -> Completion:
        """As `Client.complete`."""
        return self._call(self._client.complete(prompt, sampling, **options))

    def generate(
        self, prompt: str | Sequence[int], sampling: Sampling | None = None, **options: Any
    ) -> Iterator[Event]:
        """As `Client.generate`; closing the iterator cancels the text."""
        events: queue.Queue[Event | BaseException | None] = queue.Queue()
        pump = asyncio.run_coroutine_threadsafe(
            _pump(self._client.generate(prompt, sampling, **options), events), self._loop
        )
        try:
            while (event := events.get()) is not None:
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            pump.cancel()
            self._call(_ended(pump))

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


async def _ended(pump: Future[None]) -> None:
    """Until the text is cancelled on both sides."""
    await asyncio.wait([asyncio.wrap_future(pump)])


async def _make(config: EdgeConfig) -> Client:
    return Client(config)


async def _pump(events: AsyncGenerator[Event], into: queue.Queue[Event | BaseException | None]) -> None:
    try:
        async for event in events:
            into.put(event)
    except asyncio.CancelledError:
        raise
    except Exception as error:  # whatever it is, it belongs to the thread that iterates
        into.put(error)
    finally:
        await events.aclose()
        into.put(None)
