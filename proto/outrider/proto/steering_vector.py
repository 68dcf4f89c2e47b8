"""Steering vectors as numbers and as bytes.

A vector steers which drafts are made and never the text, so a small error costs a little acceptance and nothing else:
int8 is off by at most half a step (scale / 2), float16 by 2^-11 of the number.
"""

from __future__ import annotations

import math

import numpy as np

from outrider.proto.errors import InvalidArgument
from outrider.proto.types import Steering, SteeringPrecision

_INT8_STEPS = 127
_LARGEST_HALF = float(np.finfo(np.float16).max)
# Below it, float32 has no exact step for int8; such a vector is zero for all purposes.
_MIN_LARGEST = _INT8_STEPS * float(np.finfo(np.float32).tiny)


def encode(vector: np.ndarray, precision: SteeringPrecision) -> Steering:
    """Round `vector` [rank], finite, to bytes; raises `InvalidArgument`."""
    numbers = np.asarray(vector, dtype=np.float32)
    if numbers.ndim != 1:
        raise InvalidArgument(f"has {numbers.ndim} dimensions; a vector has one", field="steering.values")
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
    """Return a float32 just below `largest` / `steps`, so that `steps` times it never exceeds float32."""
    return float(np.float32(largest / steps * (1 - 2**-23)))


def decode(steering: Steering, rank: int) -> np.ndarray:
    """Return the vector [rank] float32 that `encode` has rounded; raises `InvalidArgument`."""
    stored = np.dtype("<f2") if steering.precision is SteeringPrecision.FLOAT16 else np.dtype(np.int8)
    length = len(steering.values) // stored.itemsize  # whole: a Steering is checked when made
    if length != rank:
        raise InvalidArgument(f"holds {length} numbers, the drafter takes {rank}", field="steering.values")
    numbers = np.frombuffer(steering.values, dtype=stored).astype(np.float32)
    if not np.isfinite(numbers).all():
        raise InvalidArgument("holds a number that is not finite", field="steering.values")
    with np.errstate(over="ignore", invalid="ignore"):
        vector = numbers * np.float32(steering.scale)
    if not np.isfinite(vector).all():
        raise InvalidArgument(f"{steering.scale:g} takes the vector beyond float32", field="steering.scale")
    return vector
