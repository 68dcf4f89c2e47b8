"""From a transformers folder to the ONNX package that an edge runs.

Any decoder-only model goes through one attention function (`_attend_over_past`), registered in transformers'
attention interface, that reads the past from a tensor and hands the new keys and values back; no model code is
copied. The graph's inputs and outputs are listed in `INPUTS` and `OUTPUTS`; p may be 0, n and m are at least 1.
Nothing is published before ONNX Runtime has agreed with torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
import transformers
from onnxscript.rewriter.ort_fusions.rms_normalization import fuse_rms_normalization
from onnxscript.rewriter.ort_fusions.rotary_embedding import RotaryEmbeddingFusion
from onnxscript.rewriter.ort_fusions.skip_normalization import fuse_skip_rms_normalization
from onnxscript.rewriter.pattern import RewriteRuleClassBase, RewriteRuleSet
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from outrider.proto.errors import InvalidArgument, OutriderError
from outrider.proto.tokenizer import tokenizer_hash

FORMAT = "outrider-drafter/1"
ATTENTION = "outrider_export"
OPSET = 20
CONTRIB = "com.microsoft"  # operators of ONNX Runtime's own
BLOCK = 64  # weights that share a scale
PRECISIONS = ("float32", "int8")
MODEL_FILE, TOKENIZER_FILE, MANIFEST_FILE = "model.onnx", "tokenizer.json", "manifest.json"
INPUTS: dict[str, dict[str, Any]] = {
    "tokens": {"dtype": "int64", "shape": ["n"]},
    "past": {"dtype": "float32", "shape": ["p", "layers", 2, "kv_heads", "head_dim"]},
    "logit_rows": {"dtype": "int64", "shape": ["m"]},
}
OUTPUTS: dict[str, dict[str, Any]] = {
    "candidate_tokens": {"dtype": "int64", "shape": ["m", "candidates"]},
    "candidate_logits": {"dtype": "float32", "shape": ["m", "candidates"]},
    "log_normalizer": {"dtype": "float32", "shape": ["m"]},
    "logits": {"dtype": "float32", "shape": ["m", "vocab_size"]},
    "present": {"dtype": "float32", "shape": ["n", "layers", 2, "kv_heads", "head_dim"]},
}
CACHE_LAYOUT = "[position, layer, key_or_value, kv_head, head_dim]"

# What the check demands. Errors are in units of the standard deviation of torch's logits.
LARGEST_FLOAT32_ERROR = 1e-3
LEAST_INT8_AGREEMENT = 0.97
LARGEST_INT8_KL = 0.01
# Two best tokens this close (nats) may change places under 8-bit weights: either is as good a proposal.
INT8_TIE = 0.1
CHECK_LENGTH = 96
CHECK_SEQUENCES = 4

Manifest = dict[str, Any]


class ExportMismatch(OutriderError):
    """ONNX Runtime and torch disagree about the exported model; nothing was published."""


def export_drafter(
    source_folder: Path,
    out_folder: Path,
    *,
    name: str,
    precision: str = "float32",
    candidates: int = 64,
    target_id: str,
) -> Manifest:
    """Export a transformers causal language model, check it against torch, and publish it as a drafter package.

    Args:
        source_folder: config.json, model.safetensors, tokenizer.json; training.json is summarised if present.
        out_folder: replaced whole once the check has passed, untouched otherwise.
        name: of the drafter, for people and catalogues.
        precision: "float32", or "int8" for 8-bit weights and products (see `quantise`).
        candidates: how many of the most likely tokens the graph returns in order.
        target_id: of the target that the drafter was distilled for.

    Returns:
        the manifest, as written to `out_folder/manifest.json`.
    """
    transformers.utils.logging.disable_progress_bar()
    source_folder, out_folder = Path(source_folder), Path(out_folder)
    tokenizer_file = source_folder / TOKENIZER_FILE
    if not name:
        raise InvalidArgument("a drafter needs a name", field="name")
    if precision not in PRECISIONS:
        raise InvalidArgument(f"{precision!r} is none of {', '.join(PRECISIONS)}", field="precision")
    if not tokenizer_file.is_file():
        raise InvalidArgument(f"{source_folder} has no {TOKENIZER_FILE}", field="source_folder")
    AttentionInterface.register(ATTENTION, _attend_over_past)
    model = _load(source_folder, attention=ATTENTION)
    if not 1 <= candidates <= model.config.vocab_size:
        raise InvalidArgument(
            f"{candidates} is not between 1 and the vocabulary of {model.config.vocab_size}", field="candidates"
        )
    shape = _cache_shape(model)
    unfinished = out_folder.with_name(out_folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        graph = unfinished / MODEL_FILE
        write_graph(model, shape, candidates, graph)
        if precision == "int8":
            quantise(graph)
        plain = _load(source_folder, attention=None)
        check = check_graph(plain, shape, graph, precision=precision, candidates=candidates)
        shutil.copyfile(tokenizer_file, unfinished / TOKENIZER_FILE)
        manifest = _manifest(model, shape, unfinished, source_folder)
        manifest |= {"name": name, "target": target_id, "precision": precision, "candidates": candidates}
        manifest |= {"check": check}
        (unfinished / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        _swap(unfinished, out_folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return manifest


def open_session(graph: Path, threads: int = 1) -> onnxruntime.InferenceSession:
    """A CPU session that computes on `threads` threads and does not spin between calls."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


