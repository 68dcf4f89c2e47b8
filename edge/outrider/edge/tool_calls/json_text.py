"""Incremental reading of the JSON in a call: its head, up to the arguments, and the end of an object."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum
from typing import Any

SPACE = re.compile(r"[ \t\r\n]*")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
_BEGUN_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*\\?')
_MARKS = re.compile(r'["{}\[\]\\]')
_ARGUMENTS = ('"arguments"', '"parameters"')
_FIRST_KEYS = ('"name"', '"type"', '"id"', '"function"', *_ARGUMENTS)
_NAMES = ("name", "function")


class Unread(Enum):
    """Reasons for which something is not read yet or never will be."""

    WAIT = "more text may complete it"
    NEVER = "no text can"


@dataclass(frozen=True, slots=True)
class Head:
    """Beginning of a call's object; its arguments begin at `at`."""

    name: str
    at: int


def read_head(text: str, at: int) -> Head | Unread:
    """Read `{"name": "…", "arguments": ` at `at`, which an object follows."""
    for step in ("{", ('"name"',), ":", "string", ",", _ARGUMENTS, ":"):
        at = skip_space(text, at)
        if step == "string":
            found = _STRING.match(text, at)
            if found is None:
                return Unread.WAIT if _BEGUN_STRING.fullmatch(text, at) or at == len(text) else Unread.NEVER
            written, at = found[0], found.end()
        else:
            literal = _literal(text, at, step)
            if isinstance(literal, Unread):
                return literal
            at += len(literal)
    at = skip_space(text, at)
    if at == len(text):
        return Unread.WAIT
    name = _loaded(written)
    return Head(name, at) if text[at] == "{" and isinstance(name, str) and name else Unread.NEVER


def read_first_key(text: str, at: int) -> str | Unread:
    """Read `{` and the first key at `at`, where that is one of a call's, whatever the order of its keys."""
    at = skip_space(text, at)
    if not text.startswith("{", at):
        return Unread.WAIT if at == len(text) else Unread.NEVER
    return _literal(text, skip_space(text, at + 1), _FIRST_KEYS)


def call_of(text: str) -> tuple[str, str] | None:
    """Return name and arguments in the whole object of a call; None: it is none."""
    made = _loaded(text)
    if not isinstance(made, dict):
        return None
    inner = made["function"] if isinstance(made.get("function"), dict) else made
    name = next((inner[key] for key in _NAMES if isinstance(inner.get(key), str)), "")
    arguments: Any = inner.get("arguments", inner.get("parameters", {}))
    if isinstance(arguments, str):  # JSON in JSON
        arguments = _loaded(arguments)
    if not name or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)


def skip_space(text: str, at: int) -> int:
    """Return where the white space at `at` ends."""
    found = SPACE.match(text, at)
    return found.end() if found else at


def begins(literal: str, text: str, at: int) -> bool:
    """Return whether all that `text` has from `at` on is the beginning of `literal`."""
    return len(text) - at < len(literal) and literal.startswith(text[at:])


class ObjectEnd:
    """Search for the end of an object or list, in text that comes in pieces and begins inside `depth` of them."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._quoted = False
        self._skip = False  # the next character: it is escaped

    def find(self, text: str) -> int | None:
        """Return the length of the share of `text` up to the end; None: that is not in it."""
        at = 0
        while at < len(text):
            if self._skip:
                self._skip = False
                at += 1
                continue
            found = _MARKS.search(text, at)
            if found is None:
                return None
            at = found.end()
            self._take(found[0])
            if self._depth == 0:
                return at
        return None

    def _take(self, mark: str) -> None:
        if self._quoted:
            self._quoted = mark != '"'
            self._skip = mark == "\\"
        elif mark == '"':
            self._quoted = True
        elif mark in "{[":
            self._depth += 1
        elif mark in "}]":
            self._depth -= 1


def _literal(text: str, at: int, step: str | tuple[str, ...]) -> str | Unread:
    literals = (step,) if isinstance(step, str) else step
    for literal in literals:
        if text.startswith(literal, at):
            return literal
    return Unread.WAIT if any(begins(literal, text, at) for literal in literals) else Unread.NEVER


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
