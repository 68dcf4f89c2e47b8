"""The formats in which targets call functions, and which of them a chat template speaks."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass

from outrider.edge.tool_calls.json_text import begins, skip_space
from outrider.edge.tool_calls.reading import MAX_HEAD, CallParser

AUTO = "auto"
_KNOWS_TOOLS = re.compile(r"\btools\b")
_OF_OTHERS = ("<function=", "<arg_key>")  # inside <tool_call>, where Hermes has an object
_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")

HERMES_CALL, HERMES_END = "<tool_call>", "</tool_call>"
LLAMA3_CALL = "<|python_tag|>"
MISTRAL_CALL, MISTRAL_CALL_ID, MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_BETWEEN_CALLS = re.compile(r"[\s;]*")
_NAMED = re.compile(r"\s*+([\w.:/-]++)\s*+(?:\[CALL_ID\]\s*+\w++\s*+)?(?:\[ARGS\]\s*+)?(?=\{)", re.ASCII)
_BEGUN = re.compile(r"\s*+[\w.:/-]*+\s*+(?:\[[A-Z_]*+(?:\]\s*+\w*+\s*+(?:\[[A-Z]*+(?:\]\s*+)?)?)?)?", re.ASCII)


class HermesParser(CallParser):
    """Parser of `<tool_call>`, an object, `</tool_call>`; a call without its end mark counts all the same."""

    _marker = HERMES_CALL

    def _opened(self) -> bool:
        return self._object()

    def _after(self) -> bool:
        at = skip_space(self._rest, 0)
        if at < MAX_HEAD and begins(HERMES_END, self._rest, at):
            return self._wait()
        if at < MAX_HEAD and self._rest.startswith(HERMES_END, at):
            self._rest = self._rest[at + len(HERMES_END) :]
        self._state = self._text
        return True


class Llama3Parser(CallParser):
    """Parser of an object as the whole answer, if it names one of the functions, or anywhere after `<|python_tag|>`."""

    _marker = LLAMA3_CALL

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._tagged = False
        self._state = self._start

    def _start(self) -> bool:
        at = len(self._rest) - len(self._rest.lstrip())
        if at == len(self._rest) and not self._head_ends:
            return False
        return self._object_at(at) or self._as_text()

    def _opened(self) -> bool:
        self._tagged = True
        return self._object()

    def _after(self) -> bool:
        found = _BETWEEN_CALLS.match(self._rest)
        at = found.end() if found else 0
        if at == len(self._rest) and at < MAX_HEAD:
            return self._wait()
        return self._object_at(at) or self._as_text()

    def _accepts(self, name: str) -> bool:
        return self._tagged or name in self._names

    def _object_at(self, at: int) -> bool:
        if at >= MAX_HEAD or not self._rest.startswith("{", at):
            return False
        self._hold(at)
        self._state = self._object
        return True

    def _as_text(self) -> bool:
        self._tagged = False
        self._state = self._text
        return True


class MistralParser(CallParser):
    """Parser of `[TOOL_CALLS]` and a list of objects, or names and arguments, whose ids are left out."""

    _marker = MISTRAL_CALL

    def _opened(self) -> bool:
        at = skip_space(self._rest, 0)
        if not self._rest.startswith("[", at):
            return self._named()
        at = skip_space(self._rest, at + 1)
        if at == len(self._rest) and not self._head_ends:
            return False
        if at >= MAX_HEAD:
            return self._give_up()
        self._hold(at)
        self._state = self._object
        return True

    def _named(self) -> bool:
        head = self._rest[:MAX_HEAD]
        found = _NAMED.match(head)
        if found is not None:
            self._rest = self._rest[found.end() :]
            self._begin(found[1], self._text)
            return True
        return False if not self._head_ends and _BEGUN.fullmatch(head) else self._give_up()

    def _after(self) -> bool:
        at = skip_space(self._rest, 0)
        if at < MAX_HEAD:
            if at == len(self._rest):
                return self._wait()
            if self._rest[at] == ",":
                self._hold(at + 1)
                self._state = self._object
                return True
            self._rest = self._rest[at + (self._rest[at] == "]") :]
        self._state = self._text
        return True


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Format in which a target calls functions.

    Attributes:
        name: as in `--tool-format`.
        markers: texts of the format that may be special tokens, which a text would otherwise not show.
        parser: reads a text.
        new_id: makes the id of a call.
        old_id: makes an id that the format's templates take of a client's.
    """

    name: str
    markers: tuple[str, ...]
    parser: type[CallParser]
    new_id: Callable[[], str]
    old_id: Callable[[str], str]


def _openai_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_id() -> str:
    return secrets.token_hex(5)[:9]


def _as_mistral_id(given: str) -> str:
    """Return an id of nine letters and digits, the same for the same id."""
    return given if _MISTRAL_ID.fullmatch(given) else hashlib.sha256(given.encode(errors="replace")).hexdigest()[:9]


FORMATS = {
    each.name: each
    for each in (
        ToolFormat("hermes", (HERMES_CALL, HERMES_END), HermesParser, _openai_id, str),
        ToolFormat("llama3", (LLAMA3_CALL,), Llama3Parser, _openai_id, str),
        ToolFormat(
            "mistral", (MISTRAL_CALL, MISTRAL_CALL_ID, MISTRAL_ARGUMENTS), MistralParser, _mistral_id, _as_mistral_id
        ),
    )
}
NAMES = (AUTO, *FORMATS)


def knows_tools(template: str) -> bool:
    """Return whether a chat template shows functions to the model."""
    return _KNOWS_TOOLS.search(template) is not None


def format_of(template: str) -> ToolFormat | None:
    """Return the format that a chat template describes or writes; None: another, or none."""
    if MISTRAL_CALL in template:
        return FORMATS["mistral"]
    if HERMES_CALL in template:
        return None if any(mark in template for mark in _OF_OTHERS) else FORMATS["hermes"]
    if LLAMA3_CALL in template or ('"parameters": ' in template and "ipython" in template):
        return FORMATS["llama3"]
    return None