# The graph.


@dataclass(frozen=True)
class CacheShape:
    """What one position of the KV cache holds: [layers, 2, kv_heads, head_dim]."""

    layers: int
    kv_heads: int
    head_dim: int

    def empty(self) -> torch.Tensor:
        """No past: float32 [0, layers, 2, kv_heads, head_dim]."""
        return torch.zeros(0, self.layers, 2, self.kv_heads, self.head_dim)


class _Pass:
    """What the attention function sees of the past and leaves of the present during one forward pass."""

    def __init__(self, past: torch.Tensor | None):
        """`past`: [p, layers, 2, kv_heads, head_dim], or None while nobody knows that shape."""
        self.length = 0
        self.past: torch.Tensor | None = None
        self.present: list[torch.Tensor] = []  # keys, then values, of every layer: [1, n, kv_heads, head_dim]
        if past is None:
            return
        self.length, layers, _, kv_heads, head_dim = past.shape
        # One transposition for all layers, after which a head's keys are a matrix. The reshape keeps ONNX Runtime from
        # moving the transposition into the matrix products, where an empty past ends the process (1.31, SIGFPE).
        self.past = past.permute(1, 2, 3, 0, 4).reshape(layers * 2, kv_heads, self.length, head_dim)


def _attend_over_past(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None,
    *,
    outrider_pass: _Pass,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention of n new positions over p past ones and themselves.

    Query heads are grouped by the key head they share, and past and new scores are computed apart, so that keys and
    values are neither repeated nor joined.

    `query` is [1, heads, n, head_dim]; `key` and `value` are [1, kv_heads, n, head_dim], keys rotated. `sliding_window`
    is how many positions back are seen, the own one counted; all, if None here and on `module`. The result is
    [1, n, heads, head_dim].
    """
    heads, n, head_dim = query.shape[1:]
    kv_heads = key.shape[1]
    p, done = outrider_pass.length, len(outrider_pass.present)
    pieces = [(key.squeeze(0), value.squeeze(0))]
    outrider_pass.present += [key.transpose(1, 2), value.transpose(1, 2)]
    if outrider_pass.past is not None:
        pieces.insert(0, (outrider_pass.past[done], outrider_pass.past[done + 1]))
    scale = head_dim**-0.5 if scaling is None else scaling
    grouped = query.reshape(kv_heads, heads // kv_heads * n, head_dim)
    scores = torch.cat([grouped @ keys.transpose(1, 2) * scale for keys, _ in pieces], dim=-1)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    distance = (torch.arange(n) + p)[:, None] - torch.arange(p + n)[None, :]
    seen = distance >= 0
    window = sliding_window if sliding_window is not None else getattr(module, "sliding_window", None)
    if window is not None:
        seen = seen & (distance < window)
    bias = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    weights = (scores.reshape(heads, n, p + n) + bias).softmax(-1).reshape(kv_heads, heads // kv_heads * n, p + n)
    mixed = weights[..., p:] @ pieces[-1][1]
    if len(pieces) > 1:
        mixed = mixed + weights[..., :p] @ pieces[0][1]
    return mixed.reshape(1, heads, n, head_dim).transpose(1, 2), None


class _Step(torch.nn.Module):
    """The exported function: tokens and past in, logits and present out."""

    def __init__(self, model: PreTrainedModel, candidates: int):
        super().__init__()
        self.model = model
        self.candidates = candidates

    def forward(self, tokens: torch.Tensor, past: torch.Tensor, logit_rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Shapes as in `INPUTS` and `OUTPUTS`, outputs in that order."""
        step = _Pass(past)
        logits = _logits(self.model, tokens, past.shape[0], logit_rows, step)
        candidate_logits, candidate_tokens = logits.topk(self.candidates, dim=-1)
        largest = candidate_logits[:, :1]
        log_normalizer = (logits - largest).exp().sum(-1).log() + largest.squeeze(1)
        present = torch.cat(step.present, dim=2).reshape(tokens.shape[0], *past.shape[1:])
        return candidate_tokens, candidate_logits, log_normalizer, logits, present


def _logits(
    model: PreTrainedModel, tokens: torch.Tensor, first_position: int, logit_rows: torch.Tensor, step: _Pass
) -> torch.Tensor:
    """float32 [m, vocab] of the model's own forward, whatever it does to its logits last."""
    logits: torch.Tensor = model(
        input_ids=tokens[None],
        position_ids=(torch.arange(tokens.shape[0]) + first_position)[None],
        use_cache=False,
        logits_to_keep=logit_rows,
        outrider_pass=step,
    ).logits[0]
    return logits.float()


def _load(folder: Path, *, attention: str | None) -> PreTrainedModel:
    """The model in float32; `attention` names a registered attention function, None the model's own default."""
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            attn_implementation=attention,
        )
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"no causal language model to export: {error}", field="source_folder") from error
    return model.eval().requires_grad_(False)


