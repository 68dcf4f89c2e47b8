"""The routes: OpenAI's endpoints, health, version, metrics, and the page."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from outrider.edge.daemon import chat, completions
from outrider.edge.daemon.answer import Answer
from outrider.edge.daemon.attend import watched, while_connected
from outrider.edge.daemon.body import json_object
from outrider.edge.daemon.cloud import Cloud, Served
from outrider.edge.daemon.errors import DEFECT, ApiError, from_outrider, json_bytes, json_response
from outrider.edge.daemon.gate import Gate
from outrider.edge.daemon.guard import Doors, Guard
from outrider.edge.daemon.metrics import HttpMetrics
from outrider.edge.daemon.page import page_routes
from outrider.edge.daemon.schema import ChatRequest, CompletionRequest, Request, checked
from outrider.edge.daemon.speculation import TextJournal, metrics_of
from outrider.edge.daemon.texts import Item, merged
from outrider.edge.daemon.wanted import Text, Wanted, wanted_chat, wanted_completion
from outrider.edge.events import Event, Finished, Tokens
from outrider.edge.metrics import EdgeMetrics
from outrider.proto.errors import OutriderError
from outrider.proto.plumbing.access import Key, Limits, Ticket
from outrider.proto.plumbing.logs import about
from outrider.proto.release import release

CHAT, COMPLETIONS, MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"
ROUTES = frozenset((CHAT, COMPLETIONS, MODELS, "/health", "/version", "/metrics", "/"))
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # a proxy must not collect the pieces
]
DONE = b"data: [DONE]\n\n"
LATE_S = 5.0  # beyond the deadline, for a client that reads slowly

R = TypeVar("R", bound=Request)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[R]):
    """What tells the two endpoints apart."""

    kind: type[R]
    prefix: str
    wanted: Callable[[R, Served], Awaitable[Wanted]]
    first_chunk: Callable[[Answer, int], dict[str, Any]] | None
    chunk: Callable[[Answer, int, Event], dict[str, Any]]
    usage_chunk: Callable[[Answer], dict[str, Any]]
    whole: Callable[[Answer, Sequence[Sequence[Event]]], dict[str, Any]]


def _wanted_chat(request: ChatRequest, served: Served) -> Awaitable[Wanted]:
    return wanted_chat(request, served.ready, served.template)


def _wanted_completion(request: CompletionRequest, served: Served) -> Awaitable[Wanted]:
    return wanted_completion(request, served.ready)


CHAT_ENDPOINT = Endpoint(
    ChatRequest, "chatcmpl-", _wanted_chat, chat.first_chunk, chat.chunk, chat.usage_chunk, chat.whole
)
COMPLETIONS_ENDPOINT = Endpoint(
    CompletionRequest,
    "cmpl-",
    _wanted_completion,
    None,
    completions.chunk,
    completions.usage_chunk,
    completions.whole,
)


class Api:
    """The handlers, and what they share.

    Args:
        cloud: to decode on.
        metrics: counts texts.
        figures: counts requests.
        gate: lets requests in.
        request_timeout_s: for a whole answer.
    """

    def __init__(
        self, cloud: Cloud, metrics: EdgeMetrics, figures: HttpMetrics, gate: Gate, request_timeout_s: float
    ) -> None:
        self._cloud = cloud
        self._metrics = metrics
        self._figures = figures
        self._gate = gate
        self._timeout_s = request_timeout_s
        self._limits = Limits()
        self._started = int(time.time())

    def application(self, doors: Doors) -> Guard:
        """All routes behind the guard."""
        routes = [
            Route(CHAT, _Handler(self, CHAT_ENDPOINT), methods=["POST"]),
            Route(COMPLETIONS, _Handler(self, COMPLETIONS_ENDPOINT), methods=["POST"]),
            Route(MODELS, self._models, methods=["GET"]),
            Route(MODELS + "/{model:path}", self._model, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/version", self._version, methods=["GET"]),
            Route("/metrics", self._exposition, methods=["GET"]),
            *page_routes(),
        ]
        handlers = {HTTPException: _http_error, ApiError: _api_error, Exception: _defect}
        app = Starlette(routes=routes, exception_handlers=handlers)
        app.router.redirect_slashes = False
        return Guard(app, doors, self._figures, ROUTES)

    # --- small answers ---

    async def _models(self, request: HttpRequest) -> Response:  # noqa: ARG002 - Starlette's signature
        return json_response({"object": "list", "data": [self._card(self._cloud.serving())]})

    async def _model(self, request: HttpRequest) -> Response:
        served = self._cloud.serving()
        _check_model(request.path_params["model"], served)
        return json_response(self._card(served))

    def _card(self, served: Served) -> dict[str, Any]:
        return {"id": served.ready.model, "object": "model", "created": self._started, "owned_by": "outrider"}

    async def _health(self, request: HttpRequest) -> Response:  # noqa: ARG002
        health = self._cloud.health
        status, reason = health.status, health.reason
        if self._gate.draining:
            status, reason = "unavailable", "the daemon is shutting down"
        away = status == "unavailable"
        body = {"status": status, "reason": reason, "drafter": self._cloud.client.drafter_name}
        return json_response(body, 503 if away else 200, {"Retry-After": "2"} if away else None)

    async def _version(self, request: HttpRequest) -> Response:  # noqa: ARG002
        return json_response({"version": release()})

    async def _exposition(self, request: HttpRequest) -> Response:
        body, content_type = self._metrics.exposition(request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})

    # --- texts ---

    async def serve(self, endpoint: Endpoint[Any], scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request for texts; it ends where its client leaves."""
        request = HttpRequest(scope, receive)
        with self._gate.enter():
            asked = checked(endpoint.kind, await json_object(request))
            served = self._cloud.serving()
            _check_model(asked.model, served)
            await while_connected(receive, self._answer(endpoint, asked, served, request, send))

    async def _answer(
        self, endpoint: Endpoint[Any], asked: Request, served: Served, request: HttpRequest, send: Send
    ) -> None:
        state = request.scope["state"]
        try:
            wanted = await endpoint.wanted(asked, served)
            texts = _Texts(self, wanted, state["request_id"], state["began"])
            answer = Answer(endpoint.prefix + state["request_id"], asked.model, wanted, served.tokens)
            with ExitStack() as places:
                tickets = self._admit(state["key"], len(wanted.texts), places)
                async with asyncio.timeout(self._timeout_s + LATE_S), aclosing(texts.items(tickets)) as items:
                    first = await anext(items)
                    reply = _Reply(endpoint, asked, answer, texts)
                    await (reply.stream if asked.stream else reply.whole)(first, items, request.scope, send)
        except OutriderError as error:
            raise from_outrider(error) from error
        except TimeoutError as error:
            raise ApiError(504, "the client reads too slowly", code="deadline_exceeded") from error

    def _admit(self, key: Key | None, texts: int, places: ExitStack) -> list[Ticket]:
        """A place for each text of a request that came with a key; raises `ResourceExhausted`."""
        tickets = []
        for _ in range(texts if key is not None else 0):
            ticket = self._limits.admit(key, time.monotonic())  # type: ignore[arg-type]
            places.callback(ticket.close)
            tickets.append(ticket)
        return tickets

    def source(self, text: Text, wanted: Wanted, request_id: str, journal: TextJournal) -> AsyncGenerator[Event]:
        """The events of one text."""
        return self._cloud.client.generate(
            text.prompt,
            text.sampling,
            stop=wanted.stop,
            deadline_s=self._timeout_s,
            journal=journal,
            logprobs=wanted.logprobs,
            top_logprobs=wanted.top_logprobs,
            request_id=request_id,
        )

    def watched(self, items: AsyncGenerator[Item]) -> AsyncGenerator[Item]:
        """The same, ended when the daemon ends or while the cloud is away."""
        return watched(items, self._gate.cut, self._cloud.hopeless)

    def journal(self, request_id: str) -> TextJournal:
        """For one text."""
        return TextJournal(self._metrics, request_id, self._cloud.lost)

    def account(self, texts: _Texts, answer: Answer, first_token_s: float) -> None:
        """A request was answered in full."""
        seconds = time.monotonic() - texts.began
        self._figures.finished(answer.wanted.prompt_tokens, sum(answer.counts), first_token_s, seconds)

    def text_ended(self, journal: TextJournal) -> None:
        """A text was decoded to its end."""
        self._cloud.ended(journal.statistics)


