"""A steering code between its numbers and its bytes.

A code steers which drafts are made and never the text, so a little error costs a little acceptance and nothing else:
int8 is off by at most half a step (scale / 2), float16 by 2^-11 of the number.
"""

from __future__ import annotations

import math

import numpy as np

from outrider.proto.errors import InvalidArgument
from outrider.proto.types import Steering, SteeringPrecision

_INT8_STEPS = 127
_LARGEST_HALF = float(np.finfo(np.float16).max)
# Below it, float32 has no exact step for int8: such a code is nothing beside any that steers.
_MIN_LARGEST = _INT8_STEPS * float(np.finfo(np.float32).tiny)


def encode(code: np.ndarray, precision: SteeringPrecision) -> Steering:
    """`code` [rank], finite, as it travels.

    Raises:
        InvalidArgument: `steering.values` is not one row of finite numbers.
    """
    numbers = np.asarray(code, dtype=np.float32)
    if numbers.ndim != 1:
        raise InvalidArgument(f"has {numbers.ndim} dimensions; a code has one", field="steering.values")
    largest = float(np.abs(numbers).max(initial=0.0))
    if not math.isfinite(largest):
        raise InvalidArgument("holds a number that is not finite", field="steering.values")
    if precision is SteeringPrecision.FLOAT16:
        if largest <= _LARGEST_HALF:
            return Steering(1.0, numbers.astype("<f2").tobytes(), precision)
        scale = _scale(largest, _LARGEST_HALF)
        halves = np.clip(numbers / np.float32(scale), -_LARGEST_HALF, _LARGEST_HALF)
        return Steering(scale, halves.astype("<f2").tobytes(), precision)
    scale = 1.0 if largest < _MIN_LARGEST else _scale(largest, _INT8_STEPS)
    return Steering(scale, np.rint(numbers / np.float32(scale)).astype(np.int8).tobytes(), precision)


def _scale(largest: float, steps: float) -> float:
    """A float32 just below `largest` / `steps`: so many steps are never more than float32 holds."""
    return float(np.float32(largest / steps * (1 - 2**-23)))


def decode(steering: Steering, rank: int) -> np.ndarray:
    """The code [rank] float32 that `encode` was given, but for rounding.

    Raises:
        InvalidArgument: `steering.values` holds another number of numbers, or one that is not finite;
            `steering.scale` takes one beyond float32.
    """
    stored = np.dtype("<f2") if steering.precision is SteeringPrecision.FLOAT16 else np.dtype(np.int8)
    held = len(steering.values) // stored.itemsize  # whole, as a Steering is checked when made
    if held != rank:
        raise InvalidArgument(f"holds {held} numbers, the drafter takes {rank}", field="steering.values")
    numbers = np.frombuffer(steering.values, dtype=stored).astype(np.float32)
    if not np.isfinite(numbers).all():
        raise InvalidArgument("holds a number that is not finite", field="steering.values")
    with np.errstate(over="ignore", invalid="ignore"):
        code = numbers * np.float32(steering.scale)
    if not np.isfinite(code).all():
        raise InvalidArgument(f"{steering.scale:g} takes the code beyond float32", field="steering.scale")
    return code