def _cache_shape(model: PreTrainedModel) -> CacheShape:
    """Found by running one token: names of configuration fields differ from model to model."""
    step = _Pass(None)
    with torch.no_grad():
        _logits(model, torch.zeros(1, dtype=torch.int64), 0, torch.zeros(1, dtype=torch.int64), step)
    shapes = {tuple(new.shape[2:]) for new in step.present}
    if len(shapes) != 1:
        raise InvalidArgument(f"its layers' caches differ in shape: {sorted(shapes)}", field="source_folder")
    kv_heads, head_dim = shapes.pop()
    return CacheShape(len(step.present) // 2, kv_heads, head_dim)


def write_graph(model: PreTrainedModel, shape: CacheShape, candidates: int, graph: Path) -> None:
    """Trace the model and write one file, weights inside, a tied head sharing the embedding's."""
    n, p, m = (torch.export.Dim(letter, min=low) for letter, low in (("n", 1), ("p", 0), ("m", 1)))
    example = (
        torch.zeros(5, dtype=torch.int64),
        torch.zeros(7, shape.layers, 2, shape.kv_heads, shape.head_dim),
        torch.arange(3),
    )
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            _Step(model, candidates).eval(),
            example,
            dynamo=True,
            opset_version=OPSET,
            input_names=list(INPUTS),
            output_names=list(OUTPUTS),
            dynamic_shapes={"tokens": {0: n}, "past": {0: p}, "logit_rows": {0: m}},
            optimize=True,
            verbose=False,
        )
    if program is None:
        raise ExportMismatch("the exporter returned nothing")
    fuse_rms_normalization(program.model)
    fuse_skip_rms_normalization(program.model)
    RewriteRuleSet([_Rotation.rule()]).apply_to_model(program.model)
    traced = program.model_proto
    if all(opset.domain != CONTRIB for opset in traced.opset_import):
        traced.opset_import.append(onnx.helper.make_opsetid(CONTRIB, 1))
    _forget_origins(traced)
    _drop_unused(traced)
    onnx.save(traced, graph)


