"""Pieces of an answer in which a model may call functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Said:
    """Text for people."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """Beginning of the `index`-th call, which is one of the function `name`."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of the `index`-th call, which are a JSON object in the end."""

    index: int
    text: str


Part = Said | CallBegun | CallArguments


class CallParser(Protocol):
    """Parser of one text, which comes in pieces."""

    def take(self, text: str) -> list[Part]:
        """Return what is certain now that `text` has come."""
        ...

    def end(self) -> list[Part]:
        """Return the rest, since nothing more comes."""
        ...


class PlainParser:
    """Parser of a text that has no calls."""

    def take(self, text: str) -> list[Part]:
        """Return the text."""
        return [Said(text)] if text else []

    def end(self) -> list[Part]:
        """Return nothing, since nothing was held back."""
        return []


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
