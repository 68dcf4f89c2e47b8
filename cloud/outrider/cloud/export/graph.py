"""The graph: the model traced with one GroupQueryAttention a layer, then with nodes joined.

GroupQueryAttention (ONNX Runtime's own operator) rotates, writes new keys and values into the cache in place, and
attends, in one node. `gate_proj` and `up_proj` of an MLP stay two products, so that a bias can be added to the latter.

The edge's side of its inputs and outputs is in `outrider.drafters.onnx`: n new tokens join a cache in which p positions
are filled. The cache is one pair of arrays a layer with room for c positions, c >= p + n; past and present are the same
memory, so the graph writes n rows and copies none. A steered drafter's graph takes a bias of every layer's up
projection besides: outputs of a second small graph, which runs once a steering vector, not once a token.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnxscript.rewriter.ort_fusions.rms_normalization import fuse_rms_normalization
from onnxscript.rewriter.ort_fusions.skip_normalization import fuse_skip_rms_normalization
from transformers import PreTrainedModel

from outrider.cloud.export.model import Architecture, AttentionSettings, CacheScales, forward
from outrider.cloud.export.steered import SteeringWeights, steered_by
from outrider.cloud.models.heads import head_of_kept_tokens, spread, tokens_of
from outrider.proto.errors import OutriderError

OPSET = 20
IR_VERSION = 10  # of the traced graphs
CONTRIB = "com.microsoft"  # ONNX Runtime's own operators
# A head's sink is a score that takes part in the softmax and carries no value. This one changes nothing, but with
# a sink ONNX Runtime 1.31 takes another softmax: at 800 positions the attention of a token costs a third less.
EMPTY_SINK = -1e30
# The caches follow, for every layer past_key.L and past_value.L, present_key.L and present_value.L.
INPUTS: dict[str, dict[str, Any]] = {
    "tokens": {"dtype": "int64", "shape": [1, "n"]},
    "logit_rows": {"dtype": "int64", "shape": ["m"]},
    "candidate_count": {"dtype": "int64", "shape": [1]},
    "last_position": {"dtype": "int32", "shape": [1]},
    "length": {"dtype": "int32", "shape": []},
}
OUTPUTS: dict[str, dict[str, Any]] = {
    "candidate_tokens": {"dtype": "int64", "shape": ["m", "candidate_count"]},
    "candidate_logits": {"dtype": "float32", "shape": ["m", "candidate_count"]},
    "log_normalizer": {"dtype": "float32", "shape": ["m"]},
    "logits": {"dtype": "float32", "shape": ["m", "vocab_size"]},
}
VECTOR = "vector"  # name of the steering graph's only input, float32 [rank]


class ExportMismatch(OutriderError):
    """ONNX Runtime and torch disagree about the exported model; nothing was published."""


def cache_names(side: str, layers: int) -> list[str]:
    """Return the names of the cache's inputs (`side` "past") or outputs ("present"), by layer, keys first."""
    return [f"{side}_{kind}.{layer}" for layer in range(layers) for kind in ("key", "value")]


def steering_names(layers: int) -> list[str]:
    """Return the names of the biases, float32 [mlp] each: a steered graph's last inputs."""
    return [f"steering.{layer}" for layer in range(layers)]


