"""The shape of a step to time, as an option writes it; loads nothing, since help reads it."""

from __future__ import annotations

import re
from typing import NamedTuple, Self

_SHAPE = re.compile(r"([1-9]\d*)x([1-9]\d*)", re.ASCII)


class StepShape(NamedTuple):
    """A step of `sessions` with `rows` each."""

    sessions: int
    rows: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the shape that `SESSIONSxROWS` names."""
        if (found := _SHAPE.fullmatch(text)) is None:
            raise ValueError(f"{text!r} is not SESSIONSxROWS, such as 16x5")
        return cls(*map(int, found.groups()))

    def __str__(self) -> str:
        return f"{self.sessions}x{self.rows}"
