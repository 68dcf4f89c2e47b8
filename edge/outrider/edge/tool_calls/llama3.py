"""Calls as Llama 3 writes them: an object as the whole answer, or anywhere after `<|python_tag|>`."""

from __future__ import annotations

import re
from collections.abc import Collection

from outrider.edge.tool_calls.reading import MAX_HEAD, CallReader

TAG = "<|python_tag|>"
_BETWEEN = re.compile(r"[\s;]*")


class Llama3Reader(CallReader):
    """Parser of one text; an object without the tag is a call only if it names one of the functions.

    Args:
        names: names of the functions.
    """

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(TAG)
        self._names = names
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
        found = _BETWEEN.match(self._rest)
        at = found.end() if found else 0
        if at == len(self._rest) and at < MAX_HEAD:
            if self._ended:
                self._rest = ""
            return False
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
