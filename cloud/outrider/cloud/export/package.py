"""A drafter package: model, tokenizer and manifest in one folder, published whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
import transformers
from transformers import PreTrainedModel

from outrider.cloud.export.check import check_graph
from outrider.cloud.export.contract import (
    CACHE_LAYOUT,
    INPUTS,
    MANIFEST_FILE,
    MODEL_FILE,
    OUTPUTS,
    TOKENIZER_FILE,
    described,
)
from outrider.cloud.export.graph import OPSET, write_graph
from outrider.cloud.export.model import CacheShape, context_length, load, load_for_export, look_at
from outrider.cloud.export.quantised import quantise
from outrider.proto.errors import InvalidArgument
from outrider.proto.tokenizer import tokenizer_hash
from outrider.proto.types import DRAFTER_FORMAT

PRECISIONS = ("float32", "int8")

Manifest = dict[str, Any]


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
        candidates: how many of the most likely tokens an edge should ask for where it draws among them.
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
    model = load_for_export(source_folder)
    if not 1 <= candidates <= model.config.vocab_size:
        raise InvalidArgument(
            f"{candidates} is not between 1 and the vocabulary of {model.config.vocab_size}", field="candidates"
        )
    anatomy = look_at(model)
    shape = anatomy.shape
    unfinished = out_folder.with_name(out_folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        graph = unfinished / MODEL_FILE
        write_graph(model, anatomy, candidates, graph)
        if precision == "int8":
            quantise(graph)
        check = check_graph(load(source_folder), shape, graph, precision=precision, candidates=candidates)
        shutil.copyfile(tokenizer_file, unfinished / TOKENIZER_FILE)
        manifest = _manifest(model, shape, unfinished, source_folder)
        manifest |= {"name": name, "target": target_id, "precision": precision, "candidates": candidates}
        manifest |= {"check": check}
        (unfinished / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        _swap(unfinished, out_folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return manifest


def _manifest(model: PreTrainedModel, shape: CacheShape, folder: Path, source_folder: Path) -> Manifest:
    files: dict[str, dict[str, Any]] = {
        path.name: {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "bytes": path.stat().st_size}
        for path in sorted(folder.iterdir())
    }
    manifest: Manifest = {
        "format": DRAFTER_FORMAT,
        "name": "",
        "version": files[MODEL_FILE]["sha256"][:12],
        "kind": "onnx-lm",
        "target": "",
        "tokenizer_sha256": tokenizer_hash((folder / TOKENIZER_FILE).read_text(encoding="utf-8")),
        "files": files,
        "precision": "",
        "vocab_size": model.config.vocab_size,
        "context_length": context_length(model),
        "candidates": 0,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "cache": {"dtype": "float32", "layout": CACHE_LAYOUT, **asdict(shape)},
        "inputs": described(INPUTS, "past", shape.layers),
        "outputs": described(OUTPUTS, "present", shape.layers),
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


def _swap(finished: Path, folder: Path) -> None:
    """Put `finished` in the place of `folder`, whatever was there."""
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(finished, folder)
    shutil.rmtree(old, ignore_errors=True)
