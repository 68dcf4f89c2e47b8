"""Answers put together from the parts that a parser of calls returns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from outrider.edge.tool_calls.reading import CallArguments, CallBegun, Part, Said


@dataclass(slots=True)
class WrittenCall:
    """A call as far as it has come; `arguments` are JSON, unless the text broke off or the model wrote no JSON."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class WrittenAnswer:
    """An answer as far as its parts have come."""

    text: str = ""
    calls: list[WrittenCall] = field(default_factory=list)

    def add(self, parts: Iterable[Part]) -> None:
        """Take in more parts."""
        for part in parts:
            match part:
                case Said(text):
                    self.text += text
                case CallBegun(_, name):
                    self.calls.append(WrittenCall(name))
                case CallArguments(index, text):
                    self.calls[index].arguments += text
