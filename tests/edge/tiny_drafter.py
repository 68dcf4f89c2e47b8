"""A drafter's graph of short numbers whose every logit can be computed by hand, and its package.

Writing graphs needs onnx, which the extra [cloud] brings; running them does not.

The cache entry of token t at position i is the row `E[t] * (i % 5 + 1)`, and where it is steered by a vector c the row
`U c` besides; the logits after position i are `3 sin(S W)`, S being the sum of the entries 0..i. Sums of small whole
numbers, and of 1024ths of them, are exact, so equality is equality; and hardly any two logits are the same, so that
the last bit of a sine decides nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.drafters import DrafterPackage, ProposalRule, load_package
from outrider.proto.testing import word_tokenizer
from outrider.proto.tokenizer import tokenizer_hash
from outrider.proto.types import Sampling

if TYPE_CHECKING:
    import onnx

VOCAB, LAYERS, HEADS, HEAD_DIM, CANDIDATES, CONTEXT = 61, 2, 1, 3, 8, 700
WIDTH = LAYERS * 2 * HEADS * HEAD_DIM
TABLE = np.random.default_rng(1).integers(-3, 4, (VOCAB, WIDTH)).astype(np.float32)
WEIGHT = (np.random.default_rng(2).integers(-3072, 3073, (WIDTH, VOCAB)) / 1024).astype(np.float32)
TOKENIZER = word_tokenizer(VOCAB)
MLP, RANK, STEERING = 2 * HEADS * HEAD_DIM, 3, "steering."
UP_FROM_VECTOR = np.random.default_rng(3).integers(-2, 3, (LAYERS, MLP, RANK)).astype(np.float32)
STEERING_MANIFEST = {"rank": RANK, "mlp": MLP, "projection": "0123456789ab", "gain": {"1": 0.12, "8": 0.08}}
GREEDY = ProposalRule(Sampling())
WARM = ProposalRule(Sampling(temperature=1.0, seed=11))


def tiny_graph(
    breaks_at: int = 10**6, logits_name: str = "logits", steered: bool = False, mlp: int = MLP
) -> onnx.ModelProto:
    """Make the contract's graph; a token at position `breaks_at` or later makes it fail.

    Args:
        breaks_at: first position that the graph cannot take.
        logits_name: of the output that has the logits; another one than `logits` breaks the contract.
        steered: takes a bias per layer.
        mlp: length of such a bias.
    """
    from onnx import TensorProto, helper, numpy_helper

    halves = [f"{kind}.{layer}" for layer in range(LAYERS) for kind in ("key", "value")]
    biases = [f"{STEERING}{layer}" for layer in range(LAYERS)] if steered else []
    constants = {
        "table": TABLE,
        "weight": WEIGHT,
        "column": np.array([-1, 1]),
        "zero": np.array(0),
        "one": np.array(1),
        "five": np.array(5),
        "three": np.array(3, dtype=np.float32),
        "two_axes": np.array([[0, 0]]),
        "rows_of_a_head": np.array([-1, HEAD_DIM]),
        "vocabulary_axis": np.array([1]),
        "first": np.array([0]),
        "one_entry": np.array([1]),
        "trap": np.zeros(breaks_at, dtype=np.int8),
    }
    node = helper.make_node
    added = node("Concat", biases, ["bias"], axis=0), node("Add", ["unsteered", "bias"], ["entries"])
    nodes = [
        node("Squeeze", ["tokens", "first"], ["flat_tokens"]),
        node("Shape", ["flat_tokens"], ["n_vector"]),
        node("Squeeze", ["n_vector"], ["n"]),
        node("Cast", ["length"], ["end"], to=TensorProto.INT64),
        node("Sub", ["end", "n"], ["p"]),
        node("Range", ["p", "end", "one"], ["positions"]),
        node("Gather", ["trap", "positions"], ["springs"]),
        node("Cast", ["springs"], ["nothing"], to=TensorProto.INT64),
        node("Mod", ["positions", "five"], ["phase"]),
        node("Add", ["phase", "one"], ["phase_from_one"]),
        node("Add", ["phase_from_one", "nothing"], ["factor"]),
        node("Reshape", ["factor", "column"], ["factor_column"]),
        node("Cast", ["factor_column"], ["factor_float"], to=TensorProto.FLOAT),
        node("Gather", ["table", "flat_tokens"], ["embedded"]),
        node("Mul", ["embedded", "factor_float"], ["unsteered" if steered else "entries"]),
        *(added if steered else ()),
        node("Split", ["entries"], [f"new_{half}" for half in halves], axis=1, num_outputs=len(halves)),
        node("Reshape", ["positions", "column"], ["position_column"]),
        node("Concat", ["n_vector", "vocabulary_axis"], ["n_by_one"], axis=0),
        node("Tile", ["two_axes", "n_by_one"], ["in_the_only_head"]),
        node("Concat", ["in_the_only_head", "position_column"], ["places"], axis=1),
    ]
    for half in halves:
        nodes.append(node("ScatterND", [f"past_{half}", "places", f"new_{half}"], [f"present_{half}"]))
        nodes.append(node("Reshape", [f"present_{half}", "rows_of_a_head"], [f"all_{half}"]))
    nodes += [
        node("Concat", [f"all_{half}" for half in halves], ["everything"], axis=1),
        node("Reshape", ["end", "one_entry"], ["end_vector"]),
        node("Slice", ["everything", "first", "end_vector", "first"], ["seen"]),
        node("CumSum", ["seen", "zero"], ["sums"]),
        node("Reshape", ["p", "one_entry"], ["p_vector"]),
        node("Slice", ["sums", "p_vector", "end_vector", "first"], ["new_sums"]),
        node("Gather", ["new_sums", "logit_rows"], ["states"]),
        node("MatMul", ["states", "weight"], ["angles"]),
        node("Sin", ["angles"], ["sines"]),
        node("Mul", ["sines", "three"], [logits_name]),
        node("ReduceLogSumExp", [logits_name, "vocabulary_axis"], ["log_normalizer"], keepdims=0),
        node("TopK", [logits_name, "candidate_count"], ["candidate_logits", "candidate_tokens"], axis=1),
    ]
    info = helper.make_tensor_value_info
    cache: list[int | str | None] = [1, HEADS, "c", HEAD_DIM]
    graph = helper.make_graph(
        nodes,
        "tiny",
        [
            info("tokens", TensorProto.INT64, [1, "n"]),
            info("logit_rows", TensorProto.INT64, ["m"]),
            info("candidate_count", TensorProto.INT64, [1]),
            info("last_position", TensorProto.INT32, [1]),
            info("length", TensorProto.INT32, []),
            *(info(f"past_{half}", TensorProto.FLOAT, cache) for half in halves),
            *(info(name, TensorProto.FLOAT, [mlp]) for name in biases),
        ],
        [
            info("candidate_tokens", TensorProto.INT64, ["m", "k"]),
            info("candidate_logits", TensorProto.FLOAT, ["m", "k"]),
            info("log_normalizer", TensorProto.FLOAT, ["m"]),
            info(logits_name, TensorProto.FLOAT, ["m", VOCAB]),
            *(info(f"present_{half}", TensorProto.FLOAT, cache) for half in halves),
        ],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def steering_graph(layers: int = LAYERS, rank: int = RANK, mlp: int = MLP) -> onnx.ModelProto:
    """Make the graph from a steering vector [rank] to every layer's bias [mlp]."""
    from onnx import TensorProto, helper, numpy_helper

    names = [f"{STEERING}{layer}" for layer in range(layers)]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["vector", f"u.{name}"], [name]) for name in names],
        "steering",
        [info("vector", TensorProto.FLOAT, [rank])],
        [info(name, TensorProto.FLOAT, [mlp]) for name in names],
        [
            numpy_helper.from_array(UP_FROM_VECTOR[layer % LAYERS, :mlp, :rank].T.copy(), f"u.{name}")
            for layer, name in enumerate(names)
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def write_package(
    folder: Path,
    model: onnx.ModelProto | bytes,
    steering_model: onnx.ModelProto | None = None,
    tokenizer: str = TOKENIZER,
    **changes: Any,
) -> DrafterPackage:
    """Write a drafter's package into `folder` and load it, which checks it.

    Args:
        folder: exists.
        model: of the drafter; `tiny_graph`, or bytes that are no graph.
        steering_model: of a steered drafter, whose manifest then says so.
        tokenizer: text of `tokenizer.json`.
        changes: of fields of the manifest.
    """
    contents = {"model.onnx": model if isinstance(model, bytes) else model.SerializeToString()}
    if steering_model is not None:
        contents["steering.onnx"] = steering_model.SerializeToString()
        changes = {"steering": STEERING_MANIFEST} | changes
    contents["tokenizer.json"] = tokenizer.encode()
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    manifest = {
        "format": "outrider-drafter/2",
        "name": "tiny",
        "version": "0123456789ab",
        "kind": "onnx-lm",
        "target": "target",
        "tokenizer_sha256": tokenizer_hash(tokenizer),
        "files": {
            name: {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
            for name, content in contents.items()
        },
        "precision": "float32",
        "vocab_size": VOCAB,
        "context_length": CONTEXT,
        "candidates": CANDIDATES,
        "parameters": TABLE.size + WEIGHT.size,
        "cache": {
            "dtype": "float32",
            "layout": "[1, kv_head, position, head_dim]",
            "layers": LAYERS,
            "kv_heads": HEADS,
            "head_dim": HEAD_DIM,
        },
    } | changes
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return load_package(folder)


def rows_of(prefix: Sequence[int], vectors: Mapping[int, Any] | Sequence[tuple[int, Any]] = ()) -> np.ndarray:
    """Return the cache by hand, [positions, WIDTH]; `vectors` has the steering vectors [RANK] by position."""
    rows = TABLE[list(prefix)] * (np.arange(len(prefix)) % 5 + 1)[:, None]
    for position, vector in dict(vectors).items():
        rows[position] += bias_of(vector)
    return rows


def bias_of(vector: Any) -> np.ndarray:
    """Return what a steering vector [RANK] adds to a row of the cache, [WIDTH]."""
    return (UP_FROM_VECTOR @ np.asarray(vector, dtype=np.float32)).reshape(WIDTH)


def log_q_after(prefix: Sequence[int], vectors: Mapping[int, Any] | Sequence[tuple[int, Any]] = ()) -> np.ndarray:
    """Return the tiny model's log q after a prefix, by hand, [VOCAB]."""
    logits = 3 * np.sin(rows_of(prefix, vectors).sum(axis=0) @ WEIGHT.astype(np.float64))
    log_q: np.ndarray = logits - np.log(np.exp(logits).sum())
    return log_q


def greedy_by_hand(prefix: Sequence[int], n: int) -> tuple[int, ...]:
    """Return the n likeliest tokens, one after the other, after a prefix."""
    tokens = list(prefix)
    for _ in range(n):
        tokens.append(int(np.argmax(log_q_after(tokens))))
    return tuple(tokens[len(prefix) :])


def entries(cache: np.ndarray, n: int) -> np.ndarray:
    """Return the first n rows, [n, WIDTH], of a cache [layers, 2, 1, heads, capacity, head_dim]."""
    return cache[..., :n, :].transpose(4, 0, 1, 2, 3, 5).reshape(n, WIDTH)


def some_tokens(n: int, seed: int = 5, vocab: int = VOCAB) -> tuple[int, ...]:
    """Draw n random tokens."""
    return tuple(np.random.default_rng(seed).integers(0, vocab, n).tolist())