class _Rotation(RotaryEmbeddingFusion):
    """Eight nodes that turn queries or keys, as one of ONNX Runtime's own.

    Its table is the angles of the n new positions, so the model's own way to them stays whatever it is.
    """

    def __init__(self) -> None:
        RewriteRuleClassBase.__init__(self, name="OutriderRotation")

    def rewrite(self, op: Any, x: Any, cos: Any, sin: Any, **_: Any) -> Any:
        """`x`: [1, heads, n, head_dim]; `cos`, `sin`: [1, 1, n, head_dim], both halves alike."""
        first, last, axis = ([0], [x.shape[3] // 2], [1])
        tables = [
            op.Slice(
                op.Squeeze(angles, op.Constant(value_ints=[0, 1])),
                *(op.Constant(value_ints=ints) for ints in (first, last, axis)),
            )
            for angles in (cos, sin)
        ]
        return op.RotaryEmbedding(x, op.Constant(value_ints=[0]), *tables, interleaved=0, _domain=CONTRIB)


def _forget_origins(traced: onnx.ModelProto) -> None:
    """Drop the exporter's notes on where each node came from: they are long, and name this machine's files."""
    for part in (traced, traced.graph, *traced.graph.node, *traced.graph.initializer):
        del part.metadata_props[:]
        part.doc_string = ""
    for value in (*traced.graph.input, *traced.graph.output):
        del value.metadata_props[:]
    del traced.graph.value_info[:]


def _drop_unused(model: onnx.ModelProto) -> None:
    """Remove transpositions and weights that no node reads any more."""
    used = {name for node in model.graph.node for name in node.input}
    nodes = [node for node in model.graph.node if node.op_type != "Transpose" or node.output[0] in used]
    used = {name for node in nodes for name in node.input}
    weights = [tensor for tensor in model.graph.initializer if tensor.name in used]
    del model.graph.node[:], model.graph.initializer[:]
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(weights)


def quantise(graph: Path) -> None:
    """Rewrite the file with 8-bit weights.

    Every product with a constant matrix becomes a MatMulNBits node, which quantises its activations too, and an
    embedding that such a product shares is looked up in the same 8-bit matrix.
    MatMulNBits is faster than `quantize_dynamic`, whose integer product needs four more nodes around it.
    """
    model = onnx.load(graph)
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    transposed = {
        node.output[0]: node.input[0]
        for node in model.graph.node
        if node.op_type == "Transpose" and node.input[0] in weights
    }
    quantised: dict[str, QuantisedMatrix] = {}
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if node.op_type == "MatMul" and (node.input[1] in transposed or _is_matrix(weights.get(node.input[1]))):
            name = transposed.get(node.input[1], node.input[1])
            matrix = onnx.numpy_helper.to_array(weights[name])
            columns_first = matrix if node.input[1] in transposed else matrix.T
            quantised[name] = QuantisedMatrix.of(columns_first)
            node = quantised[name].product(name, node)
        nodes.append(node)
    nodes = [_quantised_lookup(node, quantised) for node in nodes]
    for name, stored in quantised.items():
        model.graph.initializer.extend(stored.initializers(name))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    _drop_unused(model)
    onnx.save(model, graph)


@dataclass(frozen=True)
class QuantisedMatrix:
    """A matrix [rows, columns] in blocks of `BLOCK` columns: weight = (level - 128) * scale of its block.

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
        """The nearest to `matrix` (float32 [rows, columns])."""
        rows, columns = matrix.shape
        padded = np.pad(matrix, ((0, 0), (0, -columns % BLOCK))).reshape(rows, -1, BLOCK)
        scales = np.abs(padded).max(-1) / 127
        scales[scales == 0] = 1
        levels = np.rint(padded / scales[..., None]) + 128
        return QuantisedMatrix(levels.astype(np.uint8), scales.astype(np.float32), columns)

    def initializers(self, name: str) -> list[onnx.TensorProto]:
        """All forms that nodes may ask for; those that none does are dropped."""
        rows = self.levels.reshape(len(self.levels), -1)
        return [
            onnx.numpy_helper.from_array(self.levels, f"{name}.levels"),
            onnx.numpy_helper.from_array(self.scales, f"{name}.scales"),
            onnx.numpy_helper.from_array(rows, f"{name}.rows"),
        ]

    def product(self, name: str, node: onnx.NodeProto) -> onnx.NodeProto:
        """What stands in for the MatMul `node` by this matrix, transposed."""
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


def _quantised_lookup(node: onnx.NodeProto, quantised: dict[str, QuantisedMatrix]) -> onnx.NodeProto:
    """A lookup of rows of a quantised matrix reads the quantised rows; any other node stays."""
    if node.op_type != "Gather" or node.input[0] not in quantised:
        return node
    matrix = quantised[node.input[0]]
    if matrix.columns % BLOCK or any(attribute.name == "axis" and attribute.i for attribute in node.attribute):
        return node
    return onnx.helper.make_node(
        "GatherBlockQuantized",
        [f"{node.input[0]}.rows", node.input[1], f"{node.input[0]}.scales"],
        list(node.output),
        domain=CONTRIB,
        bits=8,
        block_size=BLOCK,
        gather_axis=0,
        quantize_axis=1,
    )


def _is_matrix(tensor: onnx.TensorProto | None) -> bool:
    return tensor is not None and len(tensor.dims) == 2


# The check.


def check_graph(
    plain: PreTrainedModel, shape: CacheShape, graph: Path, *, precision: str, candidates: int
) -> dict[str, float | int]:
    """Run the graph in uneven chunks and single steps, and hold every output against torch's plain whole forward.

    Returns:
        the figures, in units of the standard deviation of torch's logits where they are errors.
    """
    session = open_session(graph)
    comparison = _Comparison(INT8_TIE if precision == "int8" else 0.0)
    for index, tokens in enumerate(_check_sequences(plain)):
        with torch.inference_mode():
            logits_by_torch = plain(input_ids=torch.from_numpy(tokens)[None]).logits[0].float().numpy()
        chunks = _chunk_lengths(len(tokens), seed=index)
        comparison.add(logits_by_torch, run_in_chunks(session, tokens, chunks, shape), candidates)
    figures = comparison.figures()
    limits: dict[str, bool] = {
        "candidates are not the largest logits in order": comparison.candidate_faults == 0,
        "log_normalizer is wrong": comparison.normalizer_error <= LARGEST_FLOAT32_ERROR,
    }
    if precision == "float32":
        limits["logits differ"] = figures["largest_error"] <= LARGEST_FLOAT32_ERROR
        limits["argmax differs"] = figures["agreement_beyond_ties"] == 1.0
    else:
        limits["argmax differs"] = figures["agreement_beyond_ties"] >= LEAST_INT8_AGREEMENT
        limits["distributions differ"] = figures["mean_kl"] <= LARGEST_INT8_KL
    if failed := [what for what, holds in limits.items() if not holds]:
        raise ExportMismatch(f"ONNX Runtime does not compute what torch does: {', '.join(failed)}; {figures}")
    return figures


def run_in_chunks(
    session: onnxruntime.InferenceSession, tokens: np.ndarray, chunks: Sequence[int], shape: CacheShape
) -> dict[str, np.ndarray]:
    """All outputs for `tokens` (int64 [length]), fed in `chunks` that sum to its length, joined along positions."""
    past = shape.empty().numpy()
    outputs: dict[str, list[np.ndarray]] = {name: [] for name in OUTPUTS}
    first = 0
    for length in chunks:
        fed = {"tokens": tokens[first : first + length], "past": past, "logit_rows": np.arange(length)}
        for name, value in zip(OUTPUTS, session.run(list(OUTPUTS), fed), strict=True):
            outputs[name].append(value)
        past = np.concatenate([past, outputs["present"][-1]])
        first += length
    return {name: np.concatenate(values) for name, values in outputs.items()}


class _Comparison:
    """Running totals of how ONNX Runtime's logits differ from torch's."""

    def __init__(self, tie: float):
        """`tie`: two best logits at most this far apart, in nats, are a tie; float32 rounding is added to it."""
        self.tie = tie
        self.largest_error = 0.0
        self.normalizer_error = 0.0
        self.candidate_faults = 0
        self.kl = 0.0
        self.agreed = self.agreed_beyond_ties = self.beyond_ties = self.positions = 0

    def add(self, logits_by_torch: np.ndarray, outputs: dict[str, np.ndarray], candidates: int) -> None:
        """`logits_by_torch`: float32 [length, vocab]; `outputs` as in `OUTPUTS`, m = length."""
        logits_by_onnx = outputs["logits"]
        spread = float(logits_by_torch.std())
        if not np.isfinite(logits_by_onnx).all():
            raise ExportMismatch("ONNX Runtime returned logits that are not finite")
        self.largest_error = max(self.largest_error, float(np.abs(logits_by_onnx - logits_by_torch).max()) / spread)
        two_best = np.partition(logits_by_torch, -2)[:, -2:]
        clear = two_best[:, 1] - two_best[:, 0] > self.tie + 2 * LARGEST_FLOAT32_ERROR * spread
        same = logits_by_onnx.argmax(-1) == logits_by_torch.argmax(-1)
        self.positions += len(same)
        self.agreed += int(same.sum())
        self.beyond_ties += int(clear.sum())
        self.agreed_beyond_ties += int((same & clear).sum())
        log_p, log_q = _log_softmax(logits_by_torch), _log_softmax(logits_by_onnx)
        self.kl += float((np.exp(log_p) * (log_p - log_q)).sum())
        tokens, values = outputs["candidate_tokens"], outputs["candidate_logits"]
        largest = -np.sort(-logits_by_onnx, axis=-1)[:, :candidates]
        self.candidate_faults += int((np.take_along_axis(logits_by_onnx, tokens, -1) != values).sum())
        self.candidate_faults += int((values != largest).sum())
        normalizer = logits_by_onnx[:, 0] - _log_softmax(logits_by_onnx)[:, 0]
        self.normalizer_error = max(
            self.normalizer_error, float(np.abs(normalizer - outputs["log_normalizer"]).max()) / spread
        )

    def figures(self) -> dict[str, float | int]:
        return {
            "positions": self.positions,
            "largest_error": self.largest_error,
            "agreement": self.agreed / self.positions,
            "agreement_beyond_ties": self.agreed_beyond_ties / max(1, self.beyond_ties),
            "mean_kl": self.kl / self.positions,
        }


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, in float64."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    normalised: np.ndarray = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return normalised


def _check_sequences(plain: PreTrainedModel) -> list[np.ndarray]:
    """Half of them random tokens, half text of the model's own making; int64 [length] each."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = plain.config.vocab_size
    length = min(CHECK_LENGTH, _context_length(plain))
    random = torch.randint(vocabulary, (CHECK_SEQUENCES, length), generator=generator)
    written = torch.randint(vocabulary, (CHECK_SEQUENCES, 2), generator=generator)
    with torch.inference_mode():
        while written.shape[1] < length:
            p = plain(input_ids=written, logits_to_keep=1).logits[:, -1].float().softmax(-1)
            written = torch.cat([written, torch.multinomial(p, 1, generator=generator)], dim=1)
    return [*random.numpy(), *written.numpy()]


def _chunk_lengths(total: int, seed: int) -> list[int]:
    """Uneven chunks and single steps that sum to `total`."""
    choose = np.random.default_rng(seed)
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(left, int(choose.choice([1, 1, 1, 2, 5, 17, 33]))))
    return lengths


# The package.


def _manifest(model: PreTrainedModel, shape: CacheShape, folder: Path, source_folder: Path) -> Manifest:
    files: dict[str, dict[str, Any]] = {
        path.name: {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "bytes": path.stat().st_size}
        for path in sorted(folder.iterdir())
    }
    manifest: Manifest = {
        "format": FORMAT,
        "name": "",
        "version": files[MODEL_FILE]["sha256"][:12],
        "kind": "onnx-lm",
        "target": "",
        "tokenizer_sha256": tokenizer_hash((folder / TOKENIZER_FILE).read_text(encoding="utf-8")),
        "files": files,
        "precision": "",
        "vocab_size": model.config.vocab_size,
        "context_length": _context_length(model),
        "candidates": 0,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "cache": {"dtype": "float32", "layout": CACHE_LAYOUT, **asdict(shape)},
        "inputs": INPUTS,
        "outputs": OUTPUTS,
        "exporter": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "onnx": onnx.__version__,
            "onnxruntime": onnxruntime.__version__,
            "opset": OPSET,
        },
    }
    training = source_folder / "training.json"
    if training.is_file():
        record = json.loads(training.read_text(encoding="utf-8"))
        manifest["training"] = {key: value for key, value in record.items() if key != "losses"}
    return manifest


def _context_length(model: PreTrainedModel) -> int:
    return int(model.config.max_position_embeddings)


def _swap(finished: Path, folder: Path) -> None:
    """Put `finished` in the place of `folder`, whatever was there."""
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(finished, folder)
    shutil.rmtree(old, ignore_errors=True)
