"""Export of drafters: the graph computes what torch computes, nearly so with a cache of int8, or none is published."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from random_models import BYTE_LLAMA, save_with_byte_tokenizer
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from outrider.cloud.export import ExportMismatch, export_drafter
from outrider.cloud.export import package_writing as publishing
from outrider.cloud.export.check import open_session, run_in_chunks
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
from outrider.cloud.export.quantised import BLOCK, QuantisedMatrix, quantise
from outrider.cloud.testing import tiny_llama
from outrider.drafters import find_package
from outrider.drafters.onnx import OnnxDrafter
from outrider.drafters.proposals import ProposalRule
from outrider.proto.drafter_format import CacheShape
from outrider.proto.errors import InvalidArgument
from outrider.proto.tokenizer import tokenizer_hash
from outrider.proto.types import Sampling, token_ids
from research.architectures.__main__ import save
from research.architectures.small_models import small_model

COMMON = BYTE_LLAMA | {"num_hidden_layers": 2, "intermediate_size": 72, "max_position_embeddings": 256}
ONE_LAYER = COMMON | {"num_hidden_layers": 1}
CANDIDATES = 8
SHAPE = CacheShape(layers=2, kv_heads=2, head_dim=16)
ONE_LAYER_SHAPE = CacheShape(layers=1, kv_heads=2, head_dim=16)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied embeddings, and a training.json to be summarised."""
    model = tiny_llama(seed=0, **COMMON, tie_word_embeddings=True)
    folder = save_with_byte_tokenizer(model, tmp_path_factory.mktemp("llama") / "source")
    (folder / "training.json").write_text(json.dumps({"steps": 3, "losses": [[1, 2.0]]}))
    return folder


