"""Weights of 8 bits: the graph with its matrices in blocks of whole numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from outrider.cloud.export.graph import CONTRIB, drop_unused

ROWS = ".rows"  # ending of the name under which the levels of a matrix are looked up by row
BLOCK = 64  # weights that share a scale; the fastest of 16 to 256 on a CPU with AVX-512 VNNI
ZERO = 128  # level of a weight of zero


def quantise(graph: Path) -> None:
    """Rewrite the file with weights of 8 bits.

    Every product with a constant matrix becomes a MatMulNBits node, which quantises its activations to 8 bits. The
    embedding is looked up in 8 bits too: in the matrix of the head where they share one, else in its own.
    MatMulNBits is faster than `quantize_dynamic`, whose integer product needs four more nodes around it, and takes a
    bias: where it is loaded, ONNX Runtime puts the sums of a steered graph into their products.
    """
    model = onnx.load(graph)
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    transposed = {
        node.output[0]: node.input[0]
        for node in model.graph.node
        if node.op_type == "Transpose" and node.input[0] in weights
    }
    matrices = {name for name, tensor in weights.items() if len(tensor.dims) == 2}
    quantised: dict[str, QuantisedMatrix] = {}
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if node.op_type == "MatMul" and (node.input[1] in transposed or node.input[1] in matrices):
            name = transposed.get(node.input[1], node.input[1])
            matrix = onnx.numpy_helper.to_array(weights[name])
            columns_first = matrix if node.input[1] in transposed else matrix.T
            quantised[name] = QuantisedMatrix.of(columns_first)
            node = quantised[name].product(name, node)
        nodes.append(node)
    for node in nodes:
        looks_up_tokens = node.op_type == "Gather" and node.input[1] == "tokens"
        if looks_up_tokens and node.input[0] in matrices - quantised.keys():
            quantised[node.input[0]] = QuantisedMatrix.of(onnx.numpy_helper.to_array(weights[node.input[0]]))
    nodes = [each for node in nodes for each in _quantised_lookup(node, quantised)]
    for name, stored in quantised.items():
        model.graph.initializer.extend(stored.initializers(name))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    drop_unused(model.graph)
    onnx.save(model, graph)


@dataclass(frozen=True)
class QuantisedMatrix:
    """A matrix [rows, columns] in blocks of columns: weight = (level - ZERO) * scale of its block.

    Attributes:
        levels: uint8 [rows, blocks, BLOCK].
        scales: float32 [rows, blocks].
        columns: without the padding of the last block.
    """

    levels: np.ndarray
    scales: np.ndarray
    columns: int

    @staticmethod
    def of(matrix: np.ndarray) -> QuantisedMatrix:
        """Return the nearest to `matrix` (float32 [rows, columns])."""
        rows, columns = matrix.shape
        padded = np.pad(matrix, ((0, 0), (0, -columns % BLOCK))).reshape(rows, -1, BLOCK)
        scales = np.abs(padded).max(-1) / (ZERO - 1)
        scales[scales == 0] = 1
        levels = np.clip(np.rint(padded / scales[..., None]) + ZERO, 0, 2 * ZERO - 1)
        return QuantisedMatrix(levels.astype(np.uint8), scales.astype(np.float32), columns)

    def initializers(self, name: str) -> list[onnx.TensorProto]:
        """Return all that nodes may read; what none reads is dropped."""
        shape = np.array([len(self.levels), self.columns], dtype=np.int64)
        return [
            onnx.numpy_helper.from_array(self.levels, f"{name}.levels"),
            onnx.numpy_helper.from_array(self.scales, f"{name}.scales"),
            onnx.numpy_helper.from_array(shape, f"{name}.shape"),
        ]

    def product(self, name: str, node: onnx.NodeProto) -> onnx.NodeProto:
        """Return the replacement of the MatMul `node` by this matrix, transposed."""
        return onnx.helper.make_node(
            "MatMulNBits",
            [node.input[0], f"{name}.levels", f"{name}.scales"],
            list(node.output),
            domain=CONTRIB,
            K=self.columns,
            N=len(self.levels),
            bits=8,
            block_size=BLOCK,
            accuracy_level=4,  # int8 activations
        )


def _quantised_lookup(node: onnx.NodeProto, quantised: dict[str, QuantisedMatrix]) -> list[onnx.NodeProto]:
    """Return the replacement of a lookup of rows of a quantised matrix; any other node stays.

    It reads the levels of the product in another shape, so that the file holds them once. ONNX Runtime folds the
    reshape when it loads the graph.
    """
    if node.op_type != "Gather" or node.input[0] not in quantised:
        return [node]
    name = node.input[0]
    if quantised[name].columns % BLOCK or any(attribute.name == "axis" and attribute.i for attribute in node.attribute):
        return [node]
    rows = onnx.helper.make_node("Reshape", [f"{name}.levels", f"{name}.shape"], [name + ROWS])
    lookup = onnx.helper.make_node(
        "GatherBlockQuantized",
        [name + ROWS, node.input[1], f"{name}.scales"],
        list(node.output),
        domain=CONTRIB,
        bits=8,
        block_size=BLOCK,
        gather_axis=0,
        quantize_axis=1,
    )
    return [rows, lookup]
