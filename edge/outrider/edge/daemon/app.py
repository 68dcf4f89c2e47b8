"""The routes: OpenAI's endpoints, health, version, metrics, and the page."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route, Router

from outrider.edge.daemon.answers import ChatAnswer, CompletionAnswer
from outrider.edge.daemon.api_access import RESPONSES, SHUTTING_DOWN, Auth, Guard
from outrider.edge.daemon.cloud import Served
from outrider.edge.daemon.endpoints import Adapted, TextEndpoint
from outrider.edge.daemon.generation import Service
from outrider.edge.daemon.http_errors import MESSAGES, json_response
from outrider.edge.daemon.messages import COUNT_TOKENS, messages_routes
from outrider.edge.daemon.responses import ResponsesApi
from outrider.edge.daemon.schema import ChatRequest, CompletionRequest
from outrider.proto.release import release

CHAT, COMPLETIONS, MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"
ROUTES = frozenset(
    (CHAT, COMPLETIONS, RESPONSES, MESSAGES, COUNT_TOKENS, MODELS, "/drafters", "/health", "/version", "/metrics", "/")
)
WITH_A_KEY = "the reason is told to requests with an API key"
PAGE = Path(__file__).parent / "page"
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# No inline script or style, nothing from elsewhere, and in nobody's frame: a hostile text has nothing to reach for.
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # a newer daemon brings a newer page; the ETag keeps that cheap
}


class Api:
    """The handlers of all routes."""

    def __init__(self, service: Service, auth: Auth) -> None:
        self._service = service
        self._auth = auth
        self._started = int(time.time())

    def application(self) -> Guard:
        routes = [
            Route(CHAT, TextEndpoint(self._service, ChatRequest, _chat), methods=["POST"]),
            Route(COMPLETIONS, TextEndpoint(self._service, CompletionRequest, _completion), methods=["POST"]),
            *ResponsesApi(self._service).routes(),
            *messages_routes(self._service),
            Route(MODELS, self._models, methods=["GET"]),
            Route(MODELS + "/{model:path}", self._model, methods=["GET"]),
            Route("/drafters", self._drafters, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/version", self._version, methods=["GET"]),
            Route("/metrics", self._exposition, methods=["GET"]),
            *page_routes(),
        ]
        return Guard(Router(routes, redirect_slashes=False), self._auth, self._service.http_metrics, ROUTES)

    async def _models(self, request: HttpRequest) -> Response:  # noqa: ARG002 - Starlette's signature
        return json_response({"object": "list", "data": [self._card(self._service.cloud.serving())]})

    async def _model(self, request: HttpRequest) -> Response:
        served = self._service.cloud.serving()
        served.check_model(request.path_params["model"])
        return json_response(self._card(served))

    def _card(self, served: Served) -> dict[str, Any]:
        known = served.ready.prompts.context_length
        return {
            "id": served.ready.model,
            "object": "model",
            "created": self._started,
            "owned_by": "outrider",
            "max_model_len": known or None,
        }

    async def _health(self, request: HttpRequest) -> Response:
        """Answer with the status, and with what it is due to where a request needs no key, or shows one."""
        cloud, keys = self._service.cloud, self._auth.keys
        status, reason = cloud.health
        drafter = cloud.client.drafter_name
        if keys is not None and request.scope["state"]["key"] is None:
            reason, drafter = WITH_A_KEY if reason else "", ""
        if self._service.limiter.draining:
            status, reason = "unavailable", SHUTTING_DOWN
        elif keys is not None and keys.unusable:
            status, reason = "unavailable", "every API key is refused: the file of keys is unusable; the log says why"
        body = {"status": status, "reason": reason, "drafter": drafter}
        if status == "unavailable":
            return json_response(body, 503, {"Retry-After": "2"})
        return json_response(body)

    async def _drafters(self, request: HttpRequest) -> Response:  # noqa: ARG002
        """Answer with the versions of the drafters, as in `outrider status --json`."""
        return json_response({"versions": [asdict(each) for each in await self._service.cloud.client.versions()]})

    async def _version(self, request: HttpRequest) -> Response:  # noqa: ARG002
        return json_response({"version": release()})

    async def _exposition(self, request: HttpRequest) -> Response:
        body, content_type = self._service.metrics.exposition(request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})


def _chat(request: ChatRequest, state: Mapping[str, Any]) -> Adapted:  # noqa: ARG001 - for APIs that need it
    return Adapted(request, partial(ChatAnswer, request))


def _completion(request: CompletionRequest, state: Mapping[str, Any]) -> Adapted:  # noqa: ARG001
    return Adapted(request, partial(CompletionAnswer, request))


def page_routes() -> list[Route]:
    """Return the routes of the page: `/` and `/page/FILE`, for GET and HEAD."""
    files = {path.relative_to(PAGE).as_posix(): path for path in PAGE.rglob("*") if path.suffix in MEDIA_TYPES}

    async def page(request: HttpRequest) -> Response:
        path = files.get(request.path_params.get("name", "index.html"))
        if path is None:
            return PlainTextResponse("no such file", status_code=404, headers=PAGE_HEADERS)
        return FileResponse(path, media_type=MEDIA_TYPES[path.suffix], headers=PAGE_HEADERS)

    return [Route("/", page, methods=["GET"]), Route("/page/{name:path}", page, methods=["GET"])]