@pytest.fixture(scope="module")
def package(llama: Path) -> Path:
    out = llama.with_name("package")
    export_drafter(llama, out, name="tiny", target_id="big", candidates=8)
    return out


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    model = MistralForCausalLM(MistralConfig(**ONE_LAYER, sliding_window=6))
    return save_with_byte_tokenizer(model, tmp_path_factory.mktemp("mistral") / "source")


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen 3: norms on queries and keys, a head of its own."""
    torch.manual_seed(2)
    model = Qwen3ForCausalLM(Qwen3Config(**ONE_LAYER, tie_word_embeddings=False))
    return save_with_byte_tokenizer(model, tmp_path_factory.mktemp("qwen3") / "source")


def logits_by_torch(folder: Path, tokens: np.ndarray) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits: np.ndarray = model(input_ids=torch.from_numpy(tokens)[None]).logits[0].numpy()
    return logits


def random_tokens(length: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 258, length)


@pytest.mark.parametrize("chunks", [[40], [1] * 40, [7, 1, 1, 20, 11]])
def test_any_chunking_gives_the_logits_of_torchs_whole_forward(package: Path, llama: Path, chunks: list[int]) -> None:
    tokens = random_tokens(40)
    outputs = run_in_chunks(open_session(package / "model.onnx"), tokens, chunks, SHAPE, CANDIDATES)
    expected = logits_by_torch(llama, tokens)
    np.testing.assert_allclose(outputs["logits"], expected, atol=1e-4 * expected.std())
    whole = run_in_chunks(open_session(package / "model.onnx"), tokens, [40], SHAPE, CANDIDATES)
    for name in ("present_key.0", "present_value.1"):
        np.testing.assert_allclose(outputs[name][:, :, :40], whole[name][:, :, :40], atol=1e-4)


def test_only_the_rows_asked_for_return_and_candidates_are_the_largest_logits(package: Path, llama: Path) -> None:
    tokens = random_tokens(9)
    expected = logits_by_torch(llama, tokens)
    session = open_session(package / "model.onnx")
    past = {value.name: np.zeros((1, 2, 9, 16), np.float32) for value in session.get_inputs() if "past" in value.name}
    for rows, count in (([8], 8), ([0, 3, 8], 1), ([5, 5], 258)):
        fed = {
            "tokens": tokens[None],
            "logit_rows": np.array(rows, dtype=np.int64),
            "candidate_count": np.array([count]),
            "last_position": np.array([8], dtype=np.int32),
            "length": np.array(9, dtype=np.int32),
        }
        candidate_tokens, candidate_logits, log_normalizer, logits, *present = session.run(None, fed | past)
        assert logits.shape == (len(rows), 258)
        assert candidate_tokens.shape == candidate_logits.shape == (len(rows), count)
        assert [cache.shape for cache in present] == [(1, 2, 9, 16)] * 4
        np.testing.assert_allclose(logits, expected[rows], atol=1e-4)
        np.testing.assert_array_equal(candidate_tokens, np.argsort(-logits, axis=-1, kind="stable")[:, :count])
        np.testing.assert_array_equal(candidate_logits, -np.sort(-logits, axis=-1)[:, :count])
        torch_normalizer = torch.from_numpy(expected[rows]).logsumexp(-1).numpy()
        np.testing.assert_allclose(log_normalizer, torch_normalizer, atol=1e-4)


def test_the_manifest_describes_the_package(package: Path, llama: Path) -> None:
    manifest = json.loads((package / "manifest.json").read_text())
    assert {path.name for path in package.iterdir()} == {"model.onnx", "tokenizer.json", "manifest.json"}
    for name, file in manifest["files"].items():
        content = (package / name).read_bytes()
        assert (file["sha256"], file["bytes"]) == (hashlib.sha256(content).hexdigest(), len(content))
    assert manifest["version"] == manifest["files"]["model.onnx"]["sha256"][:12]
    assert manifest["tokenizer_sha256"] == tokenizer_hash((llama / "tokenizer.json").read_text())
    assert (manifest["format"], manifest["kind"]) == ("outrider-drafter/2", "onnx-lm")
    assert (manifest["name"], manifest["target"], manifest["candidates"]) == ("tiny", "big", 8)
    assert (manifest["vocab_size"], manifest["context_length"]) == (258, 256)
    assert manifest["cache"] == {"layout": "[1, kv_head, position, head_dim]", **asdict(SHAPE)}
    assert manifest["training"] == {"steps": 3}
    assert "reach" not in manifest  # its answers depend on all of a text
    assert manifest["check"]["agreement_beyond_ties"] == 1.0
    session = open_session(package / "model.onnx")
    assert [value.name for value in session.get_inputs()] == list(manifest["inputs"])
    assert [value.name for value in session.get_outputs()] == list(manifest["outputs"])


def operators(folder: Path) -> list[str]:
    return [node.op_type for node in onnx.load(folder / "model.onnx").graph.node]


def test_a_layer_is_one_attention_node_five_products_and_two_norms(package: Path) -> None:
    found = operators(package)
    assert found.count("GroupQueryAttention") == 2
    assert found.count("MatMul") == 2 * (1 + 1 + 3) + 1  # queries with keys and values, output, MLP; head
    assert found.count("SkipSimplifiedLayerNormalization") == 2 * 2
    assert not {"Concat", "Slice", "Split", "Softmax", "Reshape", "GatherND"} & set(found)
    assert len(found) < 2 * 13 + 12


def test_a_tied_embedding_is_stored_once_and_the_file_names_no_source(package: Path) -> None:
    graph = onnx.load(package / "model.onnx").graph
    embedding = 258 * 64
    assert sum(int(np.prod(tensor.dims)) >= embedding for tensor in graph.initializer) == 1
    assert b".py" not in (package / "model.onnx").read_bytes()


def test_a_sliding_window_is_kept_across_chunks(windowed: Path, tmp_path: Path) -> None:
    manifest = export_drafter(windowed, tmp_path / "out", name="tiny", target_id="big", candidates=8)
    assert manifest["reach"] == 6
    tokens = random_tokens(30)
    outputs = run_in_chunks(
        open_session(tmp_path / "out" / "model.onnx"), tokens, [3, 1, 1, 13, 12], ONE_LAYER_SHAPE, CANDIDATES
    )
    expected = logits_by_torch(windowed, tokens)
    np.testing.assert_allclose(outputs["logits"], expected, atol=1e-4 * expected.std())
    late = tokens.copy()
    late[0] = (late[0] + 1) % 258
    seen = np.abs(logits_by_torch(windowed, late) - expected).max(-1) > 1e-4
    assert seen[5]
    assert not seen[6:].any()  # the window was really there


def test_eight_bit_weights_stay_close_for_a_model_with_its_own_head(untied: Path, tmp_path: Path) -> None:
    manifest = export_drafter(untied, tmp_path / "out", name="tiny", target_id="big", precision="int8", candidates=8)
    assert manifest["precision"] == "int8"
    assert "MatMulNBits" in operators(tmp_path / "out")
    tokens = random_tokens(60)
    outputs = run_in_chunks(
        open_session(tmp_path / "out" / "model.onnx"), tokens, [20, 1, 39], ONE_LAYER_SHAPE, CANDIDATES
    )
    expected = logits_by_torch(untied, tokens)
    error = np.abs(outputs["logits"] - expected).mean() / expected.std()
    assert 1e-5 < error < 0.05  # quantised, and not too much
    assert manifest["check"]["mean_kl"] < 0.02


def test_an_eight_bit_tied_embedding_is_shared_with_the_head_and_the_file_shrinks(package, tmp_path) -> None:
    graph = tmp_path / "model.onnx"
    graph.write_bytes((package / "model.onnx").read_bytes())
    quantise(graph)
    assert graph.stat().st_size < 0.55 * (package / "model.onnx").stat().st_size
    model = onnx.load(graph).graph
    matrices = [t.raw_data for t in model.initializer if t.data_type == onnx.TensorProto.UINT8]
    assert len(set(matrices)) == len(matrices)
    assert all(len(t.dims) < 2 or t.data_type == onnx.TensorProto.UINT8 or min(t.dims) < 64 for t in model.initializer)
    tokens = random_tokens(24)
    exact = run_in_chunks(open_session(package / "model.onnx"), tokens, [24], SHAPE, CANDIDATES)["logits"]
    close = run_in_chunks(open_session(graph), tokens, [24], SHAPE, CANDIDATES)["logits"]
    assert np.abs(close - exact).mean() < 0.05 * exact.std()


def test_the_runtime_folds_what_a_tied_embedding_costs_when_it_loads_the_graph(package: Path, tmp_path: Path) -> None:
    graph = tmp_path / "model.onnx"
    graph.write_bytes((package / "model.onnx").read_bytes())
    quantise(graph)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "loaded.onnx")
    onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    found = [node.op_type for node in onnx.load(tmp_path / "loaded.onnx").graph.node]
    assert "GatherBlockQuantized" in found
    assert "Reshape" not in found


def test_quantised_matrices_are_within_half_a_level_and_zero_stays_zero() -> None:
    matrix = np.random.default_rng(0).normal(size=(5, 100)).astype(np.float32)
    matrix[2] = 0
    quantised = QuantisedMatrix.of(matrix)
    assert quantised.levels.shape == (5, 2, BLOCK)
    restored = (quantised.levels.astype(np.float32) - 128) * quantised.scales[..., None]
    restored = restored.reshape(5, -1)[:, :100]
    assert (restored[2] == 0).all()
    limit = np.repeat(quantised.scales, BLOCK, axis=1)[:, :100] / 2
    assert (np.abs(restored - matrix) <= limit * 1.001).all()


def corrupt_weights(graph: Path) -> None:
    """Make one weight of one matrix wrong: the smallest damage that has to be noticed."""
    model = onnx.load(graph)
    tensor = next(t for t in model.graph.initializer if list(t.dims) == [64, 72])
    values = onnx.numpy_helper.to_array(tensor).copy()
    values[3, 3] += 1.0
    tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    onnx.save(model, graph)


def corrupt_order(graph: Path) -> None:
    """Turn the rotations the other way."""
    scale_attention_input(graph, 8, -1.0)


def corrupt_sink(graph: Path) -> None:
    """Let every head's sink take a share of the attention."""
    scale_attention_input(graph, 11, 0.0)


