"""Drafters with a KV cache of int8: they draft as with float32 but for rounding, in a quarter of the bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from random_models import BYTE_LLAMA, save_with_byte_tokenizer
from transformers import DynamicCache

from outrider.cloud.export import ExportMismatch, export_drafter
from outrider.cloud.export import package_writing as publishing
from outrider.cloud.export.check import logits_by_torch, open_session, run_in_chunks
from outrider.cloud.export.model import (
    HEADROOM,
    MAX_LEVEL,
    SEED,
    Architecture,
    CacheScales,
    drawn_texts,
    load,
    load_for_export,
    look_at,
    with_int8_cache,
)
from outrider.cloud.testing import tiny_llama
from outrider.drafters import find_package
from outrider.drafters.onnx import OnnxDrafter
from outrider.drafters.proposals import ProposalRule
from outrider.proto.drafter_format import CacheShape
from outrider.proto.types import Sampling, token_ids

CHUNKS = [7, 1, 1, 20, 11]
SHAPE = CacheShape(layers=1, kv_heads=2, head_dim=16)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_llama(seed=0, **BYTE_LLAMA, tie_word_embeddings=True)
    return save_with_byte_tokenizer(model, tmp_path_factory.mktemp("llama") / "source")


@pytest.fixture(scope="module")
def package(source: Path) -> Path:
    out = source.with_name("package")
    export_drafter(source, out, name="small", candidates=8, target_id="big", kv="int8")
    return out


def test_keys_and_values_of_int8_change_the_logits_little(package: Path, source: Path) -> None:
    manifest = json.loads((package / "manifest.json").read_text())
    assert manifest["cache"]["dtype"] == manifest["inputs"]["past_key.0"]["dtype"] == "int8"
    assert 0 < manifest["check"]["mean_kl"] < 0.01
    tokens = np.random.default_rng(7).integers(0, 258, sum(CHUNKS))
    wanted = logits_by_torch(load(source), tokens)
    found = run_in_chunks(open_session(package / "model.onnx"), tokens, CHUNKS, find_package(package).cache, 8)[
        "logits"
    ]
    assert 1e-5 < np.abs(found - wanted).mean() / wanted.std() < 0.05


def test_an_edge_drafts_with_a_cache_of_int8_and_rolls_it_back(package: Path) -> None:
    loaded = find_package(package)
    assert loaded.cache.bytes_of(100) * 4 == SHAPE.bytes_of(100)
    drafter = OnnxDrafter(loaded)
    first, again = (drafter.open(ProposalRule(Sampling(temperature=0.0))) for _ in range(2))
    first.extend((0, 5, 9))
    drafts = token_ids(first.propose(6))
    first.truncate(5)
    first.extend((40, 41))
    again.extend((0, 5, 9, *drafts[:2], 40, 41))
    assert token_ids(first.propose(4)) == token_ids(again.propose(4))


def test_no_key_is_cut_off_however_far_it_is_turned(source: Path) -> None:
    plain = load(source)
    tokens = drawn_texts(plain, seed=SEED)
    architecture = with_int8_cache(look_at(load_for_export(source)), plain)
    largest = architecture.scales[0].keys * MAX_LEVEL / HEADROOM
    cut = {"by position": False, "by pairs": False}
    here = keys_at(plain, tokens, 0).amax(dim=(0, 2), keepdim=True)
    for first in range(0, 128, 16):
        there = keys_at(plain, tokens, first)
        cut["by pairs"] |= bool((there > largest * 1.0001).any())
        cut["by position"] |= bool((there > here * 1.0001).any())
    assert cut == {"by position": True, "by pairs": False}


def keys_at(plain: Any, tokens: torch.Tensor, first: int) -> torch.Tensor:
    """Sizes of the keys [rows, kv_heads, n, head_dim] of `tokens` at positions from `first` on."""
    filled = DynamicCache()
    positions = torch.arange(first, first + tokens.shape[1])[None]
    with torch.no_grad():
        plain(input_ids=tokens, position_ids=positions, past_key_values=filled, use_cache=True)
    keys: torch.Tensor = filled.layers[0].keys
    return keys.abs()


@pytest.mark.parametrize("factor", [0.1, 30.0])
def test_scales_that_cut_off_or_blur_are_refused_by_the_check(source, package, tmp_path, monkeypatch, factor) -> None:
    def write_graph(model: Any, architecture: Architecture, candidates: int, graph: Path, *, mlp: int) -> None:
        traced = onnx.load(package / "model.onnx")
        attention = next(node for node in traced.graph.node if node.op_type == "GroupQueryAttention")
        for tensor in traced.graph.initializer:
            if tensor.name in attention.input[12:14]:
                scaled = onnx.numpy_helper.to_array(tensor) * np.float32(factor)
                tensor.CopyFrom(onnx.numpy_helper.from_array(scaled, tensor.name))
        onnx.save(traced, graph)

    monkeypatch.setattr(publishing, "write_graph", write_graph)
    with pytest.raises(ExportMismatch):
        export_drafter(source, tmp_path / "out", name="small", candidates=8, target_id="big", kv="int8")
    assert list(tmp_path.iterdir()) == []


def test_scales_of_a_head_are_for_its_channels_alone(source: Path) -> None:
    scales: CacheScales = with_int8_cache(look_at(load_for_export(source)), load(source)).scales[0]
    assert scales.keys.shape == scales.values.shape == (1, 2, 1, 16)
    assert torch.equal(scales.keys[..., :8], scales.keys[..., 8:]), "a pair turns as one"
    assert len(scales.values.unique()) == 32
