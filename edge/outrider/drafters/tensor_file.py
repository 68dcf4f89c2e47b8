"""Files of tensors in the safetensors format: a JSON header and plain numbers, no code."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from outrider.proto.errors import ModelRefused

_DTYPES: dict[str, np.dtype[Any]] = {"F16": np.dtype("<f2"), "F32": np.dtype("<f4")}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LENGTH_BYTES = 8  # of the header's length, little-endian
_MAX_HEADER_BYTES = 1 << 24


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write tensors of float16 or float32 by name."""
    header, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _LENGTH_BYTES)  # so that the numbers are aligned
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).tobytes())


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a file of float16 and float32 tensors by name, all as float32.

    Raises:
        ModelRefused: the file is malformed, or has other types.
    """
    content = path.read_bytes()
    length = int.from_bytes(content[:_LENGTH_BYTES], "little")
    data = content[_LENGTH_BYTES + length :]
    try:
        if not 2 <= length <= min(_MAX_HEADER_BYTES, len(content) - _LENGTH_BYTES):
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(content[_LENGTH_BYTES : _LENGTH_BYTES + length])
        return {name: _tensor(name, entry, data) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelRefused(f"{path.name} is no file of float16 or float32 tensors: {error}") from error


def _tensor(name: str, entry: Mapping[str, Any], data: bytes) -> np.ndarray:
    dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
    start, end = entry["data_offsets"]
    if any(type(number) is not int or number < 0 for number in (*shape, start, end)) or end > len(data):
        raise ValueError(f"{name!r} lies outside the file")
    if end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name!r} has {end - start} bytes where its shape is {shape}")
    tensor: np.ndarray = np.frombuffer(data[start:end], dtype).reshape(shape).astype(np.float32)
    return tensor