def scale_attention_input(graph: Path, index: int, factor: float) -> None:
    model = onnx.load(graph)
    name = next(node for node in model.graph.node if node.op_type == "GroupQueryAttention").input[index]
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor) * np.float32(factor), name))
    onnx.save(model, graph)


def corrupt_candidates(graph: Path) -> None:
    """Return the smallest logits as candidates."""
    model = onnx.load(graph)
    node = next(node for node in model.graph.node if node.op_type == "TopK")
    kept = [attribute for attribute in node.attribute if attribute.name != "largest"]
    del node.attribute[:]
    node.attribute.extend([*kept, onnx.helper.make_attribute("largest", 0)])
    onnx.save(model, graph)


@pytest.mark.parametrize(
    ("corrupt", "precision"),
    [
        (corrupt_weights, "float32"),
        (corrupt_order, "float32"),
        (corrupt_sink, "float32"),
        (corrupt_candidates, "float32"),
        pytest.param(corrupt_order, "int8", marks=pytest.mark.soak),
    ],
)
def test_a_graph_that_computes_something_else_is_refused_and_leaves_nothing(
    package: Path, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corrupt: Any, precision: str
) -> None:
    def write_corrupted_graph(model: Any, architecture: Any, candidates: int, graph: Path, *, mlp: int) -> None:
        graph.write_bytes((package / "model.onnx").read_bytes())
        corrupt(graph)

    monkeypatch.setattr(publishing, "write_graph", write_corrupted_graph)
    published = tmp_path / "published"
    published.mkdir()
    (published / "manifest.json").write_text("the version before")
    with pytest.raises(ExportMismatch):
        export_drafter(llama, published, name="tiny", target_id="big", candidates=8, precision=precision)
    assert [path.name for path in tmp_path.iterdir()] == ["published"]
    assert (published / "manifest.json").read_text() == "the version before"


