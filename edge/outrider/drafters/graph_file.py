"""ONNX files as messages, read without the `onnx` package, which an edge does not have, and the matrices in them.

The schema below has the parts of `onnx.proto` that are read here, with its field numbers; Protobuf skips the others.
All fields in which a tensor may lie are among them, since each of these can point to another file.

An exported graph has the matrices that it multiplies with in blocks of 8-bit levels (MatMulNBits: weight = (level -
128) * scale of its block, the scale being the largest of the block / 127), or in float32 as it was traced. They are
changed in the message itself, so an embedding that shares a product's matrix changes with it. (ONNX Runtime's
`add_initializer` would not do: it replaces initializers after constants were folded, so that such an embedding kept its
old levels and got the new scales.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

from outrider.proto.errors import ModelRefused

_PACKAGE = "outrider.graph_file"
_EXTERNAL = 1  # of TensorProto.DataLocation
_INT64, _FLOAT, _STRING, _BYTES = 3, 2, 9, 12  # of FieldDescriptorProto.Type
_Field = tuple[str, int, int | str]  # name, number, type or the name of a message
_ONE: dict[str, tuple[_Field, ...]] = {
    "Model": (("graph", 7, "Graph"),),
    "Training": (("initialization", 1, "Graph"), ("algorithm", 2, "Graph")),
    "Node": (("op_type", 4, _STRING),),
    "Attribute": (
        ("name", 1, _STRING),
        ("i", 3, _INT64),
        ("t", 5, "Tensor"),
        ("g", 6, "Graph"),
        ("sparse_tensor", 22, "Sparse"),
    ),
    "Sparse": (("values", 1, "Tensor"), ("indices", 2, "Tensor")),
    "Tensor": (("data_type", 2, _INT64), ("name", 8, _STRING), ("raw_data", 9, _BYTES), ("data_location", 14, _INT64)),
    "Entry": (("key", 1, _STRING), ("value", 2, _STRING)),
}
_SEVERAL: dict[str, tuple[_Field, ...]] = {
    "Model": (("training_info", 20, "Training"), ("functions", 25, "Function")),
    "Function": (("node", 7, "Node"), ("attribute_proto", 11, "Attribute")),
    "Graph": (("node", 1, "Node"), ("initializer", 5, "Tensor"), ("sparse_initializer", 15, "Sparse")),
    "Node": (("input", 1, _STRING), ("output", 2, _STRING), ("attribute", 5, "Attribute")),
    "Attribute": (("tensors", 10, "Tensor"), ("graphs", 11, "Graph"), ("sparse_tensors", 23, "Sparse")),
    "Tensor": (("dims", 1, _INT64), ("float_data", 4, _FLOAT), ("external_data", 13, "Entry")),
}
_DTYPES = {1: "<f4", 2: "u1"}  # of TensorProto.DataType
_ZERO_LEVEL, _MAX_LEVEL = 128, 127
_LEVELS = ".levels"


def read_graph_file(path: Path, drafter: str) -> Any:
    """Return the `Model` message of an ONNX file of `drafter`, all of whose weights are inside it.

    Raises:
        ModelRefused: it is no ONNX file, or a tensor lies in another file, which no hash covers.
    """
    model = _model_class()()
    try:
        model.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise ModelRefused(f"drafter {drafter}: {path.name} is no ONNX graph") from error
    for tensor in _tensors(model):
        if tensor.data_location == _EXTERNAL or tensor.external_data:
            where = next((entry.value for entry in tensor.external_data if entry.key == "location"), "another file")
            raise ModelRefused(
                f"drafter {drafter}: {path.name} keeps {tensor.name or 'a tensor'!r} in {where}, which no hash covers; "
                "export the drafter with all weights inside the graph"
            )
    return model


def array_of(tensor: Any) -> np.ndarray:
    """Return the content of a `Tensor` of float32 or uint8, in its own shape.

    Raises:
        ModelRefused: it has another type, or not as many numbers as its shape says.
    """
    shape = tuple(tensor.dims)
    if tensor.data_type not in _DTYPES:
        raise ModelRefused(f"{tensor.name} has the ONNX type {tensor.data_type}, neither float32 nor uint8")
    dtype = np.dtype(_DTYPES[tensor.data_type])
    flat = np.frombuffer(tensor.raw_data, dtype) if tensor.raw_data else np.array(tensor.float_data, dtype)
    if flat.size != int(np.prod(shape, dtype=np.int64)):
        raise ModelRefused(f"{tensor.name} has {flat.size} numbers where its shape is {list(shape)}")
    return flat.reshape(shape)


def _tensors(message: Message) -> Iterator[Any]:
    """Yield all tensors in a message, however deep."""
    if message.DESCRIPTOR.name == "Tensor":
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in value if field.is_repeated else (value,):
                yield from _tensors(inner)


@cache
def _model_class() -> type[Any]:
    """Make the message classes, in a pool of their own: `onnx` has others of these names."""
    file = descriptor_pb2.FileDescriptorProto(name="graph_file.proto", package=_PACKAGE, syntax="proto2")
    for name in dict.fromkeys((*_ONE, *_SEVERAL)):
        message = file.message_type.add(name=name)
        for label, fields in ((1, _ONE.get(name, ())), (3, _SEVERAL.get(name, ()))):
            for field, number, kind in fields:
                added = message.field.add(name=field, number=number, label=label)
                if isinstance(kind, str):
                    added.type, added.type_name = 11, f".{_PACKAGE}.{kind}"
                else:
                    added.type = kind
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    made: type[Any] = message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Model"))
    return made


class GraphMatrix(ABC):
    """A matrix of a graph; the product is `x @ weights.T`.

    Attributes:
        shape: rows (outputs of the product) and columns (its inputs).
    """

    shape: tuple[int, int]

    @abstractmethod
    def weights(self) -> np.ndarray:
        """Return the weights, float32 [rows, columns]."""

    @abstractmethod
    def add(self, change: np.ndarray) -> None:
        """Add `change` (float32 [rows, columns]) to the weights in the message."""


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
            found[node.input[1].removesuffix(_LEVELS)] = _quantised(node, tensors)
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
    rows, columns, block = numbers["N"], numbers["K"], numbers["block_size"]
    if tuple(levels.dims) != (rows, -(-columns // block), block):
        raise ModelRefused(f"{node.input[1]} has the shape {list(levels.dims)}, not as its product says")
    return _QuantisedMatrix(levels, scales, (rows, columns))


class _PlainMatrix(GraphMatrix):
    """Float32 weights, [rows, columns] where `rows_first`, else transposed."""

    def __init__(self, tensor: Any, *, rows_first: bool) -> None:
        first, second = tensor.dims
        self.shape = (first, second) if rows_first else (second, first)
        self._tensor = tensor
        self._rows_first = rows_first

    def weights(self) -> np.ndarray:
        stored = array_of(self._tensor)
        return stored if self._rows_first else stored.T

    def add(self, change: np.ndarray) -> None:
        changed = array_of(self._tensor) + (change if self._rows_first else change.T)
        self._tensor.ClearField("float_data")
        self._tensor.raw_data = changed.astype("<f4").tobytes()


class _QuantisedMatrix(GraphMatrix):
    """Levels uint8 [rows, blocks, block], scales float32 [rows * blocks] in any shape; the last block is padded."""

    def __init__(self, levels: Any, scales: Any, shape: tuple[int, int]) -> None:
        self.shape = shape
        self._levels = levels
        self._scales = scales

    def weights(self) -> np.ndarray:
        return self._blocks().reshape(self.shape[0], -1)[:, : self.shape[1]]

    def add(self, change: np.ndarray) -> None:
        """Quantise what has changed again; a block of a change of zeros keeps every bit."""
        levels, scales = array_of(self._levels).copy(), array_of(self._scales).copy()
        padded = np.pad(change, ((0, 0), (0, levels[0].size - self.shape[1]))).reshape(levels.shape)
        changed = padded.any(-1)
        blocks = (self._blocks() + padded)[changed]
        new_scales = np.abs(blocks).max(-1) / _MAX_LEVEL
        new_scales[new_scales == 0] = 1
        levels[changed] = np.rint(blocks / new_scales[:, None]) + _ZERO_LEVEL
        scales.reshape(changed.shape)[changed] = new_scales
        self._levels.raw_data = levels.tobytes()
        self._scales.ClearField("float_data")
        self._scales.raw_data = scales.astype("<f4").tobytes()

    def _blocks(self) -> np.ndarray:
        levels = array_of(self._levels)
        scales = array_of(self._scales).reshape(*levels.shape[:2], 1)
        blocks: np.ndarray = (levels.astype(np.float32) - _ZERO_LEVEL) * scales
        return blocks
