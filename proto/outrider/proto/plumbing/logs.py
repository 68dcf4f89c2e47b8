"""Logs of every process: one line a record, as text or as JSON, with the session that it is about.

    log.warning("the stream was lost", extra=about(session, verifier, error))

A line says what happened to which session. It never holds a prompt, a text, a token id, a lease or a key: callers pass
names, counts and errors only.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import textwrap
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TextIO

from outrider.proto.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
STAGES = "outrider.stages"  # logger of what a process that loads is at, for terminals, too
_FIELDS = ("session", "verifier", "error")


def about(session: str = "", verifier: str = "", error: BaseException | None = None) -> dict[str, Any]:
    """Return the `extra` of a log call: the session and the verifier that it is about, and the kind of error."""
    return {"session": session, "verifier": verifier, "error": type(error).__name__ if error is not None else ""}


def configure(level: str, style: str) -> None:
    """Log from `level` on to standard error, as `text` or `json`, unless logging has been set up before.

    Raises:
        ConfigError: there is no such level or format.
    """
    if level not in LEVELS:
        raise ConfigError(f"{level!r} is none of {', '.join(LEVELS)}", field="log_level")
    if style not in FORMATS:
        raise ConfigError(f"{style!r} is none of {', '.join(FORMATS)}", field="log_format")
    handler = StandardError()
    handler.setFormatter(JsonLines() if style == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler])


def only_json() -> bool:
    """Return whether standard error is a log of JSON objects, in which a plain line would be an error."""
    return any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers)


class LineLimit:
    """One line a second of a kind that strangers can bring about, and how many were left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_s = -math.inf
        self._unsaid = 0

    def next_line(self) -> int | None:
        """Return how many lines were left out before the present one; None: leave this one out, too."""
        now_s = self._clock()
        if now_s < self._next_s:
            self._unsaid += 1
            return None
        self._next_s = now_s + 1.0
        unsaid, self._unsaid = self._unsaid, 0
        return unsaid


class StandardError(logging.StreamHandler[TextIO]):
    """A handler of what is standard error when a line comes, which may be above what a terminal keeps up to date."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]  # an attribute there
        return sys.stderr


class TextLines(logging.Formatter):
    """`2026-01-31T12:00:00.123Z WARNING outrider.edge.link.link: message session=… verifier=… error=…`.

    Control characters in a message are escaped, so that nobody can forge a line; a traceback follows, indented.
    """

    def format(self, record: logging.LogRecord) -> str:
        message = _escaped(record.getMessage())
        fields = "".join(f" {name}={_escaped(value)}" for name, value in _known(record).items())
        line = f"{_time(record)} {record.levelname} {record.name}: {message}{fields}"
        traceback = _traceback(record)
        return f"{line}\n{textwrap.indent(traceback, '  ')}" if traceback else line


class JsonLines(logging.Formatter):
    """One JSON object a line: time (UTC, ISO 8601), level, logger, message; session, verifier, error where known."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_known(record),
        }
        traceback = _traceback(record)
        if traceback:
            fields["traceback"] = traceback
        return json.dumps(fields)


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _known(record: logging.LogRecord) -> dict[str, str]:
    known = {name: str(getattr(record, name, "")) for name in _FIELDS}
    if not known["error"] and record.exc_info and record.exc_info[0] is not None:
        known["error"] = record.exc_info[0].__name__
    return {name: value for name, value in known.items() if value}


def _traceback(record: logging.LogRecord) -> str:
    if record.exc_info and record.exc_info[0] is not None:
        return logging.Formatter().formatException(record.exc_info)
    return ""


def _escaped(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