def test_a_sound_graph_passes_the_same_check_and_replaces_what_was_published(package, llama, tmp_path, monkeypatch):
    def write_sound_graph(model: Any, architecture: Any, candidates: int, graph: Path, *, mlp: int) -> None:
        graph.write_bytes((package / "model.onnx").read_bytes())

    monkeypatch.setattr(publishing, "write_graph", write_sound_graph)
    published = tmp_path / "published"
    published.mkdir()
    (published / "stale").write_text("from the version before")
    export_drafter(llama, published, name="tiny", target_id="big", candidates=8)
    assert {path.name for path in published.iterdir()} == {"model.onnx", "tokenizer.json", "manifest.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["published"]


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("name", {"name": ""}),
        ("precision", {"precision": "int3"}),
        ("candidates", {"candidates": 259}),
        ("candidates", {"candidates": 0}),
        ("source_folder", {"source_folder": Path("nowhere")}),
    ],
)
def test_bad_arguments_name_their_field(llama: Path, tmp_path: Path, field: str, bad: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"source_folder": llama, "out_folder": tmp_path / "out", "name": "tiny"}
    with pytest.raises(InvalidArgument) as refused:
        export_drafter(**{**arguments, **bad}, target_id="big")
    assert refused.value.field == field
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_a_model_is_refused(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "no-model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text((llama / "tokenizer.json").read_text())
    with pytest.raises(InvalidArgument) as refused:
        export_drafter(folder, tmp_path / "out", name="tiny", target_id="big")
    assert refused.value.field == "source_folder"


# === a KV cache of int8 ==============================================================================================


@pytest.fixture(scope="module")
def int8_package(llama: Path) -> Path:
    out = llama.with_name("int8_package")
    export_drafter(llama, out, name="small", candidates=8, target_id="big", kv="int8")
    return out


def test_keys_and_values_of_int8_change_the_logits_little(int8_package: Path, llama: Path) -> None:
    manifest = json.loads((int8_package / "manifest.json").read_text())
    assert manifest["cache"]["dtype"] == manifest["inputs"]["past_key.0"]["dtype"] == "int8"
    assert 0 < manifest["check"]["mean_kl"] < 0.01
    tokens = random_tokens(40)
    wanted = logits_by_torch(llama, tokens)
    found = run_in_chunks(
        open_session(int8_package / "model.onnx"), tokens, [7, 1, 1, 20, 11], find_package(int8_package).cache, 8
    )["logits"]
    assert 1e-5 < np.abs(found - wanted).mean() / wanted.std() < 0.05


def test_an_edge_drafts_with_a_cache_of_int8_and_rolls_it_back(int8_package: Path) -> None:
    loaded = find_package(int8_package)
    assert loaded.cache.bytes_of(100) * 4 == SHAPE.bytes_of(100)
    drafter = OnnxDrafter(loaded)
    first, again = (drafter.open(ProposalRule(Sampling(temperature=0.0))) for _ in range(2))
    first.extend((0, 5, 9))
    drafts = token_ids(first.propose(6))
    first.truncate(5)
    first.extend((40, 41))
    again.extend((0, 5, 9, *drafts[:2], 40, 41))
    assert token_ids(first.propose(4)) == token_ids(again.propose(4))


def test_no_key_is_cut_off_however_far_it_is_turned(llama: Path) -> None:
    plain = load(llama)
    tokens = drawn_texts(plain, seed=SEED)
    architecture = with_int8_cache(look_at(load_for_export(llama)), plain)
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
def test_scales_that_cut_off_or_blur_are_refused_by_the_check(
    llama, int8_package, tmp_path, monkeypatch, factor
) -> None:
    def write_graph(model: Any, architecture: Architecture, candidates: int, graph: Path, *, mlp: int) -> None:
        traced = onnx.load(int8_package / "model.onnx")
        attention = next(node for node in traced.graph.node if node.op_type == "GroupQueryAttention")
        for tensor in traced.graph.initializer:
            if tensor.name in attention.input[12:14]:
                scaled = onnx.numpy_helper.to_array(tensor) * np.float32(factor)
                tensor.CopyFrom(onnx.numpy_helper.from_array(scaled, tensor.name))
        onnx.save(traced, graph)

    monkeypatch.setattr(publishing, "write_graph", write_graph)
    with pytest.raises(ExportMismatch):
        export_drafter(llama, tmp_path / "out", name="small", candidates=8, target_id="big", kv="int8")
    assert list(tmp_path.iterdir()) == []


def test_scales_of_a_head_are_for_its_channels_alone(llama: Path) -> None:
    scales: CacheScales = with_int8_cache(look_at(load_for_export(llama)), load(llama)).scales[0]
    assert scales.keys.shape == scales.values.shape == (1, 2, 1, 16)
    assert torch.equal(scales.keys[..., :8], scales.keys[..., 8:]), "a pair turns as one"
    assert len(scales.values.unique()) == 32


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("lfm2", "keep a state"),
        ("qwen3_5_text", "keep a state"),
        ("deepseek_v3", "latent attention"),
        ("qwen3_moe", "experts are chosen"),
    ],
)
def test_layers_that_a_graph_cannot_have_are_refused_by_name(family, reason, tmp_path) -> None:
    save(small_model(family), tmp_path)
    with pytest.raises(InvalidArgument, match=f"{family}: .*{reason}") as refused:
        export_drafter(tmp_path, tmp_path / "package", name="mine", target_id="big")
    assert refused.value.field == "source_folder"
