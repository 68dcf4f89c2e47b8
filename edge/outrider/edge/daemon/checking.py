"""Checks of requests against their schema, and what becomes of fields that it does not know."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

from pydantic import ValidationError

from outrider.edge.daemon.errors import ApiError
from outrider.edge.daemon.strict import Strict

MAX_NAMED = 8  # fields in one header or error
MAX_LOGGED = 100  # fields over the daemon's life
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.\[\]-]{0,79}")
_NOTHING = object()
_ODD = "(a field with an odd name)"

R = TypeVar("R", bound=Strict)

log = logging.getLogger(__name__)


class UnknownFields(Protocol):
    """A rule for fields that the schema does not know."""

    def check(self, kind: type[R], body: dict[str, Any]) -> tuple[R, list[str]]:
        """Return the request in a JSON object, and the names of what was ignored.

        Raises:
            ApiError: 400 that names the first field at fault, or all that are unknown and refused.
        """
        ...


class RefuseUnknown:
    """Unknown fields are errors: whoever misspells one hears of it."""

    def check(self, kind: type[R], body: dict[str, Any]) -> tuple[R, list[str]]:
        """Return the request, of which nothing is ignored."""
        return checked(kind, body), []


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
    """Return the request in a JSON object that has no unknown fields.

    Raises:
        ApiError: 400 that names the first field at fault, or all that are unknown.
    """
    try:
        return _validated(kind, body)
    except ValidationError as error:
        raise _as_api_error(error) from error


def header_of(ignored: list[str]) -> str:
    """Return the value of the header that names ignored fields."""
    more = len(ignored) - MAX_NAMED
    return ", ".join([*ignored[:MAX_NAMED], *([f"and {more} more"] if more > 0 else [])])


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
