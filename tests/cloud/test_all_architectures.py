"""Every causal language model of transformers is served with its own texts, or refused by what it keeps."""

from __future__ import annotations

import itertools
import sys
from types import ModuleType

import pytest
import torch

from outrider.cloud.target.architecture import _check_kinds, check_architecture
from outrider.cloud.target.own_cache import OwnCacheTarget
from outrider.proto.errors import ModelRefused
from research.architectures.__main__ import tried
from research.architectures.small_models import NAMES, NOT_SMALL, ONE_BY_ONE, REFUSED, small_model

# Families that the paged KV cache cannot serve, with what their refusal names.
OTHERS = {
    "deepseek_v32": "indexed_attention", "deepseek_v4": "compressed_sparse_attention", "minimax": "linear_attention",
    "reformer": "past_buckets_states", "rwkv": "state", "xlnet": "mems", "xlstm": "keeps no keys and values",
    "zaya": "hybrid", "falcon": "attention of its own", "zamba": "paged KV cache",
}  # fmt: skip
# A few that keep keys and values alone, latent ones, sinks and states among them.
PLAIN = [
    "afmoe", "deepseek_v3", "gemma3n_text", "gemma4_text", "gpt_bigcode", "gpt_oss", "kimi_linear", "lfm2", "mixtral",
    "nemotron_h", "opt", "qwen3_5_text", "qwen3_moe",
]  # fmt: skip
COUNT = 8  # texts; the table has 24
DTYPES = torch.float32, torch.bfloat16


@pytest.mark.parametrize(("name", "dtype"), [*zip(OTHERS, itertools.cycle(DTYPES))])
def test_what_keeps_more_than_keys_and_values_is_refused_by_what_it_keeps(name, dtype) -> None:
    with pytest.raises(ModelRefused, match=OTHERS[name]) as caught:
        check_architecture(small_model(name).to(dtype))
    assert caught.value.field == "target"
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("name", PLAIN)
def test_weights_of_16_bits_are_compared_in_float32(name) -> None:
    assert check_architecture(small_model(name).bfloat16()) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_state_that_is_lost_between_steps_is_found_in_every_type(dtype, monkeypatch) -> None:
    # A short convolution hidden from transformers' cache, so weak that rounding to 16 bits is larger.
    model = small_model("llama").to(dtype)
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda hidden: forward(hidden + 0.01 * hidden.roll(1, dims=1)))
    with pytest.raises(ModelRefused, match="differs from the model's own"):
        check_architecture(model)


def test_a_state_in_the_modules_is_refused_by_its_name(monkeypatch) -> None:
    model = small_model("llama")
    mlp = model.model.layers[1].mlp
    forward = mlp.forward

    def remembering(hidden):
        mlp.last_seen = hidden[:, -1]
        return forward(hidden)

    monkeypatch.setattr(mlp, "forward", remembering)
    with pytest.raises(ModelRefused, match=r"LlamaMLP\.last_seen"):
        check_architecture(model)


def test_layers_are_told_by_name_since_not_every_transformers_has_all_kinds(monkeypatch) -> None:
    config = small_model("llama").config
    monkeypatch.setitem(sys.modules, "transformers.cache_utils", ModuleType("without_layers"))
    _check_kinds(config, 0)


@pytest.mark.parametrize("name", ["zaya", "recurrent_gemma"])
def test_what_the_paged_cache_cannot_serve_runs_one_session_a_pass(name, tmp_path, caplog) -> None:
    found = tried(name, tmp_path, COUNT)
    assert isinstance(found.target, OwnCacheTarget)
    assert "one session a pass" in caplog.text
    assert found.equal == COUNT


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_each_writes_the_texts_of_generate_or_is_refused(name, tmp_path) -> None:
    if name in NOT_SMALL:
        pytest.skip(f"transformers makes no small {name}")
    if name in REFUSED:
        with pytest.raises(ModelRefused) as caught:
            tried(name, tmp_path)
        assert caught.value.field == "target"
        assert "\n" not in caught.value.message
        return
    found = tried(name, tmp_path, COUNT)
    assert found.equal == COUNT
    assert isinstance(found.target, OwnCacheTarget) == (name in ONE_BY_ONE)
