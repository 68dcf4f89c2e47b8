"""Access to the daemon: keys, origins and hosts, the number of requests for texts, and a line of the log for each."""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.edge.daemon import ANY
from outrider.edge.daemon.daemon_metrics import HttpMetrics
from outrider.edge.daemon.http_errors import DEFECT, RETRY_S, ApiError, error_response, is_anthropic
from outrider.proto.address import is_loopback
from outrider.proto.error_codes import coded
from outrider.proto.errors import Unauthenticated
from outrider.proto.plumbing.access import Key, Keys
from outrider.proto.plumbing.logs import about

REQUEST_ID = "X-Request-Id"
ANTHROPIC_REQUEST_ID, ANTHROPIC_KEY = "request-id", "x-api-key"
IGNORED = "X-Outrider-Ignored"
HEALTH = "/health"
RESPONSES = "/v1/responses"
RESPONSE = RESPONSES + "/{response_id}"
MAX_NAMED = 8  # fields in one header or error
OPEN = ("/", HEALTH, "/version")  # besides the page's files, the paths that anybody may ask for: probes, and the page
SHUTTING_DOWN = "the daemon is shutting down"
RETRY_AFTER_END_S = 5.0
CLIENT_LEFT = 499  # nginx's status for it
MAX_BODIES_BYTES = 64 << 20  # of all requests that run; what becomes of a body takes ten times its size
SHARE_OF_A_KEY = 0.5  # of the slots and of the bodies' bytes that one key may have, where there are others
_SAFE_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_PAGE_FILES = "/page/"
_QUIET = ("/drafters", HEALTH, "/metrics")  # polled every few seconds
METHODS = "GET, POST, DELETE"
READABLE = "X-Request-Id, X-Outrider-Ignored, Retry-After"  # besides what scripts may read of any answer
PREFLIGHT_HOLDS_S = 600
_HEADER_NAMES = re.compile(r"[A-Za-z0-9_\-, ]{1,2000}")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Auth:
    """Rules of access.

    A browser sends requests on behalf of any page that it shows. So a page from elsewhere is refused by its Origin,
    unless that is allowed, and a name that was rebound to this machine's address (DNS rebinding) by its Host: without
    keys only names of this machine and allowed ones are taken, and beyond loopback addresses, which cannot be rebound.

    Attributes:
        listen_host: host that the daemon listens on.
        keys: keys of which a request must show one, unless its path is open; None: it needs none.
        allowed: further names by which a request without a key may reach it.
        origins: origins whose pages may use the API besides the daemon's own page, or `*` for all of them.
    """

    listen_host: str
    keys: Keys | None = None
    allowed: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()

    def check_site(self, path: str, headers: Headers) -> None:
        """Raise `ApiError` 403 for what a browser sends for a page from elsewhere; a link may lead to an open path."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.keys is None and not self._is_ours(_name(host.lower())):
            message = f"{host[:100]!r} is not a name of this machine; start the daemon with --allow-host for that name"
            raise ApiError(403, message, code="host_not_allowed")
        if origin is None:
            elsewhere = not _is_open(path) and headers.get("sec-fetch-site") in ("cross-site", "same-site")
        else:
            elsewhere = origin.partition("://")[2].lower() != host.lower() and not self._allows(origin)
        if elsewhere:
            message = "pages from elsewhere may not use this API; start the daemon with --allow-origin for their origin"
            raise ApiError(403, message, code="origin_not_allowed")

    def cors_headers(self, headers: Headers) -> dict[str, str]:
        """Return the headers by which a browser lets a page of another site read an answer."""
        if not self.origins:
            return {}
        origin = headers.get("origin", "")
        if not self._allows(origin):
            return {"Vary": "Origin"}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": READABLE,
            "Vary": "Origin",
        }

    def preflight(self, method: str, headers: Headers) -> Response | None:
        """Answer a browser's question before a request of an allowed page; None: it is no such question.

        Keys come with the request itself. No cookies exist, so none are allowed.
        """
        wanted = headers.get("access-control-request-headers", "")
        asked = method == "OPTIONS" and "access-control-request-method" in headers
        if not asked or not self._allows(headers.get("origin", "")):
            return None
        allowed = {"Access-Control-Allow-Methods": METHODS, "Access-Control-Max-Age": str(PREFLIGHT_HOLDS_S)}
        if _HEADER_NAMES.fullmatch(wanted):
            allowed["Access-Control-Allow-Headers"] = wanted  # clients send whatever names they like
        if headers.get("access-control-request-private-network") == "true":
            allowed["Access-Control-Allow-Private-Network"] = "true"  # a public site to an address of this network
        return Response(status_code=204, headers=allowed)

    def check_key(self, path: str, headers: Headers) -> Key | None:
        """Return the key that a request shows; None: it needs none. Raise `ApiError` 401 where it lacks one."""
        if self.keys is None:
            return None
        authorization, bare = headers.get("authorization", ""), headers.get(ANTHROPIC_KEY, "")
        try:
            return self.keys.check_header(authorization) if authorization else self.keys.check(bare)
        except Unauthenticated as error:
            if _is_open(path):
                return None
            code, message = "invalid_api_key", "the API key is not known here"
            if not authorization and not bare:
                code, message = "missing_api_key", "no API key; send it as Authorization: Bearer KEY, or x-api-key: KEY"
            challenge = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, coded("OUT-201", message), code=code, headers=challenge) from error

    def has_revoked(self, key: Key | None) -> bool:
        return key is not None and self.keys is not None and not self.keys.still_has(key)

    def _allows(self, origin: str) -> bool:
        return bool(origin) and (ANY in self.origins or origin.lower() in map(str.lower, self.origins))

    def _is_ours(self, name: str) -> bool:
        if name in ("localhost", self.listen_host.lower(), "", *(allowed.lower() for allowed in self.allowed)):
            return True
        if name.endswith(".localhost") or is_loopback(name):
            return True
        return not is_loopback(self.listen_host) and _is_address(name)


def _is_open(path: str) -> bool:
    return path in OPEN or path.startswith(_PAGE_FILES)


def _name(host: str) -> str:
    """Return the name in a Host header, without its port."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Guard:
    """ASGI middleware that checks, logs and counts requests.

    `scope["state"]` gets `request_id`, `key`, `began`, and `revoked`, which returns whether the key is taken no more;
    fields that whoever reads the body adds to `ignored` are named in the answer's headers.

    Attributes:
        app: the application, which gets HTTP alone.
        auth: rules of access.
        http_metrics: count the requests.
        routes: paths that the metrics name.
    """

    app: ASGIApp
    auth: Auth
    http_metrics: HttpMetrics
    routes: frozenset[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID, "")
        request_id = given if _SAFE_ID.fullmatch(given) else uuid.uuid4().hex
        state: dict[str, Any] = {"request_id": request_id, "key": None, "began": time.monotonic(), "ignored": []}
        scope["state"] = state
        scope["app"] = self.app  # so that the router raises what has no route
        status = 0  # none yet

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = int(message["status"])
                named = MutableHeaders(scope=message)
                named[REQUEST_ID] = request_id
                if is_anthropic(scope["path"]):
                    named[ANTHROPIC_REQUEST_ID] = request_id
                named.update(self.auth.cors_headers(headers))
                if state["ignored"]:
                    named[IGNORED] = _header_of(state["ignored"])
            await send(message)

        try:
            self.auth.check_site(scope["path"], headers)
            if (preflight := self.auth.preflight(scope["method"], headers)) is not None:
                return await preflight(scope, receive, answer)
            state["key"] = key = self.auth.check_key(scope["path"], headers)
            state["revoked"] = functools.partial(self.auth.has_revoked, key)
            await self.app(scope, receive, answer)
        except Exception as error:  # a request's top: the client gets an answer, the log the reason
            failure = _as_api_error(scope, error)
            if not status:
                await error_response(scope, failure)(scope, receive, answer)
        finally:
            self._account(scope, status)

    def _account(self, scope: Scope, status: int) -> None:
        state, path = scope["state"], scope["path"]
        self.http_metrics.answered(self._route(path), status or CLIENT_LEFT)
        log.log(
            logging.DEBUG if path in _QUIET else logging.INFO,
            "%s %s %d %.3f s%s",
            scope["method"],
            path[:200],
            status,
            time.monotonic() - state["began"],
            f" key={state['key'].name}" if state["key"] is not None else "",
            extra=about(session=state["request_id"]),
        )

    def _route(self, path: str) -> str:
        if path.startswith(RESPONSES + "/"):
            return RESPONSE
        return path if path in self.routes else "other"


