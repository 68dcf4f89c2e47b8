"""Every causal language model of transformers is served with its own texts, or refused by what it keeps."""

from __future__ import annotations

import copy
import itertools
import sys
from types import ModuleType

import pytest
import torch
from all_architectures import NAMES, NOT_SMALL, SERVED, VOCAB, small_model

from outrider.cloud.target.architecture import _check_kinds, check_architecture
from outrider.cloud.target.target import load_target
from outrider.proto.errors import ModelRefused
from outrider.proto.testing import word_tokenizer
from outrider.proto.types import Sampling
from research.text_writer import TextRequest, TextWriter

# Families that keep more than keys and values of attention, with what their refusal names.
OTHERS = {
    "bailing_hybrid": "linear_attention", "bamba": "linear_attention", "deepseek_v2": "latent attention",
    "deepseek_v3": "latent attention", "deepseek_v32": "indexed_attention",
    "deepseek_v4": "compressed_sparse_attention", "falcon_h1": "hybrid", "falcon_mamba": "linear_attention",
    "glm_moe_dsa": "indexed_attention", "granitemoehybrid": "linear_attention", "jamba": "linear_attention",
    "kimi_linear": "linear_attention", "lfm2": "conv", "lfm2_moe": "conv", "longcat_flash": "latent attention",
    "mamba": "linear_attention", "mamba2": "linear_attention", "minimax": "linear_attention",
    "nemotron_h": "linear_attention", "olmo_hybrid": "linear_attention", "qwen3_5_moe_text": "linear_attention",
    "qwen3_5_text": "linear_attention", "qwen3_next": "linear_attention", "recurrent_gemma": "linear_attention",
    "reformer": "past_buckets_states", "rwkv": "state", "xlnet": "mems", "xlstm": "cache_params",
    "zamba": "linear_attention", "zamba2": "linear_attention", "zaya": "hybrid",
}  # fmt: skip
FIRSTS = {what: name for name, what in reversed(OTHERS.items())}  # of those that keep one thing; soak goes over all
# A few that keep keys and values alone.
PLAIN = ["afmoe", "gemma3n_text", "gemma4_text", "gpt_bigcode", "mixtral", "opt", "qwen3_moe"]
DTYPES = torch.float32, torch.bfloat16


@pytest.mark.parametrize(("name", "dtype"), [*zip(FIRSTS.values(), itertools.cycle(DTYPES))])
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
    _check_kinds(config)


def test_a_hybrid_is_refused_when_it_is_loaded(tmp_path) -> None:
    save(small_model("qwen3_5_text"), tmp_path)
    with pytest.raises(ModelRefused, match="qwen3_5_text keeps more than keys and values"):
        load_target(str(tmp_path), dtype="bfloat16", kv_tokens=256)


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_each_writes_the_texts_of_generate_or_is_refused(name, tmp_path) -> None:
    if name in NOT_SMALL:
        pytest.skip(f"transformers makes no small {name}")
    model = small_model(name)
    half = copy.deepcopy(model).bfloat16()
    refusal = refused(model)
    assert (refused(half) is None) == (refusal is None), "a type decides"
    save(model, tmp_path)
    if refusal is not None:
        assert name not in SERVED
        assert OTHERS.get(name, "") in refusal
        with pytest.raises(ModelRefused) as caught:
            load_target(str(tmp_path), kv_tokens=1024)
        assert caught.value.field == "target"
        assert "\n" not in caught.value.message
        return
    assert name in SERVED
    target = load_target(str(tmp_path), kv_tokens=1024)
    model.set_attn_implementation("eager")
    requests, own, greedy = [], [], Sampling(temperature=0.0, max_tokens=24, ignore_eos=True)
    for seed in range(2):
        prompt = torch.randint(3, VOCAB, (1, 20), generator=torch.Generator().manual_seed(seed))
        requests.append(TextRequest(tuple(prompt[0].tolist()), greedy))
        text = model.generate(prompt, max_new_tokens=24, min_new_tokens=24, do_sample=False, eos_token_id=None)
        own.append(text[0].tolist())
    written = TextWriter(target, at_once=2).write(requests)
    assert [list(text.transcript) for text in written] == own


def refused(model) -> str | None:
    try:
        check_architecture(model)
    except ModelRefused as error:
        return error.message
    return None


def save(model, folder) -> None:
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(word_tokenizer(VOCAB))