class _Trace:
    """A pass that leaves attention and rotation to GroupQueryAttention."""

    def __init__(
        self,
        tables: list[torch.Tensor],
        scales: Sequence[CacheScales],
        caches: list[torch.Tensor],
        last: torch.Tensor,
        length: torch.Tensor,
    ):
        """Take two `tables` and two `caches` of every layer (see `Architecture`); no tables: nothing rotates."""
        self._tables = tables
        self._scales = scales
        self._past = caches
        self._filled = (last, length)
        self.present: list[torch.Tensor] = []

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: AttentionSettings
    ) -> torch.Tensor:
        done = len(self.present)
        _, heads, n, head_dim = query.shape
        flat = [new.transpose(1, 2).reshape(1, n, -1) for new in (query, key, value)]
        past = self._past[done : done + 2]
        tables = self._tables[done : done + 2]
        attributes: dict[str, Any] = {"num_heads": heads, "kv_num_heads": key.shape[1], "scale": settings.scale}
        if tables:
            attributes["do_rotary"] = 1
        if settings.window is not None:
            attributes["local_window_size"] = settings.window
        if settings.softcap is not None:
            attributes["softcap"] = settings.softcap
        sink = torch.full((heads,), EMPTY_SINK)
        scales: tuple[torch.Tensor, ...] = ()
        if self._scales:
            scales = self._scales[done // 2].keys, self._scales[done // 2].values
            attributes |= {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8}
        mixed, *present = torch.onnx.ops.symbolic_multi_out(
            f"{CONTRIB}::GroupQueryAttention",
            (*flat, *past, *self._filled, *(tables or (None, None)), None, None, sink, *scales),
            attributes,
            dtypes=(query.dtype, past[0].dtype, past[1].dtype),
            shapes=(flat[0].shape, past[0].shape, past[1].shape),
            version=1,
        )
        self.present += present
        return mixed.reshape(1, n, heads, head_dim)

    def rotate(self, query: torch.Tensor, key: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return query, key


class _Step(torch.nn.Module):
    """The exported function."""

    def __init__(self, model: PreTrainedModel, architecture: Architecture, candidates: int):
        super().__init__()
        self.model = model
        self.candidates = candidates
        self.tokens = tokens_of(model)
        self.tables = [half for table in architecture.rotations if table for half in (table.cos, table.sin)]
        self.scales = architecture.scales

    def forward(
        self,
        tokens: torch.Tensor,
        logit_rows: torch.Tensor,
        last_position: torch.Tensor,
        length: torch.Tensor,
        caches: list[torch.Tensor],
        biases: Sequence[torch.Tensor] = (),
    ) -> tuple[torch.Tensor, ...]:
        """Return `OUTPUTS` and the caches in their order and shapes; `candidate_count` becomes an input later."""
        step = _Trace(self.tables, self.scales, caches, last_position, length)
        first_position = last_position.to(torch.int64) + 1 - tokens.shape[1]
        with steered_by(self.model, biases) if biases else nullcontext():
            logits = forward(self.model, tokens, first_position, logit_rows, step)
        candidate_logits, candidate_tokens = logits.topk(self.candidates, dim=-1)
        # LogSoftmax is one quick node; a log of a sum of exponentials written out is six.
        log_normalizer = logits[:, 0] - logits.log_softmax(-1)[:, 0]
        if self.tokens is not None:
            candidate_tokens = self.tokens[candidate_tokens]
            logits = spread(logits, log_normalizer[:, None], self.tokens, self.model.config.vocab_size)
        return candidate_tokens, candidate_logits, log_normalizer, logits, *step.present


def write_graph(
    model: PreTrainedModel, architecture: Architecture, candidates: int, graph: Path, *, mlp: int = 0
) -> None:
    """Trace the model and write one file, weights inside, a tied head sharing the embedding's.

    With `mlp` the graph is steered: it has a further input [mlp] for every layer, which is added to its up projection.
    """
    biases = [torch.zeros(mlp) for _ in range(architecture.shape.layers)] if mlp else []
    n, m, c = (torch.export.Dim(letter, min=1) for letter in "nmc")
    shape = architecture.shape
    dtype = getattr(torch, shape.dtype)
    caches = [torch.zeros(1, shape.kv_heads, 13, shape.head_dim, dtype=dtype) for _ in range(2 * shape.layers)]
    example: tuple[Any, ...] = (
        torch.zeros(1, 5, dtype=torch.int64),
        torch.arange(3),
        torch.tensor([11], dtype=torch.int32),
        torch.tensor(12, dtype=torch.int32),
        caches,
    )
    dynamic: tuple[Any, ...] = ({1: n}, {0: m}, {}, {}, [{2: c}] * len(caches))
    if biases:
        example += (biases,)
        dynamic += ([{}] * len(biases),)
    names = [name for name in INPUTS if name != "candidate_count"]
    exported = _Step(model, architecture, candidates).eval()
    with warnings.catch_warnings(), torch.no_grad(), head_of_kept_tokens(model):
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            exported,
            example,
            dynamo=True,
            opset_version=OPSET,
            input_names=[*names, *cache_names("past", shape.layers), *steering_names(len(biases))],
            output_names=[*OUTPUTS, *cache_names("present", shape.layers)],
            dynamic_shapes=dynamic,
            optimize=True,
            verbose=False,
        )
    if program is None:
        raise ExportMismatch("the exporter returned nothing")
    fuse_rms_normalization(program.model)
    fuse_skip_rms_normalization(program.model)
    traced = program.model_proto
    if all(opset.domain != CONTRIB for opset in traced.opset_import):
        traced.opset_import.append(onnx.helper.make_opsetid(CONTRIB, 1))
    _ask_for_candidate_count(traced.graph)
    _skip_reshapes(traced.graph)
    _join_projections(traced.graph)
    _pick_rows_at_once(traced.graph)
    _forget_origins(traced)
    drop_unused(traced.graph)
    onnx.save(traced, graph)


def write_steering_graph(steering: SteeringWeights, graph: Path) -> None:
    """Write the graph that turns a steering vector into the biases of all layers, `steering.L` = U_L c.

    U is in float32: at three layers of 512 by 64 the file has 0.4 MB, and runs in a few microseconds. It names its
    projection, so that drafters of different projections have different files.
    """
    nodes, outputs, weights = [], [], []
    for name, matrix in zip(steering_names(len(steering.matrices)), steering.matrices, strict=True):
        weight = f"{name}.weight"
        weights.append(onnx.numpy_helper.from_array(matrix.T.contiguous().numpy(), weight))
        nodes.append(onnx.helper.make_node("MatMul", [VECTOR, weight], [name]))
        outputs.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [steering.mlp]))
    vector = onnx.helper.make_tensor_value_info(VECTOR, onnx.TensorProto.FLOAT, [steering.rank])
    model = onnx.helper.make_model(
        onnx.helper.make_graph(nodes, "steering", [vector], outputs, weights),
        opset_imports=[onnx.helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
    )
    onnx.helper.set_model_props(model, {"projection": steering.projection_id})
    onnx.save(model, graph)


def _ask_for_candidate_count(graph: onnx.GraphProto) -> None:
    """Make the number of candidates an input: greedy drafting needs one, and finding 128 takes 0.04 ms more."""
    name = "candidate_count"
    top = next(node for node in graph.node if node.op_type == "TopK")
    top.input[1] = name
    at = list(INPUTS).index(name)
    inputs = [
        *graph.input[:at],
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, [1]),
        *graph.input[at:],
    ]
    del graph.input[:]
    graph.input.extend(inputs)
    for output in graph.output:
        if output.name.startswith("candidate_"):
            output.type.tensor_type.shape.dim[1].dim_param = name


