"""Bodies of requests: read, parsed and checked by their schema within limits, unknown fields among them."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from outrider.edge.daemon.api_access import MAX_NAMED
from outrider.edge.daemon.http_errors import ApiError, invalid
from outrider.edge.daemon.schema import ChatRequest, Strict

MAX_BYTES = 8 << 20  # as much as a message to a verifier holds
MAX_DISCARDED_BYTES = 64 << 20
BODY_WITHIN_S = 60.0
_IN_THREAD = 1 << 16  # bytes; shorter bodies are parsed sooner than a thread takes over
_CLOSE = {"Connection": "close"}
MAX_LOGGED = 100  # fields over the daemon's life
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.\[\]-]{0,79}")
_NOTHING = object()
_ODD = "(a field with an odd name)"

R = TypeVar("R", bound=Strict)

log = logging.getLogger(__name__)


class IgnoreUnknown:
    """Unknown fields are ignored; the answer's header names them, and the log each name once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def check(self, kind: type[R], body: dict[str, Any]) -> tuple[R, list[str]]:
        """Return the request without its unknown fields, which are taken out of `body`."""
        ignored: dict[str, None] = {}
        while True:
            try:
                request = _validated(kind, body)
            except ValidationError as error:
                unknown = [problem["loc"] for problem in _problems(error) if problem["type"] == "extra_forbidden"]
                removed = [location for location in unknown if _remove(body, location)]
                if not removed:
                    raise _as_api_error(error) from error
                ignored |= dict.fromkeys(map(_safe_name, removed))
            else:
                self._log(ignored)
                return request, list(ignored)

    def _log(self, ignored: Iterable[str]) -> None:
        fresh = [name for name in ignored if name not in self._logged][: MAX_LOGGED - len(self._logged)]
        if fresh:
            self._logged.update(fresh)
            log.warning("ignored fields of a request: %s; --strict refuses them", ", ".join(fresh))


def checked(kind: type[R], body: dict[str, Any]) -> R:
    """Return a request; raise `ApiError` 400 that names the first field at fault, or all that are unknown."""
    try:
        return _validated(kind, body)
    except ValidationError as error:
        raise _as_api_error(error) from error


def as_chat(**fields: Any) -> ChatRequest:
    """Return the chat with these fields, without those that are None; raises as `checked` does."""
    return checked(ChatRequest, {name: value for name, value in fields.items() if value is not None})


def _validated(kind: type[R], body: dict[str, Any]) -> R:
    try:
        return kind.model_validate(body)
    except (OverflowError, RecursionError) as error:
        raise ApiError(400, f"the body cannot be read: {error}") from error


def _problems(error: ValidationError) -> list[Any]:
    return error.errors(include_url=False, include_input=False)


def _remove(body: Any, location: tuple[int | str, ...]) -> bool:
    """Take the field at a pydantic location out of `body`, and return whether it was there.

    Parts of the location that lead nowhere are pydantic's own, such as the name of a union's member.
    """
    *way, name = location
    for part in way:
        if isinstance(body, dict):
            body = body.get(part, body)
        elif isinstance(body, list) and isinstance(part, int):
            body = body[part]
    return isinstance(body, dict) and body.pop(name, _NOTHING) is not _NOTHING


def _safe_name(location: tuple[int | str, ...]) -> str:
    """Return a field's name without its places in lists; a name may hold anything, and a header may not."""
    name = re.sub(r"\[\d+\]", "[]", _path(location))
    return name if _PLAIN.fullmatch(name) else _ODD


def _as_api_error(error: ValidationError) -> ApiError:
    problems = _problems(error)
    unknown = [_path(problem["loc"]) for problem in problems if problem["type"] == "extra_forbidden"]
    if unknown:
        named = ", ".join(unknown[:MAX_NAMED])
        return ApiError(400, f"unknown field: {named}; see the API reference", param=unknown[0], code="unknown_field")
    first = problems[0]
    path = _path(first["loc"])
    if first["type"] == "missing":
        return ApiError(400, f"{path}: is missing", param=path, code="missing_required_parameter")
    if not path and first["type"] == "refused":
        path = str(first["msg"]).partition(" ")[0].partition(".")[0]
        return ApiError(400, str(first["msg"]), param=path, code="invalid_value")
    message = str(first["msg"])
    return ApiError(400, f"{path}: {message[:1].lower()}{message[1:]}", param=path or None, code="invalid_value")


def _path(location: tuple[int | str, ...]) -> str:
    """Return a pydantic location as `messages[0].content`, without what it adds for unions and aliases."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.replace("_", "").isalnum() or not path or "[" not in part:
            path += f".{part}" if path else str(part)
    return path[:200]


async def read_request(
    kind: type[R], request: HttpRequest, take_bytes: Callable[[int], None], unknown: IgnoreUnknown | None
) -> R:
    """Read the JSON object in the body of a request, and check it; `state.ignored` names what is not heeded.

    Unknown fields are errors where `unknown` is None.

    Raises:
        ApiError: 415 another type, 413 too long, 429 too much beside other bodies, 400 no JSON object in UTF-8, or
            a field at fault.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise ApiError(415, "the body must be JSON; send Content-Type: application/json", code="unsupported_media_type")
    body = await _read(request, take_bytes)
    read: R

    def check() -> tuple[R, list[str]]:
        parsed = _parse_json(body)
        return (checked(kind, parsed), []) if unknown is None else unknown.check(kind, parsed)

    read, request.state.ignored = check() if len(body) < _IN_THREAD else await asyncio.to_thread(check)
    return read


async def _read(request: HttpRequest, take_bytes: Callable[[int], None]) -> bytes:
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
                    take_bytes(len(piece))
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


def string_in(value: Mapping[str, Any], name: str, where: str) -> str:
    """Return the string of a field of the object at `where`; raise `ApiError` 400 where it is none."""
    text = value.get(name)
    if not isinstance(text, str):
        raise invalid(f"{where}.{name}", "must be a string")
    return text


def type_of(value: Any, where: str) -> str:
    """Return the `type` of the object at `where`; raise `ApiError` 400 where it has none."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        raise invalid(where, "is no object with a type")
    return kind


def joined_text(value: Any, where: str, items: str, text_of: Callable[[Any, str], str]) -> str:
    """Return a string, or the text of a list of such `items`, a line each; raise `ApiError` 400 where it is neither."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid(where, f"must be a string or a list of {items}")
    return "\n".join(text_of(item, f"{where}[{at}]") for at, item in enumerate(value))
