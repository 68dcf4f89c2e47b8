"""The precision of a target: one text of all that decides its rounding, the same for equal settings alone."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace

import pytest
import torch

from outrider.cloud.target.backend import precision_of, quantization_of
from outrider.cloud.target.target import load_target
from outrider.cloud.target.transformers_backend import TransformersBackend
from outrider.cloud.testing import save_tiny_target


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
