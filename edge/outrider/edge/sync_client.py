"""The client SDK without async: a thread of its own runs the event loop, and may be called from any thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Sequence
from concurrent.futures import Future
from typing import Any, Self, TypeVar

from outrider.edge.client import Client, Conversation, Transcript
from outrider.edge.edge_config import EdgeConfig
from outrider.edge.event_stream import Completion, Event
from outrider.proto.types import Sampling

T = TypeVar("T")
Events = Generator[Event]


class _OnLoop:
    """A context manager whose coroutines run on an event loop in another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _iterate(self, events: AsyncGenerator[Event]) -> Events:
        """Yield the events, each taken when it is asked for; leaving early closes their source."""
        taking: Future[Event | None] | None = None
        try:
            while (
                event := (taking := asyncio.run_coroutine_threadsafe(_next(events), self._loop)).result()
            ) is not None:
                yield event
        finally:
            self._call(_close(events, taking))


class SyncClient(_OnLoop):
    """`Client` without async, with the same arguments; a context manager."""

    def __init__(self, config: EdgeConfig) -> None:
        self._client = Client(config)
        super().__init__(asyncio.new_event_loop())
        self._thread = threading.Thread(target=self._loop.run_forever, name="outrider-client", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        self._call(self._client.prepare())
        return self

    def close(self) -> None:
        """End the loop and its thread."""
        self._call(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def wake(self) -> None:
        self._call(self._client.wake())

    def complete(self, prompt: str | Sequence[int], sampling: Sampling | None = None, **options: Any) -> Completion:
        return self._call(self._client.complete(prompt, sampling, **options))

    def generate(self, prompt: str | Sequence[int], sampling: Sampling | None = None, **options: Any) -> Events:
        """Yield the events of `Client.generate`; closing the iterator cancels the text."""
        return self._iterate(self._client.generate(prompt, sampling, **options))

    def conversation(self, sampling: Sampling | None = None, **options: Any) -> SyncConversation:
        return SyncConversation(self._loop, self._client.conversation(sampling, **options))


class SyncConversation(_OnLoop):
    """`Conversation` without async; made by `SyncClient.conversation`, used as a context manager."""

    def __init__(self, loop: asyncio.AbstractEventLoop, talk: Conversation) -> None:
        super().__init__(loop)
        self._talk = talk

    def __enter__(self) -> Self:
        self._call(self._talk.__aenter__())
        return self

    def close(self) -> None:
        self._call(self._talk.close())

    @property
    def transcript(self) -> Transcript:
        return self._talk.transcript

    def say(self, prompt: str | Sequence[int] = "", sampling: Sampling | None = None, **options: Any) -> Events:
        """Yield the events of `Conversation.say`; closing the iterator cancels the turn."""
        return self._iterate(self._talk.say(prompt, sampling, **options))

    def complete(
        self, prompt: str | Sequence[int] = "", sampling: Sampling | None = None, **options: Any
    ) -> Completion:
        return self._call(self._talk.complete(prompt, sampling, **options))


async def _next(events: AsyncGenerator[Event]) -> Event | None:
    return await anext(events, None)


async def _close(events: AsyncGenerator[Event], taking: Future[Event | None] | None) -> None:
    """Wait until the text is cancelled on both sides; `taking` may have been left in the middle, by Ctrl-C."""
    if taking is not None and not taking.done():
        taking.cancel()
        await asyncio.wait([asyncio.wrap_future(taking)])
    await events.aclose()
