"""Requests for texts: their decoding, and the sending of their answers."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import ExitStack, aclosing, closing
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.edge.daemon.answers import Answer
from outrider.edge.daemon.api_access import RETRY_AFTER_END_S, SHUTTING_DOWN, Limiter
from outrider.edge.daemon.body_reading import IgnoreUnknown, read_request
from outrider.edge.daemon.cloud import Cloud, Served
from outrider.edge.daemon.daemon_metrics import HttpMetrics, TextObserver, metrics_of
from outrider.edge.daemon.http_errors import DEFECT, ApiError, from_outrider, json_bytes, json_response
from outrider.edge.daemon.parsed_request import ParsedRequest
from outrider.edge.daemon.schema import Request
from outrider.edge.edge_metrics import EdgeMetrics
from outrider.edge.event_stream import Event, Finished, Tokens
from outrider.edge.request import ANYBODY, Tenant
from outrider.proto.errors import InvalidArgument, OutriderError, Unavailable
from outrider.proto.plumbing.access import Key, Limits, Ticket
from outrider.proto.plumbing.logs import about
from outrider.proto.types import MAX_ISOLATION_BYTES

WATCH_EVERY_S = 0.25
_GRAMMAR = "sampling.grammar"
LATE_S = 5.0  # beyond the deadline, for a client that reads slowly
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # a proxy must not collect the pieces
]
REVOKED = ApiError(401, "the API key has been revoked", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

Item = tuple[int, Event]
R = TypeVar("R", bound=Request)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Service:
    """Parts that all requests share.

    Attributes:
        request_timeout_s: time for a whole answer.
        unknown_fields: ignores fields that the schema does not know; None: they are errors.
    """

    cloud: Cloud
    metrics: EdgeMetrics
    http_metrics: HttpMetrics
    limiter: Limiter
    request_timeout_s: float
    key_limits: Limits = field(default_factory=Limits)
    unknown_fields: IgnoreUnknown | None = None


@dataclass(frozen=True)
class TextEndpoint(Generic[R]):
    """One endpoint for texts as ASGI, since it sends its answers itself.

    Attributes:
        service: decodes and counts the texts.
        kind: what a request may say.
        parse: prepares a request for decoding.
        answer: format of the answers.
    """

    service: Service
    kind: type[R]
    parse: Callable[[R, Served], Awaitable[ParsedRequest]]
    answer: type[Answer]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, which ends when its client leaves."""
        with self.service.limiter.enter(scope["state"]["key"]) as place:
            options = await read_request(self.kind, HttpRequest(scope, receive), place, self.service.unknown_fields)
            await self.respond(options, Reply, scope, receive, send)

    async def respond(self, options: R, reply: ReplyFactory, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that was read and has its place at the limiter, by what `reply` makes."""
        served = self.service.cloud.serving()
        served.check_model(options.model)
        await _while_connected(receive, self._serve(options, reply, served, scope, receive, send))

    async def _serve(
        self, options: R, reply: ReplyFactory, served: Served, scope: Scope, receive: Receive, send: Send
    ) -> None:
        state, key = scope["state"], scope["state"]["key"]
        try:
            request = await self.parse(options, served)
            generation = Generation(self.service, request, tenant_of(key), state)
            answer = self.answer(state["request_id"], options.model, request, served.tokens)
            with ExitStack() as places:
                tickets = [places.enter_context(closing(self._admit(key))) for _ in request.choices] if key else []
                async with (
                    asyncio.timeout(self.service.request_timeout_s + LATE_S),
                    aclosing(generation.items(tickets)) as items,
                ):
                    made = reply(options, answer, generation)
                    if options.stream:
                        await made.stream(items, send)
                    else:
                        await (await made.whole(items))(scope, receive, send)
        except OutriderError as error:
            raise from_outrider(error) from error
        except TimeoutError as error:
            raise ApiError(504, "the client reads too slowly", code="deadline_exceeded") from error

    def _admit(self, key: Key) -> Ticket:
        return self.service.key_limits.admit(key, time.monotonic())


def tenant_of(key: Key | None) -> Tenant:
    """Return whom the texts of an API key of the daemon's are for; None: it has no keys.

    The mark is keyed by the hash of the key's secret, which only the file of keys holds: a verifier learns which texts
    are one tenant's, after a restart too, and nothing else.
    """
    if key is None:
        return ANYBODY
    mark = hmac.digest(bytes.fromhex(key.sha256), b"outrider isolation", hashlib.sha256)
    return Tenant(mark[:MAX_ISOLATION_BYTES], key.learning)


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
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


class Generation:
    """The texts of one request while they are decoded.

    Args:
        service: decodes and counts them.
        request: what the client wants.
        tenant: whose request it is.
        state: what the guard noted of it: see `Guard`.
    """

    def __init__(self, service: Service, request: ParsedRequest, tenant: Tenant, state: dict[str, Any]) -> None:
        self._service = service
        self._request = request
        self._tenant = tenant
        self._began: float = state["began"]
        self._revoked: Callable[[], bool] = state["revoked"]
        self._first_token_s = 0.0  # 0: there is none yet
        self.request_id: str = state["request_id"]
        self.observers = [TextObserver(service.metrics, service.cloud.lost) for _ in request.choices]

    async def items(self, tickets: list[Ticket]) -> AsyncGenerator[Item]:
        """Yield (choice, event) of all texts, and count their tokens against `tickets`, [choices] or none.

        The first error ends all texts, and so does leaving early. A slow reader holds them back.

        Raises:
            ApiError: the key has been revoked.
            Unavailable: the daemon is shutting down.
            OutriderError: a text cannot be finished, or the cloud is away before any has begun.
        """
        queue: asyncio.Queue[Item | Exception] = asyncio.Queue(maxsize=2 * len(self.observers))
        tasks = [asyncio.create_task(self._decode(choice, queue)) for choice in range(len(self.observers))]
        tasks.append(asyncio.create_task(self._watch(queue)))
        left = len(self.observers)
        try:
            while left:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                choice, event = item
                self._first_token_s = self._first_token_s or self._seconds
                if tickets and isinstance(event, Tokens):
                    tickets[choice].spend(len(event.tokens), time.monotonic())
                if isinstance(event, Finished):
                    left -= 1
                    self._service.cloud.ended(self.observers[choice].statistics)
                yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _decode(self, choice: int, queue: asyncio.Queue[Item | Exception]) -> None:
        request, text = self._request, self._request.choices[choice]
        events = self._service.cloud.client.generate(
            text.prompt,
            text.sampling,
            stop=request.stop,
            deadline_s=self._service.request_timeout_s,
            observer=self.observers[choice],
            logprobs=request.logprobs,
            top_logprobs=request.top_logprobs,
            request_id=self.request_id,
            prediction=request.prediction,
            shown=request.tools.shown if request.tools else (),
            prompt_logprobs=request.prompt_scores,
            tenant=self._tenant,
        )
        try:
            async with aclosing(events):
                async for event in events:
                    await queue.put((choice, request.shown(event)))
        except Exception as error:  # whatever it is, it is for the reader
            if isinstance(error, InvalidArgument) and error.field == _GRAMMAR:
                await queue.put(from_outrider(error, request.grammar_field))
            else:
                await queue.put(error)

    async def _watch(self, queue: asyncio.Queue[Item | Exception]) -> None:
        """End the texts when the daemon ends, their key is revoked, or none begins while the cloud is away for long."""
        error: Exception | None = None
        while error is None:
            try:
                async with asyncio.timeout(WATCH_EVERY_S):
                    await self._service.limiter.cut.wait()
                error = Unavailable(SHUTTING_DOWN, retry_after_s=RETRY_AFTER_END_S)
            except TimeoutError:
                error = None if self._first_token_s else self._service.cloud.hopeless()
                if self._revoked():
                    error = REVOKED
        await queue.put(error)

    def account(self, usage: dict[str, Any]) -> None:
        """Count a request that was answered in full."""
        self._service.http_metrics.finished(usage, self._first_token_s, self._seconds)

    def metrics(self) -> dict[str, Any]:
        """Return the `metrics` object of the answer."""
        return metrics_of(self.observers, self._request.seed)

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began


@dataclass(frozen=True, slots=True)
class Reply:
    """The sending of one answer, at once or as a stream."""

    options: Request
    answer: Answer
    generation: Generation

    async def whole(self, items: AsyncGenerator[Item]) -> Response:
        """Return the answer when all texts have ended."""
        return json_response(await self._whole(items))

    async def _whole(self, items: AsyncGenerator[Item]) -> dict[str, Any]:
        events: list[list[Event]] = [[] for _ in self.generation.observers]
        async for choice, event in items:
            self.answer.take(choice, event)
            events[choice].append(event)
        body = self.answer.whole(events) | {"metrics": self.generation.metrics()}
        self.generation.account(self.answer.usage)
        return body

    async def stream(self, items: AsyncGenerator[Item], send: Send) -> None:
        """Send each piece as it comes; an error is the last of them, since the status has gone before it."""
        first = await anext(items)
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        async with aclosing(self._frames(first, items)) as frames:
            async for frame in frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _frames(self, first: Item, items: AsyncGenerator[Item]) -> AsyncGenerator[bytes]:
        try:
            async with aclosing(self._pieces(first, items)) as pieces:
                async for piece in pieces:
                    yield piece
        except OutriderError as error:
            yield self._failure(from_outrider(error))
        except ApiError as error:
            yield self._failure(error)
        except Exception:  # a stream's top: its client must not take half a text for the whole
            log.exception("a stream failed", extra=about(session=self.generation.request_id))
            yield self._failure(DEFECT)

    def _failure(self, error: ApiError) -> bytes:
        return _data(json_bytes(error.body()))

    async def _pieces(self, first: Item, items: AsyncGenerator[Item]) -> AsyncGenerator[bytes]:
        for choice in range(len(self.generation.observers)):
            if (chunk := self.answer.first_chunk(choice)) is not None:
                yield _data(json_bytes(self._completed(chunk, choice)))
        async for chunk in self._chunks(first, items):
            yield _data(json_bytes(chunk))
        self.generation.account(self.answer.usage)
        yield _data(b"[DONE]")

    async def _chunks(self, first: Item, items: AsyncGenerator[Item]) -> AsyncGenerator[dict[str, Any]]:
        left = len(self.generation.observers)
        keeps_empty = self.options.wants_speculation or self.answer.logprobs  # which tokens have before their text
        async for choice, event in _with_first(first, items):
            self.answer.take(choice, event)
            left -= isinstance(event, Finished)
            if not (isinstance(event, Finished) or keeps_empty or self.answer.has_news(choice, event)):
                continue
            chunk = self.answer.chunk(choice, event)
            if not left and not self.options.wants_usage:
                chunk["metrics"] = self.generation.metrics()
            yield self._completed(chunk, choice, event)
        if self.options.wants_usage:
            yield self._completed(self.answer.usage_chunk() | {"metrics": self.generation.metrics()}, choice)

    def _completed(self, chunk: dict[str, Any], choice: int, event: Event | None = None) -> dict[str, Any]:
        """Add to a chunk what the options of the stream ask for."""
        if self.options.wants_usage:
            chunk.setdefault("usage", self.answer.usage if self.options.wants_running_usage else None)
        if self.options.wants_speculation:
            chunk["speculation"] = self.generation.observers[choice].live(event)
        return chunk


ReplyFactory = Callable[[Any, Answer, Generation], Reply]


def _data(piece: bytes) -> bytes:
    """Return one server-sent event without a name."""
    return b"data: " + piece + b"\n\n"


async def _with_first(first: Item, items: AsyncGenerator[Item]) -> AsyncGenerator[Item]:
    yield first
    async for item in items:
        yield item
