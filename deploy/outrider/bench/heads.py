"""Bytes read and time a token of drafters, by vocabulary and output head: `python -m outrider.bench.heads --threads 2`.

Every drafter has random weights in the layers of one configuration, and runs as an edge runs it. Its graph is traced
with a small vocabulary, like an export, and its head and embedding are then given rows for the whole vocabulary: a
token takes as long, and no float32 matrix of the whole size is ever in memory. The heads of a vocabulary take turns.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from outrider.cloud.export.contract import MODEL_FILE
from outrider.cloud.export.graph import write_graph
from outrider.cloud.export.model import ATTENTION, look_at, offer_attention
from outrider.cloud.export.quantised import quantise
from outrider.cloud.heads import reduce_head
from outrider.drafters.onnx import OnnxDrafter, OnnxState
from outrider.drafters.packages import DrafterPackage
from outrider.drafters.proposals import ProposalRule
from outrider.proto.types import Sampling

TRACED_VOCABULARY, TRACED_TOKENS = 1009, 509  # sizes that nothing else in a graph has
CANDIDATES = 64
PROMPT, DRAFTS = 32, 8
HEADINGS = f"{'vocabulary':>10}  {'head':24}{'file MB':>9}{'read MB':>9}{'ratio':>7}{'ms':>9}{'ratio':>7}"


@dataclass(frozen=True)
class MeasuredHead:
    """A head to measure: `bits` of all weights, rank and tokens as in `outrider.cloud.heads`, None for whole."""

    bits: int
    rank: int | None = None
    tokens: int | None = None

    @property
    def name(self) -> str:
        """Name in the table."""
        parts = [f"rank {self.rank}"] * (self.rank is not None) + [f"{self.tokens} tokens"] * (self.tokens is not None)
        return f"{', '.join(parts) or 'whole'}, {self.bits}-bit"


def heads(rank: int, tokens: int) -> tuple[MeasuredHead, ...]:
    """Return the heads of a table, the whole one first, with which the others are compared."""
    return (
        MeasuredHead(8),
        MeasuredHead(8, rank=rank),
        MeasuredHead(8, tokens=tokens),
        MeasuredHead(8, rank=rank, tokens=tokens),
        MeasuredHead(4),
        MeasuredHead(4, rank=rank),
    )


def write_drafter(shape: argparse.Namespace, head: MeasuredHead, vocabulary: int, folder: Path) -> DrafterPackage:
    """Write the graph of a drafter of random weights, and return what an edge needs to run it."""
    offer_attention()
    config = LlamaConfig(
        vocab_size=TRACED_VOCABULARY,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.hidden // shape.head_dim,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.mlp,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval().requires_grad_(False)
    if head.rank is not None or head.tokens is not None:
        reduce_head(model, rank=head.rank, tokens=torch.arange(TRACED_TOKENS) if head.tokens else None)
    anatomy = look_at(model)
    folder.mkdir()
    write_graph(model, anatomy, CANDIDATES, folder / MODEL_FILE)
    quantise(folder / MODEL_FILE, bits=head.bits)
    _widen(folder / MODEL_FILE, {TRACED_VOCABULARY: vocabulary, TRACED_TOKENS: head.tokens or TRACED_TOKENS})
    return DrafterPackage(
        folder=folder,
        name=head.name,
        version="0" * 12,
        target="",
        tokenizer_sha256="0" * 64,
        files=(),
        precision=f"int{head.bits}",
        vocab_size=vocabulary,
        context_length=256,
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


def opened(package: DrafterPackage, threads: int) -> OnnxState:
    """Load a drafter and read a prompt with it."""
    state = OnnxDrafter(package, threads=threads).open(ProposalRule(Sampling(temperature=0.0)))
    state.extend(range(PROMPT))
    state.propose(DRAFTS)
    state.truncate(PROMPT)
    return state


def milliseconds(states: Sequence[OnnxState], rounds: int) -> list[float]:
    """Return each drafter's time of a draft in its fastest turn of `DRAFTS` drafts, in ms."""
    taken: list[list[float]] = [[] for _ in states]
    for _ in range(rounds):
        for state, times in zip(states, taken, strict=True):
            began = time.perf_counter()
            state.propose(DRAFTS)
            times.append((time.perf_counter() - began) / DRAFTS * 1e3)
            state.truncate(PROMPT)
    return [min(times) for times in taken]


def rows(given: argparse.Namespace, vocabulary: int) -> Iterator[str]:
    """Build the drafters of a vocabulary, time them in turn, and yield the lines of the table."""
    tokens = min(given.head_tokens, vocabulary // 2)
    compared = heads(given.head_rank, tokens)
    with tempfile.TemporaryDirectory() as folder:
        packages = [write_drafter(given, head, vocabulary, Path(folder) / str(n)) for n, head in enumerate(compared)]
        read = [bytes_read(package.model_path) for package in packages]
        sizes = [package.model_path.stat().st_size for package in packages]
        states = [opened(package, given.threads) for package in packages]
    times = milliseconds(states, given.rounds)
    for head, size, count, ms in zip(compared, sizes, read, times, strict=True):
        yield (
            f"{vocabulary:10,}  {head.name:24}{size / 1e6:9.1f}{count / 1e6:9.1f}{count / read[0]:7.2f}{ms:9.2f}"
            f"{ms / times[0]:7.2f}"
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m outrider.bench.heads", description=__doc__)
    parser.add_argument("vocabularies", nargs="*", type=int, default=[32_000, 128_256, 151_936, 262_144])
    for name, default, text in (
        ("hidden", 1024, "width of the drafter"),
        ("layers", 4, "its layers"),
        ("mlp", 3072, "width of its gated MLP"),
        ("kv-heads", 8, "key and value heads"),
        ("head-dim", 64, "width of an attention head"),
        ("head-rank", 128, "rank of the low-rank head"),
        ("head-tokens", 32_768, "tokens of the trimmed head, half of the vocabulary at most"),
        ("threads", 2, "threads of ONNX Runtime"),
        ("rounds", 20, f"turns of {DRAFTS} drafts each"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} ({default})")
    given = parser.parse_args()
    print(HEADINGS, flush=True)
    for vocabulary in given.vocabularies:
        for row in rows(given, vocabulary):
            print(row, flush=True)


if __name__ == "__main__":
    main()
