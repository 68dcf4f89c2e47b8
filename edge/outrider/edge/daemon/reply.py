"""The texts of one request while they are decoded, and the sending of their answer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.types import Scope, Send

from outrider.edge.daemon.answers import Answer, AnswerFormat
from outrider.edge.daemon.cloud import Cloud
from outrider.edge.daemon.errors import DEFECT, from_outrider, json_bytes, json_response
from outrider.edge.daemon.limiter import Limiter, until_hopeless
from outrider.edge.daemon.metrics import HttpMetrics
from outrider.edge.daemon.parsed_request import ParsedRequest
from outrider.edge.daemon.schema import Request
from outrider.edge.daemon.speculation import TextObserver, metrics_of
from outrider.edge.event_stream import Event, Finished, Tokens
from outrider.edge.metrics import EdgeMetrics
from outrider.proto.errors import OutriderError
from outrider.proto.plumbing.access import Ticket
from outrider.proto.plumbing.logs import about

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # a proxy must not collect the pieces
]
DONE = b"data: [DONE]\n\n"

Item = tuple[int, Event]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Service:
    """Parts that all requests share.

    Attributes:
        cloud: decodes the texts.
        metrics: counts texts.
        http_metrics: counts requests.
        limiter: lets requests in.
        request_timeout_s: allowed s for a whole answer.
    """

    cloud: Cloud
    metrics: EdgeMetrics
    http_metrics: HttpMetrics
    limiter: Limiter
    request_timeout_s: float


class Texts:
    """The texts of one request while they are decoded.

    Args:
        service: decodes and counts them.
        request: what was asked for.
        request_id: for logs.
        began: s of the monotonic clock when the request arrived.
    """

    def __init__(self, service: Service, request: ParsedRequest, request_id: str, began: float) -> None:
        self._service = service
        self._began = began
        self.request = request
        self.request_id = request_id
        self.observers = [TextObserver(service.metrics, request_id, service.cloud.lost) for _ in request.texts]

    @property
    def seconds(self) -> float:
        """Time since the request arrived."""
        return time.monotonic() - self._began

    async def items(self, tickets: list[Ticket]) -> AsyncGenerator[Item]:
        """Yield (choice, event) of all texts, counting tokens against `tickets`, [choices] or none.

        It ends with an error when the daemon ends, or while the cloud is away.
        """
        cloud = self._service.cloud
        items = merge([self._generate(choice) for choice in range(len(self.observers))])
        async with aclosing(until_hopeless(items, self._service.limiter.cut, cloud.hopeless)) as watched:
            async for choice, event in watched:
                if tickets and isinstance(event, Tokens):
                    tickets[choice].spend(len(event.tokens), time.monotonic())
                if isinstance(event, Finished):
                    cloud.ended(self.observers[choice].statistics)
                yield choice, event

    def account(self, answer: Answer, first_token_s: float) -> None:
        """Count a request that was answered in full."""
        tokens = sum(answer.counts)
        self._service.http_metrics.finished(answer.request.prompt_tokens, tokens, first_token_s, self.seconds)

    def _generate(self, choice: int) -> AsyncGenerator[Event]:
        text, request = self.request.texts[choice], self.request
        return self._service.cloud.client.generate(
            text.prompt,
            text.sampling,
            stop=request.stop,
            deadline_s=self._service.request_timeout_s,
            observer=self.observers[choice],
            logprobs=request.logprobs,
            top_logprobs=request.top_logprobs,
            request_id=self.request_id,
        )


class Reply:
    """One answer, sent at once or as a stream."""

    def __init__(self, form: AnswerFormat, options: Request, answer: Answer, texts: Texts) -> None:
        self._form = form
        self._options = options
        self._answer = answer
        self._texts = texts
        self._first_token_s = texts.seconds

    async def whole(self, first: Item, items: AsyncGenerator[Item], scope: Scope, send: Send) -> None:
        """Collect everything, then send it."""
        events: list[list[Event]] = [[] for _ in self._texts.request.texts]
        async for choice, event in _with_first(first, items):
            self._answer.take(choice, event)
            events[choice].append(event)
        body = self._form.whole(self._answer, events) | {"metrics": self._metrics()}
        self._texts.account(self._answer, self._first_token_s)
        await json_response(body)(scope, _nothing, send)

    async def stream(self, first: Item, items: AsyncGenerator[Item], scope: Scope, send: Send) -> None:  # noqa: ARG002
        """Send each piece as it comes; an error is the last of them, since the status has gone before it."""
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        async with aclosing(self._pieces(_with_first(first, items))) as pieces:
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pieces(self, items: AsyncGenerator[Item]) -> AsyncGenerator[bytes]:
        try:
            for choice, observer in enumerate(self._texts.observers):
                if (first := self._form.first_chunk(self._answer, choice)) is not None:
                    yield self._event(first, observer, None)
            async for piece in self._chunks(items):
                yield piece
            self._texts.account(self._answer, self._first_token_s)
            yield DONE
        except OutriderError as error:
            yield _event(from_outrider(error).body())
        except Exception:  # a stream's top: its client must not take half a text for the whole
            log.exception("a stream failed", extra=about(session=self._texts.request_id))
            yield _event(DEFECT.body())

    async def _chunks(self, items: AsyncGenerator[Item]) -> AsyncGenerator[bytes]:
        left = len(self._texts.observers)
        observer = self._texts.observers[0]
        async for choice, event in items:
            self._answer.take(choice, event)
            left -= isinstance(event, Finished)
            if not (isinstance(event, Finished) or event.text or self._options.wants_speculation or self._logprobs):
                continue  # held back: there is nothing to send
            made = self._form.chunk(self._answer, choice, event)
            if not left and not self._options.wants_usage:
                made["metrics"] = self._metrics()
            observer = self._texts.observers[choice]
            yield self._event(made, observer, event)
        if self._options.wants_usage:
            yield self._event(self._form.usage_chunk(self._answer) | {"metrics": self._metrics()}, observer, None)

    def _event(self, made: dict[str, Any], observer: TextObserver, event: Event | None) -> bytes:
        if self._options.wants_usage:
            made.setdefault("usage", None)
        if self._options.wants_speculation:
            made["speculation"] = observer.live(event)
        return _event(made)

    @property
    def _logprobs(self) -> bool:
        return self._texts.request.logprobs

    def _metrics(self) -> dict[str, Any]:
        return metrics_of(self._texts.observers, self._texts.request.seed)


async def merge(sources: Sequence[AsyncGenerator[Event]]) -> AsyncGenerator[Item]:
    """Yield (index, event) of every source until each has finished.

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
    except Exception as error:  # whatever it is, it is for the reader
        await queue.put(error)


async def _with_first(first: Item, items: AsyncGenerator[Item]) -> AsyncGenerator[Item]:
    yield first
    async for item in items:
        yield item


def _event(value: Any) -> bytes:
    return b"data: " + json_bytes(value) + b"\n\n"


async def _nothing() -> Any:
    raise AssertionError("an answer reads nothing")
