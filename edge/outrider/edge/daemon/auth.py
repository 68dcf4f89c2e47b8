"""Checks that every request passes: access, its id, its line in the log, its count."""

from __future__ import annotations

import logging
import re
import time
import uuid
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.edge.daemon.errors import DEFECT, ApiError
from outrider.edge.daemon.metrics import HttpMetrics
from outrider.proto.address import is_loopback
from outrider.proto.errors import Unauthenticated
from outrider.proto.plumbing.access import Key, Keys
from outrider.proto.plumbing.logs import about

REQUEST_ID = "X-Request-Id"
API = "/v1/"
_SAFE_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LOCAL_NAMES = ("localhost",)
_QUIET = ("/health", "/metrics")  # asked for every few seconds

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Auth:
    """Rules of access.

    Attributes:
        listen_host: host that the daemon listens on.
        keys: keys of which a request to the API must show one; None: none is asked for.
    """

    listen_host: str
    keys: Keys | None = None

    def check(self, path: str, headers: Headers) -> Key | None:
        """Return the key that a request shows, if one is asked for.

        A browser sends requests on behalf of any page that it shows. So a page from elsewhere is refused by its
        Origin, and a name that was rebound to the loopback address (DNS rebinding) by its Host: on loopback and
        without keys only names of this machine are taken.

        Raises:
            ApiError: 403 it comes from elsewhere, 401 it shows no key.
        """
        host = headers.get("host", "")
        if self.keys is None and is_loopback(self.listen_host) and not self._is_ours(_name(host)):
            raise ApiError(403, f"{host[:100]!r} is not a name of this machine", code="host_not_allowed")
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            raise ApiError(403, "pages from elsewhere may not use this API", code="origin_not_allowed")
        if not path.startswith(API):
            return None
        if origin is None and headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            raise ApiError(403, "pages from elsewhere may not use this API", code="origin_not_allowed")
        return None if self.keys is None else self._key(headers.get("authorization", ""))

    def _is_ours(self, name: str) -> bool:
        named = name in (*_LOCAL_NAMES, self.listen_host.lower(), "") or name.endswith(".localhost")
        return named or is_loopback(name)

    def _key(self, authorization: str) -> Key:
        assert self.keys is not None  # noqa: S101 - asked only where there are keys
        try:
            return self.keys.check_header(authorization)
        except Unauthenticated as error:
            missing = not authorization
            raise ApiError(
                401,
                "no API key; send it as Authorization: Bearer KEY" if missing else "the API key is not known here",
                code="missing_api_key" if missing else "invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            ) from error


class Guard:
    """ASGI middleware around the application; it puts `request_id`, `key` and `began` into `scope["state"]`."""

    def __init__(self, app: ASGIApp, auth: Auth, http_metrics: HttpMetrics, routes: frozenset[str]) -> None:
        self._app = app
        self._auth = auth
        self._http_metrics = http_metrics
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _request_id(headers.get(REQUEST_ID, ""))
        state: dict[str, Any] = scope.setdefault("state", {})
        state.update(request_id=request_id, key=None, began=time.monotonic())
        answer = _Response(send, request_id)
        try:
            state["key"] = self._auth.check(scope["path"], headers)
            await self._app(scope, receive, answer)
        except ApiError as error:
            await self._fail(error, scope, receive, answer)
        except Exception:  # a request's top: the client gets an answer, the log the reason
            log.exception("a request failed", extra=about(session=request_id))
            await self._fail(DEFECT, scope, receive, answer)
        finally:
            self._account(scope, answer.status)

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, answer: _Response) -> None:
        if not answer.status:
            await error.response()(scope, receive, answer)

    def _account(self, scope: Scope, status: int) -> None:
        state, path = scope["state"], scope["path"]
        self._http_metrics.answered(
            path if path in self._routes else "other", status or 499
        )  # nginx's: the client left
        seconds = time.monotonic() - state["began"]
        whose = f" key={state['key'].name}" if state["key"] is not None else ""
        level = logging.DEBUG if path in _QUIET else logging.INFO
        line = "%s %s %d %.3f s%s"
        fields = (scope["method"], path[:200], status, seconds, whose)
        log.log(level, line, *fields, extra=about(session=state["request_id"]))


class _Response:
    """A `send` that puts the request's id on the answer and remembers its status; 0: none yet."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = int(message["status"])
            MutableHeaders(scope=message)[REQUEST_ID] = self._request_id
        await self._send(message)


def _request_id(given: str) -> str:
    return given if _SAFE_ID.fullmatch(given) else uuid.uuid4().hex


def _name(host: str) -> str:
    """Return the name in a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
