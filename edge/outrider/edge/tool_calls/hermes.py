"""Calls as Hermes and Qwen write them: `<tool_call>`, the object of a call, `</tool_call>`."""

from __future__ import annotations

from outrider.edge.tool_calls.json_text import begins, skip_space
from outrider.edge.tool_calls.reading import MAX_HEAD, CallReader

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesReader(CallReader):
    """Parser of one text; a call that lacks its end mark counts all the same."""

    def __init__(self) -> None:
        super().__init__(BEGIN)

    def _opened(self) -> bool:
        return self._object()

    def _after(self) -> bool:
        at = skip_space(self._rest, 0)
        if at < MAX_HEAD and self._rest.startswith(END, at):
            self._rest = self._rest[at + len(END) :]
        elif at < MAX_HEAD and begins(END, self._rest, at):
            if self._ended:
                self._rest = ""
            return False
        self._state = self._text
        return True