class _Handler:
    """One endpoint as ASGI: it sends its answer itself, piece by piece if need be."""

    def __init__(self, api: Api, endpoint: Endpoint[Any]) -> None:
        self._api = api
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        await self._api.serve(self._endpoint, scope, receive, send)


class _Texts:
    """The texts of one request while they are decoded."""

    def __init__(self, api: Api, wanted: Wanted, request_id: str, began: float) -> None:
        self.api = api
        self.wanted = wanted
        self.request_id = request_id
        self.began = began
        self.journals = [api.journal(request_id) for _ in wanted.texts]

    async def items(self, tickets: list[Ticket]) -> AsyncGenerator[Item]:
        """(choice, event) of all texts; what comes is counted against `tickets`, [choices] or none."""
        sources = [
            self.api.source(text, self.wanted, self.request_id, journal)
            for text, journal in zip(self.wanted.texts, self.journals, strict=True)
        ]
        async with aclosing(self.api.watched(merged(sources))) as items:
            async for choice, event in items:
                if tickets and isinstance(event, Tokens):
                    tickets[choice].spend(len(event.tokens), time.monotonic())
                if isinstance(event, Finished):
                    self.api.text_ended(self.journals[choice])
                yield choice, event


class _Reply:
    """One answer, sent at once or as a stream."""

    def __init__(self, endpoint: Endpoint[Any], asked: Request, answer: Answer, texts: _Texts) -> None:
        self._endpoint = endpoint
        self._asked = asked
        self._answer = answer
        self._texts = texts
        self._first_token_s = time.monotonic() - texts.began

    async def whole(self, first: Item, items: AsyncGenerator[Item], scope: Scope, send: Send) -> None:
        """Collect everything, then send it."""
        events: list[list[Event]] = [[] for _ in self._texts.wanted.texts]
        async for choice, event in _with_first(first, items):
            self._answer.take(choice, event)
            events[choice].append(event)
        body = self._endpoint.whole(self._answer, events) | {"metrics": self._metrics()}
        self._texts.api.account(self._texts, self._answer, self._first_token_s)
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
            for choice, journal in enumerate(self._texts.journals):
                if self._endpoint.first_chunk is not None:
                    yield self._event(self._endpoint.first_chunk(self._answer, choice), journal, None)
            async for piece in self._chunks(items):
                yield piece
            self._texts.api.account(self._texts, self._answer, self._first_token_s)
            yield DONE
        except OutriderError as error:
            yield _event(from_outrider(error).body())
        except Exception:  # a stream's top: its client must not take half a text for the whole
            log.exception("a stream failed", extra=about(session=self._texts.request_id))
            yield _event(DEFECT.body())

    async def _chunks(self, items: AsyncGenerator[Item]) -> AsyncGenerator[bytes]:
        left = len(self._texts.journals)
        journal = self._texts.journals[0]
        async for choice, event in items:
            self._answer.take(choice, event)
            left -= isinstance(event, Finished)
            if not (isinstance(event, Finished) or event.text or self._asked.wants_speculation or self._logprobs):
                continue  # held back: nothing to tell
            made = self._endpoint.chunk(self._answer, choice, event)
            if not left and not self._asked.wants_usage:
                made["metrics"] = self._metrics()
            journal = self._texts.journals[choice]
            yield self._event(made, journal, event)
        if self._asked.wants_usage:
            yield self._event(self._endpoint.usage_chunk(self._answer) | {"metrics": self._metrics()}, journal, None)

    def _event(self, made: dict[str, Any], journal: TextJournal, event: Event | None) -> bytes:
        if self._asked.wants_usage:
            made.setdefault("usage", None)
        if self._asked.wants_speculation:
            made["speculation"] = journal.live(event)
        return _event(made)

    @property
    def _logprobs(self) -> bool:
        return self._texts.wanted.logprobs

    def _metrics(self) -> dict[str, Any]:
        return metrics_of(self._texts.journals, self._texts.wanted.seed)


async def _with_first(first: Item, items: AsyncGenerator[Item]) -> AsyncGenerator[Item]:
    yield first
    async for item in items:
        yield item


def _event(value: Any) -> bytes:
    return b"data: " + json_bytes(value) + b"\n\n"


def _check_model(model: str, served: Served) -> None:
    if model != served.ready.model:
        message = f"no model {model[:100]!r} here; there is {served.ready.model!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


async def _nothing() -> Any:
    raise AssertionError("an answer reads nothing")


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    """Starlette's own 404 and 405."""
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for nothing else
    message = {
        404: f"there is nothing at {request.url.path[:200]}",
        405: f"{request.method} is not for {request.url.path[:200]}; see Allow",
    }.get(error.status_code, str(error.detail))
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    return ApiError(error.status_code, message, code=code, headers=dict(error.headers or {})).response()


async def _api_error(request: HttpRequest, error: Exception) -> Response:  # noqa: ARG001 - Starlette's signature
    assert isinstance(error, ApiError)  # noqa: S101 - registered for nothing else
    return error.response()


async def _defect(request: HttpRequest, error: Exception) -> Response:  # noqa: ARG001 - Starlette's signature
    """Starlette raises the error again after this answer, and the guard logs it."""
    return DEFECT.response()
