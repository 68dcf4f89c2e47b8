"""Bodies of requests: read, parsed and checked within limits."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any, NoReturn, TypeVar

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from outrider.edge.daemon.access import HeldRequest
from outrider.edge.daemon.checking import UnknownFields
from outrider.edge.daemon.errors import ApiError
from outrider.edge.daemon.strict import Strict

MAX_BYTES = 8 << 20  # as much as a message to a verifier holds
MAX_DISCARDED_BYTES = 64 << 20
BODY_WITHIN_S = 60.0
_IN_THREAD = 1 << 16  # bytes; shorter bodies are parsed sooner than a thread takes over
_CLOSE = {"Connection": "close"}
R = TypeVar("R", bound=Strict)


async def read_request(kind: type[R], request: HttpRequest, place: HeldRequest, unknown: UnknownFields) -> R:
    """Read the JSON object in the body of a request, and check it; `state.ignored` names what is not heeded.

    Raises:
        ApiError: 415 another type, 413 too long, 429 too much beside other bodies, 400 no JSON object in UTF-8, or
            a field at fault.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise ApiError(415, "the body must be JSON; send Content-Type: application/json", code="unsupported_media_type")
    body = await _read(request, place)
    if len(body) < _IN_THREAD:
        checked, request.state.ignored = unknown.check(kind, _parse_json(body))
    else:
        checked, request.state.ignored = await asyncio.to_thread(lambda: unknown.check(kind, _parse_json(body)))
    return checked


async def _read(request: HttpRequest, place: HeldRequest) -> bytes:
    """Read the body.

    The rest of one that is too long is read and thrown away, up to a point: a client that is cut off while it writes
    would never see the answer.
    """
    body = bytearray()
    taken = 0
    try:
        async with asyncio.timeout(BODY_WITHIN_S):
            async for piece in request.stream():
                taken += len(piece)
                if taken <= MAX_BYTES:
                    place.take(len(piece))
                    body += piece
                elif taken > MAX_DISCARDED_BYTES:
                    break
    except ClientDisconnect as error:
        raise ApiError(400, "the body broke off") from error
    except TimeoutError as error:
        raise ApiError(408, f"the body did not come within {BODY_WITHIN_S:g} s", headers=_CLOSE) from error
    if taken > MAX_BYTES:
        headers = _CLOSE if taken > MAX_DISCARDED_BYTES else None
        raise ApiError(413, f"the body has more than {MAX_BYTES} bytes", code="body_too_large", headers=headers)
    return bytes(body)


def _parse_json(body: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(body, parse_constant=_no_constant, parse_float=_finite)
        if b"\\ud" in body.lower():
            json.dumps(parsed, ensure_ascii=False).encode()
    except UnicodeError as error:
        raise ApiError(400, "the body is not UTF-8, or holds half a surrogate pair", code="invalid_json") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from error
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {str(error)[:200]}", code="invalid_json") from error
    if not isinstance(parsed, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return parsed


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is beyond any number")
    return value
