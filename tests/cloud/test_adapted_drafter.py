"""A drafter's graph in torch, with a change of every matrix: what it computes is what ONNX Runtime computes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.cloud.export import ExportMismatch, export_drafter
from outrider.cloud.export.check import GraphCheck, logits_by_torch, run_in_chunks
from outrider.cloud.export.parent import load_parent
from outrider.cloud.learning.adapted import AdaptedDrafter
from outrider.cloud.testing import save_byte_tokenizer, tiny_llama
from outrider.drafters.adapters import merged_graph, write_adapter_package
from outrider.drafters.packages import DrafterPackage, find_package, load_package
from outrider.proto.drafter_format import LearnedFrom
from outrider.proto.errors import ModelRefused


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, DrafterPackage]:
    """A tiny Llama, and its package in float32."""
    settings = {"vocab_size": 258, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings |= {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48, "rope_theta": 5000.0}
    model = tiny_llama(seed=0, **settings, tie_word_embeddings=True, initializer_range=0.2, rms_norm_eps=1e-5)
    source = tmp_path_factory.mktemp("tiny") / "source"
    model.save_pretrained(source)
    save_byte_tokenizer(source)
    for kv in ("float32", "int8"):
        export_drafter(source, source.with_name(kv), name="tiny", target_id="big", kv=kv)
    return model, load_package(source.with_name("float32"))


def log_q(drafter: AdaptedDrafter, tokens: np.ndarray) -> np.ndarray:
    """After every token, [n, vocab]."""
    with torch.no_grad():
        found: np.ndarray = drafter(torch.from_numpy(tokens)[None], torch.arange(len(tokens))).numpy()
    return found


def test_the_weights_of_a_float32_graph_make_the_model_that_was_exported(plain) -> None:
    model, package = plain
    parent = load_parent(package)
    for name, value in parent.model.state_dict().items():
        assert torch.allclose(value, model.state_dict()[name], atol=1e-6), name
    assert parent.model.config.rms_norm_eps == pytest.approx(1e-5)
    tokens = np.random.default_rng(0).integers(258, size=60)
    expected = torch.from_numpy(logits_by_torch(model, tokens)).log_softmax(-1).numpy()
    assert np.abs(log_q(AdaptedDrafter(parent), tokens) - expected).max() < 1e-4


@pytest.mark.parametrize("name", ["general", "swift"])
def test_the_floats_of_an_8_bit_graph_compute_what_onnx_runtime_does(name: str) -> None:
    package = find_package(name)
    model = load_parent(package).model
    if package.steering is None:
        metrics = GraphCheck(model, package.cache, package.precision, 64).metrics(package.model_path)
        assert metrics["mean_kl"] < 0.002
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight.mul_(0.5)  # the check can fail
        with pytest.raises(ExportMismatch, match="does not compute"):
            GraphCheck(model, package.cache, package.precision, 64).metrics(package.model_path)
    else:
        assert model.config.sliding_window == package.reach
        assert model.config.num_hidden_layers == package.cache.layers


@pytest.mark.parametrize(("kv", "rounding"), [("float32", 2e-3), ("int8", 0.2)])
def test_an_adapter_computes_in_its_package_what_it_computes_in_training(kv, rounding, tmp_path: Path, plain) -> None:
    """Within the rounding of A and B to float16, and of the KV cache's 8 bits; the embedding changed with the head."""
    package = load_package(plain[1].folder.with_name(kv))
    drafter = AdaptedDrafter(load_parent(package), rank=3, seed=1)
    tokens = np.random.default_rng(1).integers(258, size=40)
    before = log_q(drafter, tokens)
    generator = np.random.default_rng(2)
    small = {
        name: (a.astype(np.float16), (0.02 * generator.normal(size=b.shape)).astype(np.float16))
        for name, (a, b) in drafter.matrices().items()
    }
    drafter.load(small)
    folder = write_adapter_package(
        package.folder, tmp_path / "1", small, sequence=1, learned_from=LearnedFrom(1, 1, {"0": 1})
    )
    import onnxruntime

    session = onnxruntime.InferenceSession(merged_graph(load_package(folder)), providers=["CPUExecutionProvider"])
    logits = run_in_chunks(session, tokens, [40], package.cache, 8)["logits"]
    by_graph = torch.from_numpy(logits).log_softmax(-1).numpy()
    changed = log_q(drafter, tokens)
    assert np.abs(changed - by_graph).max() < rounding
    assert np.abs(changed - before).max() > 2 * rounding


def test_every_matrix_learns_and_the_parent_stays(plain) -> None:
    _, package = plain
    drafter = AdaptedDrafter(load_parent(package), rank=2)
    frozen = {name: value.clone() for name, value in drafter.state_dict().items() if "linear" in name}
    tokens = torch.randint(258, (2, 20))
    optimizer = torch.optim.SGD(drafter.learned(), lr=0.1)
    for _ in range(2):  # at first A has no gradient, since B is 0
        optimizer.zero_grad()
        drafter(tokens, torch.arange(10, 40)).gather(1, tokens.flatten()[10:40, None]).mean().backward()
        optimizer.step()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in drafter.learned())
    assert len(drafter.learned()) == 2 * (2 * 5 + 1)
    assert frozen
    assert all(torch.equal(drafter.state_dict()[name], value) for name, value in frozen.items())


def test_a_drafter_begins_as_its_parent_and_takes_back_what_it_gave(plain) -> None:
    _, package = plain
    one, other = (AdaptedDrafter(load_parent(package), seed=seed) for seed in (1, 2))
    tokens = np.arange(30)
    assert np.array_equal(log_q(one, tokens), log_q(other, tokens))
    matrices = {name: (a, b + 0.01) for name, (a, b) in one.matrices().items()}
    one.load(matrices)
    assert not np.allclose(log_q(one, tokens), log_q(other, tokens))
    other.load(one.matrices())
    assert np.array_equal(log_q(one, tokens), log_q(other, tokens))


def test_a_graph_of_another_architecture_is_refused(plain) -> None:
    package = plain[1]
    with pytest.raises(ModelRefused, match="cannot be trained on"):
        load_parent(replace(package, cache=replace(package.cache, layers=1)))
    with pytest.raises(ModelRefused, match="other shapes"):
        load_parent(replace(package, cache=replace(package.cache, kv_heads=1)))
    assert json.loads((package.folder / "manifest.json").read_text())["precision"] == "float32"