def _as_api_error(scope: Scope, error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):  # the router's own 404 and 405
        path = scope["path"][:200]
        code, message = {
            404: ("not_found", f"there is nothing at {path}"),
            405: ("method_not_allowed", f"{scope['method']} is not for {path}; see Allow"),
        }.get(error.status_code, (None, error.detail))
        return ApiError(error.status_code, message, code=code, headers=dict(error.headers or {}))
    log.exception("a request failed", extra=about(session=scope["state"]["request_id"]), exc_info=error)
    return DEFECT


def _header_of(ignored: list[str]) -> str:
    """Return the value of the header that names ignored fields."""
    more = len(ignored) - MAX_NAMED
    return ", ".join([*ignored[:MAX_NAMED], *([f"and {more} more"] if more > 0 else [])])


class Limiter:
    """The number of requests for texts that run and the bytes of their bodies, which have limits.

    Where there are several keys, none has more than its share of either, so that it cannot shut out the others.

    Args:
        max_requests: requests that may run at once.
        http_metrics: count the requests.
        keys: keys of the daemon; None: it has none.

    Attributes:
        draining: whether the daemon ends and lets no more in.
        cut: set when what still runs has to end at once.
    """

    def __init__(self, max_requests: int, http_metrics: HttpMetrics, keys: Keys | None = None) -> None:
        self.draining = False
        self.cut = asyncio.Event()
        self._max_requests = max_requests
        self._http_metrics = http_metrics
        self._keys = keys
        self._requests: Counter[str] = Counter()  # by name of the key; empty: there are no keys
        self._bytes: Counter[str] = Counter()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def body_bytes(self) -> int:
        """Bytes of the bodies of requests that run."""
        return self._bytes.total()

    @contextmanager
    def enter(self, key: Key | None) -> Iterator[Callable[[int], None]]:
        """Let in a request of a key for as long as it runs; it calls the yielded function with its body's bytes.

        Raises:
            ApiError: 503 while draining, 429 when as many requests as may, or as may of the key, run already; the
                function raises 429, too, where the bodies of all requests, or of the key's, take too much.
        """
        if self.draining:
            raise ApiError(503, SHUTTING_DOWN, code="unavailable", retry_after_s=RETRY_AFTER_END_S)
        name = "" if key is None else key.name
        body_bytes = 0

        def take_bytes(num_bytes: int) -> None:
            nonlocal body_bytes
            reason = "{} bytes of requests{} are here already; send less"
            self._take(self._bytes, name, num_bytes, MAX_BODIES_BYTES, reason)
            body_bytes += num_bytes

        self._take(self._requests, name, 1, self._max_requests, "{} requests{} run already; raise --max-requests")
        self._http_metrics.running = self._requests.total()
        self._empty.clear()
        try:
            yield take_bytes
        finally:
            self._bytes -= Counter({name: body_bytes})  # without keys that have nothing left
            self._requests -= Counter({name: 1})
            self._http_metrics.running = self._requests.total()
            if not self._requests:
                self._empty.set()

    def _take(self, taken: Counter[str], key: str, more: int, most: int, reason: str) -> None:
        share = max(1, int(most * SHARE_OF_A_KEY))
        if taken.total() + more > most:
            message = reason.format(most, "")
        elif taken[key] + more > share and self._keys is not None and len(self._keys.current()) > 1:
            message = reason.format(share, " of this key")
        else:
            taken[key] += more
            return
        message = coded("OUT-305", f"{message}, or try again")
        raise ApiError(429, message, code="rate_limit_exceeded", retry_after_s=RETRY_S)

    async def drain(self, grace_s: float) -> None:
        """Let no more in, give what runs `grace_s` to end, then cut it."""
        self.draining = True
        for wait_s in (grace_s, RETRY_S):
            try:
                async with asyncio.timeout(wait_s):
                    await self._empty.wait()
            except TimeoutError:
                self.cut.set()
