"""The shape of a step to time, as an option writes it; loads nothing, since help reads it."""

from __future__ import annotations

import re
from typing import NamedTuple, Self

_SHAPE = re.compile(r"([1-9]\d*)x([1-9]\d*)(?:\+([1-9]\d*))?(?:@([1-9]\d*))?", re.ASCII)


class StepShape(NamedTuple):
    """A step of `sessions` with `rows` each, and `branches` of one more row each, after `context` tokens.

    Attributes:
        context: tokens before the rows of each session; 0: as many as of other steps.
    """

    sessions: int
    rows: int
    branches: int = 0
    context: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the shape that `SESSIONSxROWS[+BRANCHES][@CONTEXT]` names."""
        if (found := _SHAPE.fullmatch(text)) is None:
            form = "SESSIONSxROWS[+BRANCHES][@CONTEXT]"
            raise ValueError(f"{text!r} is not {form}, such as 16x5 or 1x5+3@600")
        shape = cls(*(int(number or 0) for number in found.groups()))
        if shape.branches and shape.rows < 2:
            raise ValueError(f"{text!r} has no chain that branches could leave; give it 2 rows or more")
        return shape

    def __str__(self) -> str:
        branches, context = f"+{self.branches}" * bool(self.branches), f"@{self.context}" * bool(self.context)
        return f"{self.sessions}x{self.rows}{branches}{context}"
