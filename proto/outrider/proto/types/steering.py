"""Steering vectors and requests for them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from enum import Enum

from outrider.proto.types.checks import require

_PROJECTION = re.compile(r"[0-9a-f]{12}")


class SteeringPrecision(Enum):
    """Number format of a steering vector on the wire."""

    FLOAT16 = 1
    INT8 = 2

    @property
    def number_bytes(self) -> int:
        """Size of one number, in bytes."""
        return 2 if self is SteeringPrecision.FLOAT16 else 1


@dataclass(frozen=True, slots=True)
class SteeringRequest:
    """Which steering vectors an edge wants in commits.

    Attributes:
        projection: projection that makes the vector, 12 hexadecimal digits from the drafter's manifest.
        every: commits for each vector; 0: none for now.
    """

    projection: str
    precision: SteeringPrecision = SteeringPrecision.INT8
    every: int = 1

    def __post_init__(self) -> None:
        require(bool(_PROJECTION.fullmatch(self.projection)), "steering.projection", "must be 12 hexadecimal digits")
        require(isinstance(self.precision, SteeringPrecision), "steering.precision", "is no SteeringPrecision")
        require(0 <= self.every < 1 << 32, "steering.every", "must be in 0..2^32-1; 0 means none for now")


@dataclass(frozen=True, slots=True)
class Steering:
    """A steering vector [rank] = scale * values of the target's hidden state.

    `outrider.proto.steering_vector` decodes it.

    A commit carries that of position `start + len(tokens) - 2`, the newest committed one that the verifier has
    processed.
    """

    scale: float
    values: bytes = field(repr=False)
    precision: SteeringPrecision

    def __post_init__(self) -> None:
        require(isinstance(self.precision, SteeringPrecision), "steering.precision", "is no SteeringPrecision")
        require(math.isfinite(self.scale) and self.scale > 0, "steering.scale", "must be a finite number above 0")
        size = self.precision.number_bytes
        require(len(self.values) % size == 0, "steering.values", f"must be {size} bytes a number")
