"""The routes: OpenAI's endpoints, health, version, metrics, and the page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from outrider.edge.daemon.answers import Answer, AnswerFormat, ChatFormat, CompletionFormat
from outrider.edge.daemon.auth import Auth, Guard
from outrider.edge.daemon.cloud import Served
from outrider.edge.daemon.errors import DEFECT, ApiError, from_outrider, json_response
from outrider.edge.daemon.limiter import while_connected
from outrider.edge.daemon.page import page_routes
from outrider.edge.daemon.parsed_request import ParsedRequest, json_object, parse_chat, parse_completion
from outrider.edge.daemon.reply import Reply, Service, Texts
from outrider.edge.daemon.schema import ChatRequest, CompletionRequest, Request, checked
from outrider.proto.errors import OutriderError
from outrider.proto.plumbing.access import Key, Limits, Ticket
from outrider.proto.release import release

CHAT, COMPLETIONS, MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"
ROUTES = frozenset((CHAT, COMPLETIONS, MODELS, "/health", "/version", "/metrics", "/"))
LATE_S = 5.0  # beyond the deadline, for a client that reads slowly

R = TypeVar("R", bound=Request)


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[R]):
    """Parts that distinguish the two endpoints.

    Attributes:
        kind: what a request may say.
        parse: makes of it what a client is asked for.
        form: of its answers.
    """

    kind: type[R]
    parse: Callable[[R, Served], Awaitable[ParsedRequest]]
    form: AnswerFormat


def _parse_chat(request: ChatRequest, served: Served) -> Awaitable[ParsedRequest]:
    return parse_chat(request, served.ready, served.template)


def _parse_completion(request: CompletionRequest, served: Served) -> Awaitable[ParsedRequest]:
    return parse_completion(request, served.ready)


CHAT_ENDPOINT = Endpoint(ChatRequest, _parse_chat, ChatFormat())
COMPLETIONS_ENDPOINT = Endpoint(CompletionRequest, _parse_completion, CompletionFormat())


class Api:
    """The handlers of all routes."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._cloud = service.cloud
        self._limits = Limits()
        self._started = int(time.time())

    def application(self, auth: Auth) -> Guard:
        """Return all routes behind the guard."""
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
        return Guard(app, auth, self._service.http_metrics, ROUTES)

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
        if self._service.limiter.draining:
            status, reason = "unavailable", "the daemon is shutting down"
        away = status == "unavailable"
        body = {"status": status, "reason": reason, "drafter": self._cloud.client.drafter_name}
        return json_response(body, 503 if away else 200, {"Retry-After": "2"} if away else None)

    async def _version(self, request: HttpRequest) -> Response:  # noqa: ARG002
        return json_response({"version": release()})

    async def _exposition(self, request: HttpRequest) -> Response:
        body, content_type = self._service.metrics.exposition(request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})

    # --- texts ---

    async def serve(self, endpoint: Endpoint[Any], scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request for texts; it ends where its client leaves."""
        request = HttpRequest(scope, receive)
        with self._service.limiter.enter():
            options = checked(endpoint.kind, await json_object(request))
            served = self._cloud.serving()
            _check_model(options.model, served)
            await while_connected(receive, self._answer(endpoint, options, served, request, send))

    async def _answer(
        self, endpoint: Endpoint[Any], options: Request, served: Served, request: HttpRequest, send: Send
    ) -> None:
        state = request.scope["state"]
        try:
            parsed = await endpoint.parse(options, served)
            texts = Texts(self._service, parsed, state["request_id"], state["began"])
            answer = Answer(endpoint.form.prefix + state["request_id"], options.model, parsed, served.tokens)
            with ExitStack() as places:
                tickets = self._admit(state["key"], len(parsed.texts), places)
                async with (
                    asyncio.timeout(self._service.request_timeout_s + LATE_S),
                    aclosing(texts.items(tickets)) as items,
                ):
                    first = await anext(items)
                    reply = Reply(endpoint.form, options, answer, texts)
                    await (reply.stream if options.stream else reply.whole)(first, items, request.scope, send)
        except OutriderError as error:
            raise from_outrider(error) from error
        except TimeoutError as error:
            raise ApiError(504, "the client reads too slowly", code="deadline_exceeded") from error

    def _admit(self, key: Key | None, texts: int, places: ExitStack) -> list[Ticket]:
        """Take a place for each text of a request that came with a key; raises `ResourceExhausted`."""
        tickets = []
        for _ in range(texts if key is not None else 0):
            ticket = self._limits.admit(key, time.monotonic())  # type: ignore[arg-type]
            places.callback(ticket.close)
            tickets.append(ticket)
        return tickets


class _Handler:
    """One endpoint as ASGI: it sends its answer itself, piece by piece if need be."""

    def __init__(self, api: Api, endpoint: Endpoint[Any]) -> None:
        self._api = api
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await self._api.serve(self._endpoint, scope, receive, send)


def _check_model(model: str, served: Served) -> None:
    if model != served.ready.model:
        message = f"no model {model[:100]!r} here; there is {served.ready.model!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    """Answer Starlette's own 404 and 405."""
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
    """Answer a defect; Starlette then raises the error again, and the guard logs it."""
    return DEFECT.response()
