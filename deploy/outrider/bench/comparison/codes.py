"""The steering codes of a text, as an edge gets them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outrider.proto.steering import decode, encode
from outrider.proto.types import SteeringPrecision


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """`rows` [n, rank] float32: the codes of positions `first` .. first + n - 1."""

    first: int
    rows: np.ndarray

    def at(self, position: int) -> np.ndarray | None:
        """[rank] of that position; None: it has none."""
        index = position - self.first
        return self.rows[index] if 0 <= index < len(self.rows) else None


@dataclass(frozen=True, slots=True, eq=False)
class SentCodes:
    """`codes` rounded to what travels, and `age` positions older than the freshest."""

    codes: Codes
    precision: SteeringPrecision
    age: int

    def after(self, length: int) -> np.ndarray | None:
        """[rank] float32, for drafts after a transcript of `length` tokens; None: nothing is so old.

        The freshest is of position `length` - 2: the last token is committed, but not processed yet.
        """
        code = self.codes.at(length - 2 - self.age)
        return None if code is None else decode(encode(code, self.precision), len(code))
