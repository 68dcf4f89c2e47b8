"""Errors in the format of the API whose path was asked for: Anthropic's below /v1/messages, else OpenAI's."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from outrider.edge.daemon.errors import ApiError, json_response
from outrider.edge.daemon.messages import MESSAGES

NO_THREADS = "thread_unsupported_request"  # on which Anthropic's clients send whole conversations instead
OVERLOADED = 529
_STATUSES = {503: OVERLOADED}  # Anthropic's own status, which its clients try again
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


def is_anthropic(path: str) -> bool:
    """Return whether a path belongs to Anthropic's API."""
    return path == MESSAGES or path.startswith(MESSAGES + "/")


def error_response(scope: Scope, error: ApiError) -> Response:
    """Return an error as the whole answer to a request."""
    if not is_anthropic(scope["path"]):
        return error.response()
    status = _STATUSES.get(error.status, error.status)
    return json_response(error_body(error, scope["state"]["request_id"]), status, error.headers)


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """Return Anthropic's error object."""
    kind = _TYPES.get(_STATUSES.get(error.status, error.status), "invalid_request_error")
    made: dict[str, Any] = {"type": kind, "message": error.message}
    if error.code == NO_THREADS:
        made["details"] = {"error_code": NO_THREADS}
    return {"type": "error", "error": made, "request_id": request_id}
