"""Steering vectors of a written text, as they reach an edge."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outrider.proto.steering_vector import decode, encode
from outrider.proto.types import SteeringPrecision
from research.text_writer import TextVectors


@dataclass(frozen=True, slots=True, eq=False)
class SentVectors:
    """Steering vectors that reach an edge: rounded to what travels, and `age` positions older than the freshest."""

    vectors: TextVectors
    precision: SteeringPrecision
    age: int

    def after(self, length: int) -> np.ndarray | None:
        """Return [rank] float32 for drafts after a transcript of `length` tokens; None: no vector has that age.

        The freshest belongs to position `length` - 2: the last token is committed, but not processed yet.
        """
        vector = self.vectors.at(length - 2 - self.age)
        return None if vector is None else decode(encode(vector, self.precision), len(vector))
