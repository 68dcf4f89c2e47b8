"""The matrices that a drafter's graph multiplies with: read as float32, and changed by sums, in the message itself.

An exported graph has its matrices in blocks of 8-bit levels (MatMulNBits: weight = (level - 128) * scale of its block,
the scale being the largest of the block / 127), or in float32 as it was traced. An embedding that shares a product's
matrix changes with it. (ONNX Runtime's `add_initializer` would not do: it replaces initializers after constants were
folded, so that such an embedding kept its old levels and got the new scales.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from outrider.drafters.graph_file import array_of
from outrider.proto.errors import ModelRefused

_ZERO_LEVEL, _MAX_LEVEL = 128, 127
_LEVELS = ".levels"


class GraphMatrix(Protocol):
    """A matrix of a graph; `weights()` are float32 [rows, columns], and the product is `x @ weights.T`."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows (outputs of the product) and columns (its inputs)."""
        ...

    def weights(self) -> np.ndarray:
        """Return the weights, float32 [rows, columns]."""
        ...

    def add(self, change: np.ndarray) -> None:
        """Add `change` (float32 [rows, columns]) to the weights in the message."""
        ...


def graph_matrices(model: Any) -> dict[str, GraphMatrix]:
    """Return the matrices of all products in the graph of a `Model` message, by name, in the order of the products.

    Raises:
        ModelRefused: a product has weights of a kind that no exporter of ours writes.
    """
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    transposed = {
        node.output[0]: node.input[0]
        for node in model.graph.node
        if node.op_type == "Transpose" and node.input[0] in tensors
    }
    found: dict[str, GraphMatrix] = {}
    for node in model.graph.node:
        if node.op_type == "MatMulNBits":
            matrix = _quantised(node, tensors)
            found[matrix.name] = matrix
        elif node.op_type == "MatMul" and node.input[1] in transposed:
            name = transposed[node.input[1]]
            found[name] = _PlainMatrix(tensors[name], rows_first=True)
        elif node.op_type == "MatMul" and node.input[1] in tensors and len(tensors[node.input[1]].dims) == 2:
            found[node.input[1]] = _PlainMatrix(tensors[node.input[1]], rows_first=False)
    return found


def _quantised(node: Any, tensors: Mapping[str, Any]) -> _QuantisedMatrix:
    numbers = {attribute.name: attribute.i for attribute in node.attribute}
    offsets = [name for name in node.input[3:5] if name]  # zero points and the order of columns; a bias may follow
    levels, scales = (tensors.get(name) for name in node.input[1:3])
    if numbers.get("bits") != 8 or offsets or levels is None or scales is None:
        raise ModelRefused(
            f"a product of {node.input[0]!r} has no symmetric 8-bit weights; export it with --precision int8"
        )
    name = node.input[1].removesuffix(_LEVELS)
    matrix = _QuantisedMatrix(name, levels, scales, rows=numbers["N"], columns=numbers["K"])
    blocks = -(-matrix.columns // numbers["block_size"])
    if tuple(levels.dims) != (matrix.rows, blocks, numbers["block_size"]):
        raise ModelRefused(f"{name} has levels of shape {list(levels.dims)}, not as its product says")
    return matrix


@dataclass(frozen=True, slots=True)
class _PlainMatrix:
    """Float32 weights, [rows, columns] where `rows_first`, else transposed."""

    tensor: Any
    rows_first: bool

    @property
    def shape(self) -> tuple[int, int]:
        first, second = self.tensor.dims
        return (first, second) if self.rows_first else (second, first)

    def weights(self) -> np.ndarray:
        stored = array_of(self.tensor)
        return stored if self.rows_first else stored.T

    def add(self, change: np.ndarray) -> None:
        changed = array_of(self.tensor) + (change if self.rows_first else change.T)
        self.tensor.ClearField("float_data")
        self.tensor.raw_data = changed.astype("<f4").tobytes()


@dataclass(frozen=True, slots=True)
class _QuantisedMatrix:
    """Levels uint8 [rows, blocks, block], scales float32 [rows * blocks] in any shape; the last block is padded."""

    name: str
    levels: Any
    scales: Any
    rows: int
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    def weights(self) -> np.ndarray:
        return self._blocks().reshape(self.rows, -1)[:, : self.columns]

    def add(self, change: np.ndarray) -> None:
        """Quantise what has changed again; a block of a change of zeros keeps every bit."""
        levels, scales = array_of(self.levels).copy(), array_of(self.scales).copy()
        padded = np.pad(change, ((0, 0), (0, levels[0].size - self.columns))).reshape(levels.shape)
        changed = padded.any(-1)
        blocks = (self._blocks() + padded)[changed]
        new_scales = np.abs(blocks).max(-1) / _MAX_LEVEL
        new_scales[new_scales == 0] = 1
        levels[changed] = np.rint(blocks / new_scales[:, None]) + _ZERO_LEVEL
        scales.reshape(changed.shape)[changed] = new_scales
        self.levels.raw_data = levels.tobytes()
        self.scales.ClearField("float_data")
        self.scales.raw_data = scales.astype("<f4").tobytes()

    def _blocks(self) -> np.ndarray:
        levels = array_of(self.levels)
        scales = array_of(self.scales).reshape(*levels.shape[:2], 1)
        blocks: np.ndarray = (levels.astype(np.float32) - _ZERO_LEVEL) * scales
        return blocks
