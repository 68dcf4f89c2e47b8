"""The JSON body of a request, read with limits."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from outrider.edge.daemon.errors import ApiError

MOST_BYTES = 8 << 20  # as much as a message to a verifier holds
MOST_THROWN_AWAY = 64 << 20
WITHIN_S = 60.0
_CLOSE = {"Connection": "close"}


async def json_object(request: Request) -> dict[str, Any]:
    """The object in the body.

    Raises:
        ApiError: 415 another type, 413 too long, 400 no JSON object in UTF-8.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise ApiError(415, "the body must be JSON; send Content-Type: application/json", code="unsupported_media_type")
    return _parsed(await _read(request))


async def _read(request: Request) -> bytes:
    """The body.

    The rest of one that is too long is taken and thrown away, up to a point: a client that is cut off while it writes
    would never see the answer.
    """
    body = bytearray()
    taken = 0
    try:
        async with asyncio.timeout(WITHIN_S):
            async for piece in request.stream():
                taken += len(piece)
                if taken <= MOST_BYTES:
                    body += piece
                elif taken > MOST_THROWN_AWAY:
                    break
    except ClientDisconnect as error:
        raise ApiError(400, "the body broke off") from error
    except TimeoutError as error:
        raise ApiError(408, f"the body did not come within {WITHIN_S:g} s", headers=_CLOSE) from error
    if taken > MOST_BYTES:
        headers = _CLOSE if taken > MOST_THROWN_AWAY else None
        raise ApiError(413, f"the body has more than {MOST_BYTES} bytes", code="body_too_large", headers=headers)
    return bytes(body)


def _parsed(body: bytes) -> dict[str, Any]:
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
