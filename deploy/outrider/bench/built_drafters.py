"""Drafters of any shape and vocabulary with random weights, for measurements of time and bytes.

A graph is traced with a small vocabulary and few positions, like an export, and what has a row for each of these is
then given as many as wanted: a token takes as long, and no float32 matrix of the whole size is ever in memory.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from outrider.cloud.export.contract import MODEL_FILE
from outrider.cloud.export.graph import write_graph
from outrider.cloud.export.model import ATTENTION, CacheScales, look_at, offer_attention
from outrider.cloud.export.quantised import quantise
from outrider.cloud.heads import reduce_head, reduce_vocabulary
from outrider.drafters.packages import DrafterPackage

TRACED_VOCABULARY, TRACED_TOKENS, TRACED_POSITIONS = 1009, 509, 251  # sizes that nothing else in a graph has
CANDIDATES = 64
SHAPE = (
    ("hidden", 1024, "width of the drafter"),
    ("layers", 4, "its layers"),
    ("mlp", 3072, "width of its gated MLP"),
    ("heads", 16, "query heads"),
    ("kv-heads", 8, "key and value heads"),
    ("head-dim", 64, "width of an attention head"),
)


@dataclass(frozen=True)
class MeasuredDrafter:
    """A drafter to measure: `bits` of all weights, and rank or tokens of the head as in `outrider.cloud.heads`.

    Attributes:
        kv: type of its KV cache, as in `CacheShape`.
        context: longest text, in tokens.
    """

    bits: int
    rank: int | None = None
    tokens: int | None = None
    kv: str = "float32"
    context: int = 256

    @property
    def name(self) -> str:
        """Name of the head in a table."""
        head = f"rank {self.rank}" if self.rank else f"{self.tokens} tokens" if self.tokens else "whole"
        return f"{head}, {self.bits}-bit"


def add_numbers(parser: argparse.ArgumentParser, *numbers: tuple[str, int, str]) -> None:
    """Add options that take a whole number: name, default and help of each."""
    for name, default, text in numbers:
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} ({default})")


def write_drafter(shape: argparse.Namespace, drafter: MeasuredDrafter, vocabulary: int, folder: Path) -> DrafterPackage:
    """Write the graph of a drafter of random weights and a `SHAPE`, and return what an edge needs to run it."""
    offer_attention()
    config = LlamaConfig(
        vocab_size=TRACED_VOCABULARY,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.mlp,
        max_position_embeddings=TRACED_POSITIONS,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval().requires_grad_(False)
    if drafter.rank is not None:
        reduce_head(model, drafter.rank)
    elif drafter.tokens is not None:
        reduce_vocabulary(model, torch.arange(TRACED_TOKENS))
    anatomy = look_at(model)
    if drafter.kv == "int8":
        scale = torch.full((1, shape.kv_heads, 1, shape.head_dim), 0.01)
        scales = (CacheScales(scale, scale),) * shape.layers
        anatomy = replace(anatomy, shape=replace(anatomy.shape, dtype="int8"), scales=scales)
    folder.mkdir()
    write_graph(model, anatomy, CANDIDATES, folder / MODEL_FILE)
    quantise(folder / MODEL_FILE, bits=drafter.bits)
    sizes = {TRACED_VOCABULARY: vocabulary, TRACED_TOKENS: drafter.tokens or TRACED_TOKENS}
    _widen(folder / MODEL_FILE, sizes | {TRACED_POSITIONS: drafter.context})
    return DrafterPackage(
        folder=folder,
        name=drafter.name,
        version="0" * 12,
        target="",
        tokenizer_sha256="0" * 64,
        files=(),
        precision=f"int{drafter.bits}",
        vocab_size=vocabulary,
        context_length=drafter.context,
        candidates=CANDIDATES,
        parameters=1,
        cache=anatomy.shape,
    )


def bytes_read(graph: Path) -> int:
    """Return the bytes of all matrices that a token is multiplied with; its row of the embedding is not counted."""
    model = onnx.load(graph)
    sizes = {tensor.name: len(tensor.raw_data) for tensor in model.graph.initializer}
    products = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
    return sum(sizes[name] for node in products for name in node.input[1:])


def _widen(graph: Path, sizes: Mapping[int, int]) -> None:
    """Give matrices of a traced size random rows for another, and put that in the place of the size where it is named.

    Levels and scales that a product and a lookup share stay shared.
    """
    model = onnx.load(graph)
    random = np.random.default_rng(0)
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        if array.dtype == np.int64 and tensor.dims and math.prod(tensor.dims) <= 2:
            array = np.array([sizes.get(int(each), int(each)) for each in array.flat]).reshape(array.shape)
        elif tensor.dims and tensor.dims[0] in sizes:
            shape = (sizes[tensor.dims[0]], *tensor.dims[1:])
            if array.dtype == np.int64:
                array = np.arange(shape[0])
            elif array.dtype == np.int32:
                array = np.zeros(shape, dtype=np.int32)
            elif array.dtype == np.uint8:
                array = random.integers(0, 256, shape, dtype=np.uint8)
            else:
                array = np.full(shape, 1e-4, dtype=np.float32)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "MatMulNBits" and attribute.name == "N":
                attribute.i = sizes.get(attribute.i, attribute.i)
    for output in model.graph.output:
        for dimension in output.type.tensor_type.shape.dim:
            if dimension.dim_value in sizes:
                dimension.dim_value = sizes[dimension.dim_value]
    onnx.save(model, graph)