def _skip_reshapes(graph: onnx.GraphProto) -> None:
    """Link attention to its products directly: the trace splits heads on one side of it only to join them again."""
    producers = {output: node for node in graph.node for output in node.output}

    def beyond(name: str) -> str:
        while (node := producers.get(name)) is not None and node.op_type == "Reshape":
            name = node.input[0]
        return name

    for node in graph.node:
        if node.op_type == "GroupQueryAttention":
            wanted, where = "MatMul", range(3)
        elif node.op_type == "MatMul":
            wanted, where = "GroupQueryAttention", range(1)
        else:
            continue
        for index in where:
            source = beyond(node.input[index])
            if source in producers and producers[source].op_type == wanted:
                node.input[index] = source


def _join_projections(graph: onnx.GraphProto) -> None:
    """Make queries, keys and values one product where nothing stands between the three and their attention."""
    weights = {tensor.name: tensor for tensor in graph.initializer}
    producers = {output: node for node in graph.node for output in node.output}
    for attention in [node for node in graph.node if node.op_type == "GroupQueryAttention"]:
        products = [producers[name] for name in attention.input[:3]]
        if any(node.op_type != "MatMul" or node.input[1] not in weights for node in products):
            continue
        if len({node.input[0] for node in products}) != 1:
            continue
        parts = [onnx.numpy_helper.to_array(weights[node.input[1]]) for node in products]
        first = products[0]
        joined = first.input[1] + ".and_keys_and_values"
        graph.initializer.append(onnx.numpy_helper.from_array(np.concatenate(parts, axis=1), joined))
        first.input[1] = joined
        attention.input[1] = attention.input[2] = ""


def _pick_rows_at_once(graph: onnx.GraphProto) -> None:
    """Turn the trace's Transpose, GatherND, Transpose for `hidden[:, logit_rows]` into the Gather that it is."""
    producers = {output: node for node in graph.node for output in node.output}
    for node in graph.node:
        pick = producers.get(node.input[0]) if node.op_type == "Transpose" else None
        if pick is None or pick.op_type != "GatherND":
            continue
        turned, indices = (producers.get(name) for name in pick.input)
        if turned is None or indices is None or (turned.op_type, indices.op_type) != ("Transpose", "Unsqueeze"):
            continue
        gather = onnx.helper.make_node("Gather", [turned.input[0], indices.input[0]], list(node.output), axis=1)
        node.CopyFrom(gather)


def _forget_origins(traced: onnx.ModelProto) -> None:
    """Drop the exporter's notes on where each node came from: they are long, and name this machine's files."""
    for part in (traced, traced.graph, *traced.graph.node, *traced.graph.initializer):
        del part.metadata_props[:]
        part.doc_string = ""
    for value in (*traced.graph.input, *traced.graph.output):
        del value.metadata_props[:]
    del traced.graph.value_info[:]


def drop_unused(graph: onnx.GraphProto) -> None:
    """Remove nodes and weights that nothing reads."""
    needed = {output.name for output in graph.output}
    kept: list[onnx.NodeProto] = []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            needed.update(node.input)
            kept.insert(0, node)
    weights = [tensor for tensor in graph.initializer if tensor.name in needed]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(kept)
    graph.initializer.extend(weights)
