"""ONNX files as messages, read without the `onnx` package, which an edge does not have.

The schema below has the parts of `onnx.proto` that are read here, with its field numbers; Protobuf skips the others.
All fields in which a tensor may lie are among them, since each of these can point to another file.
"""

from __future__ import annotations

from collections.abc import Iterator
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
