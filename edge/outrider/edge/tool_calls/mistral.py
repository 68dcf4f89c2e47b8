"""Calls as Mistral's models write them: `[TOOL_CALLS]` and a list of objects, or names and arguments."""

from __future__ import annotations

import re

from outrider.edge.tool_calls.json_text import skip_space
from outrider.edge.tool_calls.reading import MAX_HEAD, CallReader

CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAMED = re.compile(r"\s*+([\w.:/-]++)\s*+(?:\[CALL_ID\]\s*+\w++\s*+)?(?:\[ARGS\]\s*+)?(?=\{)", re.ASCII)
_BEGUN = re.compile(r"\s*+[\w.:/-]*+\s*+(?:\[[A-Z_]*+(?:\]\s*+\w*+\s*+(?:\[[A-Z]*+(?:\]\s*+)?)?)?)?", re.ASCII)


class MistralReader(CallReader):
    """Parser of one text; ids that the model gives its calls are left out."""

    def __init__(self) -> None:
        super().__init__(CALLS)

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
        """Read on in the list."""
        at = skip_space(self._rest, 0)
        if at < MAX_HEAD:
            if at == len(self._rest):
                if self._ended:
                    self._rest = ""
                return False
            if self._rest[at] == ",":
                self._hold(at + 1)
                self._state = self._object
                return True
            self._rest = self._rest[at + (self._rest[at] == "]") :]
        self._state = self._text
        return True
