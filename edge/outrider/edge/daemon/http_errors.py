"""The error tree as HTTP: OpenAI's statuses, error object and headers, and Anthropic's below /v1/messages."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from outrider.proto.errors import (
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    OutriderError,
    PermissionDenied,
    PromptTooLong,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)

RETRY_S = 1.0
MESSAGES = "/v1/messages"  # the path of Anthropic's API
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
# Fields that the contract and OpenAI's API name differently.
_PARAMS = {
    "open.prompt": "prompt",
    "open.model": "model",
    "open.top_logprobs": "top_logprobs",
    "sampling.stop_tokens": "stop_token_ids",
    "sampling.bias_tokens": "logit_bias",
    "sampling.bias_values": "logit_bias",
    "sampling.grammar": "response_format",
    "chat_template": "messages",
}


class ApiError(Exception):
    """An error that a client gets instead of an answer.

    Args:
        status: HTTP status.
        message: what is wrong and how to mend it.
        param: the field of the request at fault.
        code: OpenAI's word for it, for programs.
        retry_after_s: when the same request may succeed; 0: not by itself.
        headers: further HTTP headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float = 0.0,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        if retry_after_s > 0:
            self.headers["Retry-After"] = str(math.ceil(retry_after_s))

    @property
    def kind(self) -> str:
        """OpenAI's `type`."""
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


DEFECT = ApiError(500, "the daemon failed on this request; its log says why", code="internal_error")


def from_outrider(error: OutriderError, field: str = "") -> ApiError:
    """Return what an error of the tree is to a client of the daemon.

    The daemon's own credentials and its choice of tokenizer are the operator's affair: to the client the service is
    not available, and the message says what the operator has to mend.

    Args:
        error: what went wrong.
        field: the client's own name of the field at fault; empty: as the contract's field is called in OpenAI's API.
    """
    param = field or _PARAMS.get(error.field, error.field.rpartition(".")[2]) or None
    match error:
        case PromptTooLong():
            return ApiError(400, str(error.message), param=param, code="context_length_exceeded")
        case InvalidArgument():
            return ApiError(400, f"{param}: {error.message}" if param else error.message, param=param)
        case NotFound():
            code = "model_not_found" if param == "model" else "not_found"
            return ApiError(404, error.message, param=param, code=code)
        case ResourceExhausted():
            wait_s = error.retry_after_s or RETRY_S
            return ApiError(429, error.message, code="rate_limit_exceeded", retry_after_s=wait_s)
        case DeadlineExceeded():
            return ApiError(504, error.message, code="deadline_exceeded")
        case Unavailable() | Unauthenticated() | PermissionDenied() | FailedPrecondition() | Cancelled():
            return ApiError(503, str(error), code="unavailable", retry_after_s=error.retry_after_s or RETRY_S)
    return ApiError(500, str(error), code="internal_error")


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """Return an error with the names that another API has for OpenAI's fields."""
    path = error.param or ""
    field = path.partition(".")[0].partition("[")[0]
    if field not in names:
        return error
    name = names[field]
    message = name + error.message.removeprefix(path) if path and error.message.startswith(path) else error.message
    made = ApiError(error.status, message, param=name, code=error.code)
    made.headers = error.headers
    return made


def invalid(field: str, message: str) -> ApiError:
    """Return the error of a field at fault."""
    return ApiError(400, f"{field}: {message}", param=field, code="invalid_value")


def json_bytes(value: Any) -> bytes:
    """Return JSON in UTF-8; what cannot be written in UTF-8 is replaced."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(errors="replace")


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return an answer of JSON."""
    return Response(json_bytes(value), status, headers, media_type="application/json")


def is_anthropic(path: str) -> bool:
    """Return whether a path belongs to Anthropic's API."""
    return path == MESSAGES or path.startswith(MESSAGES + "/")


def error_response(scope: Scope, error: ApiError) -> Response:
    """Return an error as the whole answer to a request."""
    if not is_anthropic(scope["path"]):
        return json_response(error.body(), error.status, error.headers)
    status = _STATUSES.get(error.status, error.status)
    return json_response(error_body(error, scope["state"]["request_id"]), status, error.headers)


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """Return Anthropic's error object."""
    kind = _TYPES.get(_STATUSES.get(error.status, error.status), "invalid_request_error")
    made: dict[str, Any] = {"type": kind, "message": error.message}
    if error.code == NO_THREADS:
        made["details"] = {"error_code": NO_THREADS}
    return {"type": "error", "error": made, "request_id": request_id}
