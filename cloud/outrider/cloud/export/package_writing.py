"""A drafter package: model, tokenizer and manifest in one folder, published whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx
import onnxruntime
import torch
import transformers
from transformers import PreTrainedModel

from outrider.cloud.export.check import GraphCheck, SteeredCheck
from outrider.cloud.export.graph import (
    INPUTS,
    OPSET,
    OUTPUTS,
    cache_names,
    steering_names,
    write_graph,
    write_steering_graph,
)
from outrider.cloud.export.model import Architecture, context_length, load, load_for_export, look_at, with_int8_cache
from outrider.cloud.export.quantised import quantise
from outrider.cloud.export.steered import GAIN, TRAINING_FILE, SteeringWeights, check_fit, steering_of
from outrider.cloud.models.heads import HEAD, tokens_of
from outrider.drafters.packages import version_of
from outrider.proto.drafter_format import (
    CACHE_DTYPES,
    CACHE_LAYOUT,
    DRAFTER_FORMAT,
    GRAPHS,
    MANIFEST,
    MODEL,
    STEERING_GRAPH,
)
from outrider.proto.errors import InvalidArgument
from outrider.proto.plumbing.files import sha256_of
from outrider.proto.tokenizer import TOKENIZER_FILE, tokenizer_hash

Manifest = dict[str, Any]


def export_drafter(
    source_folder: Path,
    out_folder: Path,
    *,
    name: str,
    precision: str = "float32",
    kv: str = "float32",
    candidates: int = 64,
    target_id: str,
) -> Manifest:
    """Export a transformers causal language model, check it against torch, and publish it as a drafter package.

    Args:
        source_folder: config.json, model.safetensors, tokenizer.json; training.json is summarised if present. With
            steering.safetensors and projection.safetensors the drafter is steered.
        out_folder: replaced whole once the check has passed, untouched otherwise.
        name: name of the drafter, for people and catalogues.
        precision: "float32", or "int8" for 8-bit weights in 8-bit products (see `quantise`).
        kv: "float32", or "int8" for a KV cache of 8-bit numbers (see `with_int8_cache`).
        candidates: how many of the most likely tokens an edge should ask for where it draws among them.
        target_id: id of the target that the drafter was distilled for.

    Returns:
        The manifest, also written to `out_folder/manifest.json`.
    """
    transformers.utils.logging.disable_progress_bar()
    source_folder, out_folder = Path(source_folder), Path(out_folder)
    tokenizer_file = source_folder / TOKENIZER_FILE
    if not name:
        raise InvalidArgument("a drafter needs a name", field="name")
    for field, given in (("precision", precision), ("kv", kv)):  # of weights and cache, which have the same types
        if given not in CACHE_DTYPES:
            raise InvalidArgument(f"{given!r} is none of {', '.join(CACHE_DTYPES)}", field=field)
    if not tokenizer_file.is_file():
        raise InvalidArgument(f"{source_folder} has no {TOKENIZER_FILE}", field="source_folder")
    model = load_for_export(source_folder)
    tokens = tokens_of(model)
    predicted = model.config.vocab_size if tokens is None else len(tokens)
    if not 1 <= candidates <= predicted:
        raise InvalidArgument(
            f"{candidates} is not between 1 and the {predicted} tokens that its head predicts", field="candidates"
        )
    steering = steering_of(source_folder)
    if steering is not None:
        check_fit(model, steering)
    architecture, plain = look_at(model), load(source_folder)
    if kv == "int8":
        architecture = with_int8_cache(architecture, plain)
    unfinished = out_folder.with_name(out_folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        check = GraphCheck(plain, architecture.shape, precision, candidates)
        if steering is None:
            metrics: dict[str, Any] = check.metrics(_write(model, architecture, check, unfinished))
        else:
            _write(model, architecture, check, unfinished, mlp=steering.mlp)
            write_steering_graph(steering, unfinished / STEERING_GRAPH)
            with TemporaryDirectory() as folder:
                unsteered = _write(model, architecture, check, Path(folder))
                steered = SteeredCheck(check, steering, unfinished, unsteered)
                metrics = {**check.metrics(unsteered), "steered": steered.metrics()}
        shutil.copyfile(tokenizer_file, unfinished / TOKENIZER_FILE)
        manifest = _manifest(check, unfinished, source_folder, steering, name=name, target=target_id)
        manifest["check"] = metrics
        if architecture.reach is not None:
            manifest["reach"] = architecture.reach
        (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        _swap(unfinished, out_folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return manifest


def _write(
    model: PreTrainedModel, architecture: Architecture, check: GraphCheck, folder: Path, *, mlp: int = 0
) -> Path:
    graph = folder / MODEL
    write_graph(model, architecture, check.candidates, graph, mlp=mlp)
    if check.precision != "float32":
        quantise(graph)
    return graph


def _manifest(
    check: GraphCheck, folder: Path, source_folder: Path, steering: SteeringWeights | None, *, name: str, target: str
) -> Manifest:
    model, shape = check.plain, check.shape
    port = {"dtype": shape.dtype, "shape": [1, "kv_heads", "c", "head_dim"]}
    files: dict[str, dict[str, Any]] = {
        path.name: {"sha256": sha256_of(path), "bytes": path.stat().st_size} for path in sorted(folder.iterdir())
    }
    manifest: Manifest = {
        "format": DRAFTER_FORMAT,
        "name": name,
        "version": version_of(folder / graph for graph in GRAPHS),
        "kind": "onnx-lm",
        "target": target,
        "tokenizer_sha256": tokenizer_hash((folder / TOKENIZER_FILE).read_text(encoding="utf-8")),
        "files": files,
        "precision": check.precision,
        "vocab_size": model.config.vocab_size,
        "context_length": context_length(model),
        "candidates": check.candidates,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "cache": {"dtype": shape.dtype, "layout": CACHE_LAYOUT, **asdict(shape)},
        "inputs": INPUTS | dict.fromkeys(cache_names("past", shape.layers), port),
        "outputs": OUTPUTS | dict.fromkeys(cache_names("present", shape.layers), port),
        "exporter": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "onnx": onnx.__version__,
            "onnxruntime": onnxruntime.__version__,
            "opset": OPSET,
        },
    }
    if (head := getattr(model.config, HEAD, None)) is not None:
        manifest["head"] = head
    training = source_folder / TRAINING_FILE
    if training.is_file():
        record = json.loads(training.read_text(encoding="utf-8"))
        manifest["training"] = {key: value for key, value in record.items() if key not in ("losses", GAIN)}
    if steering is not None:
        bias = {"dtype": "float32", "shape": [steering.mlp]}
        manifest["inputs"] |= dict.fromkeys(steering_names(len(steering.matrices)), bias)
        manifest["parameters"] += sum(matrix.numel() for matrix in steering.matrices)
        manifest["steering"] = {
            "rank": steering.rank,
            "mlp": steering.mlp,
            "projection": steering.projection_id,
            "gain": steering.gain,
        }
    return manifest


def _swap(finished: Path, folder: Path) -> None:
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(finished, folder)
    shutil.rmtree(old, ignore_errors=True)
