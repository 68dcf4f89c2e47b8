"""`--dtype auto`: bfloat16 where the processor multiplies in it and rows keep their bits, else float32; its text."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from enum import Enum
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from outrider.cloud.serving.backends import load_backend
from outrider.cloud.target import target_loading as target_module
from outrider.cloud.target.backend import precision_of, quantization_of
from outrider.cloud.target.target import TILES, Target
from outrider.cloud.target.target_loading import (
    configured_dtype,
    load_automatically,
    load_target,
    multiplies_in_bfloat16,
)
from outrider.cloud.target.transformers_backend import TransformersBackend
from outrider.cloud.testing import save_tiny_target
from outrider.cloud.verifier_config import AUTO, DTYPES, VerifierConfig
from outrider.proto.errors import ConfigError, ModelRefused, NotFound
from outrider.proto.types import Guarantee

KV_TOKENS = 2048


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny_target(tmp_path_factory.mktemp("target")))


@pytest.fixture
def processor(monkeypatch):
    """Makes this processor one with or without products in bfloat16."""
    return lambda able: monkeypatch.setattr(target_module, "multiplies_in_bfloat16", lambda: able)


@pytest.mark.parametrize(
    ("avx512", "amx", "able"), [(True, False, True), (False, True, True), (True, True, True), (False, False, False)]
)
def test_the_processors_instructions_say_whether_it_multiplies_in_bfloat16(avx512, amx, able, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert multiplies_in_bfloat16() is able


@pytest.mark.parametrize(("able", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_the_processor_decides_and_the_precision_stated_is_what_was_chosen(able, dtype, folder, processor):
    processor(able)
    backend = load_backend(VerifierConfig(target=folder, threads=1, kv_tokens=KV_TOKENS))
    assert backend.facts.guarantee is Guarantee.BYTES
    assert backend.facts.precision == dtype


@pytest.mark.parametrize("exact", ["auto", "tiles"])
def test_bfloat16_is_left_where_rows_do_not_keep_their_bits_in_it(exact, folder, processor, monkeypatch):
    processor(True)
    kept, tried = Target.keeps_bits, []

    def in_float32_alone(target):
        tried.append(target.dtype)
        return kept(target) and target.dtype == torch.float32

    monkeypatch.setattr(Target, "keeps_bits", in_float32_alone)
    target = load_target(folder, dtype=AUTO, kv_tokens=KV_TOKENS, exact=exact)
    assert target.dtype == torch.float32
    assert target.passes.guarantee is (Guarantee.BYTES_BY_TILES if exact == "tiles" else Guarantee.BYTES)
    assert tried[0] == torch.bfloat16, "it was not left unasked"


def test_slow_tiles_are_no_reason_for_bfloat16_unless_they_are_asked_for(folder, processor, monkeypatch):
    processor(True)
    kept = Target.keeps_bits
    in_tiles = lambda target: kept(target) and (target.dtype == torch.float32 or target.passes == TILES)  # noqa: E731
    monkeypatch.setattr(Target, "keeps_bits", in_tiles)
    assert load_target(folder, dtype=AUTO, kv_tokens=KV_TOKENS).dtype == torch.float32
    assert load_target(folder, dtype=AUTO, kv_tokens=KV_TOKENS, exact="tiles").dtype == torch.bfloat16


def test_bfloat16_is_left_where_the_target_is_refused_in_it(folder, processor, monkeypatch):
    processor(True)
    check = Target.check

    def refusing(target):
        if target.dtype == torch.bfloat16:
            raise ModelRefused("paged attention differs", field="target")
        return check(target)

    monkeypatch.setattr(Target, "check", refusing)
    assert load_target(folder, dtype=AUTO, kv_tokens=KV_TOKENS).dtype == torch.float32


def test_without_a_promise_it_is_float32(folder, processor):
    processor(True)
    assert load_target(folder, dtype=AUTO, kv_tokens=KV_TOKENS, exact="off").dtype == torch.float32


def test_the_target_in_bfloat16_is_gone_before_the_next_is_loaded(folder):
    left = []

    def load(dtype):
        gc.disable()  # so that nothing but the choice collects
        target = load_target(folder, dtype=dtype, kv_tokens=64, exact="off")
        if dtype == "bfloat16":
            left.append(weakref.ref(target.model))
        else:
            assert left[0]() is None
        return target

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(target_module, "multiplies_in_bfloat16", lambda: True)
            assert load_automatically(load, folder, device="cpu", exact="auto").dtype == torch.float32
    finally:
        gc.enable()
    assert left


@pytest.mark.parametrize("exact", ["auto", "off"])
@pytest.mark.parametrize(("stated", "dtype"), [("float32", "float32"), ("float16", "float16"), (None, "bfloat16")])
def test_elsewhere_the_models_config_decides(stated, dtype, exact, tmp_path, processor):
    processor(False)
    LlamaConfig(dtype=stated).save_pretrained(tmp_path)
    asked = []
    load_automatically(asked.append, str(tmp_path), device="cuda:1", exact=exact)
    assert asked == [dtype]


def test_a_type_that_is_not_ours_counts_as_none(tmp_path):
    LlamaConfig(dtype="float64").save_pretrained(tmp_path)
    assert configured_dtype(str(tmp_path)) == "bfloat16"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_target_that_is_not_there_is_not_found(device, tmp_path):
    with pytest.raises(NotFound):
        load_target(str(tmp_path / "none"), dtype=AUTO, device=device)


def test_a_type_of_ones_own_is_taken_as_it_is(folder, processor, monkeypatch):
    processor(True)
    monkeypatch.setattr(Target, "keeps_bits", lambda _: False)
    for dtype in DTYPES[:2]:
        config = VerifierConfig(target=folder, threads=1, kv_tokens=KV_TOKENS, dtype=dtype)
        assert load_backend(config).facts.precision == dtype
    with pytest.raises(ConfigError, match="dtype"):
        replace(config, dtype="float64")


# === what is said of it ==============================================================================================


@pytest.mark.parametrize(
    ("dtype", "settings", "text"),
    [
        (torch.float32, {}, "float32"),
        (torch.bfloat16, {"device": "cuda"}, "bfloat16, on cuda"),
        (torch.bfloat16, {"engine": "vllm", "kv_dtype": "auto"}, "vllm bfloat16"),
        (torch.bfloat16, {"engine": "vllm", "kv_dtype": "bfloat16"}, "vllm bfloat16"),
        (torch.bfloat16, {"engine": "vllm", "kv_dtype": "fp8"}, "vllm bfloat16, fp8 KV cache"),
        (torch.float16, {"engine": "vllm", "quantization": "fp8"}, "vllm float16, fp8 weights"),
    ],
)
def test_the_text_tells_what_decides_rounding(dtype, settings, text):
    assert precision_of(dtype, **settings) == text


class Method(Enum):
    AWQ = "awq"


@pytest.mark.parametrize(
    ("settings", "method"),
    [({}, ""), ({"quant_method": "gptq"}, "gptq"), (SimpleNamespace(quant_method=Method.AWQ), "awq"), (None, "")],
)
def test_the_weights_quantisation_is_that_of_the_targets_config(settings, method):
    assert quantization_of(SimpleNamespace(quantization_config=settings)) == method
    assert quantization_of(SimpleNamespace()) == ""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_our_own_backend_states_the_type_of_its_weights(dtype, tmp_path):
    target = load_target(str(save_tiny_target(tmp_path)), dtype=dtype, kv_tokens=64)
    assert TransformersBackend(target).facts.precision == dtype
