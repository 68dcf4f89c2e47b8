"""Targets whose rows would see other sessions, or whose attention is wrong, are refused before they serve."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from outrider.cloud.target.architecture import check_architecture
from outrider.cloud.target.attention import RaggedBatch
from outrider.cloud.target.chunked_attention import ChunkedBatch
from outrider.cloud.target.target import FREE, TOGETHER, Target, load_target
from outrider.cloud.testing import tiny_llama
from outrider.proto.errors import ModelRefused

SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "eos_token_id": 1,
}  # fmt: skip
ROPE: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 32,
    },
}


def tiny(**config: Any) -> Any:
    return tiny_llama(seed=0, **(SMALL | config))


@pytest.mark.parametrize("kind", ROPE)
def test_rope_that_depends_on_what_shares_a_step_is_refused(kind) -> None:
    with pytest.raises(ModelRefused, match=kind):
        check_architecture(tiny(rope_parameters=ROPE[kind]))


def test_chunked_attention_is_refused() -> None:
    model = tiny()
    model.config.attention_chunk_size = 64
    with pytest.raises(ModelRefused, match="chunked"):
        check_architecture(model)


def test_a_model_that_returns_rows_that_are_not_wanted_is_refused() -> None:
    model = tiny()
    forward = model.forward
    model.forward = lambda logits_to_keep=0, **given: forward(**given)
    with pytest.raises(ModelRefused, match="differs from the model's own"):
        check_architecture(model)


def test_linear_rope_is_accepted_and_agrees() -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    Target(tiny(rope_parameters=rope), '{"model": {}}', kv_tokens=256, page_size=4).check()


@pytest.mark.parametrize(("passes", "batch"), [(FREE, RaggedBatch), (TOGETHER[0], ChunkedBatch)])
def test_the_check_goes_beyond_a_sliding_window(passes, batch, monkeypatch) -> None:
    model = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=60))
    target = Target(model.eval(), '{"model": {}}', kv_tokens=256, page_size=4)
    target.passes = passes
    target.check()
    attend = batch.attend
    monkeypatch.setattr(batch, "attend", lambda *args: attend(*args[:5], 0, *args[6:]))
    with pytest.raises(ModelRefused, match="differs from the model's own"):
        target.check()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("passes", "batch", "name"), [(FREE, RaggedBatch, "mask"), (TOGETHER[0], ChunkedBatch, "_mask")]
)
def test_the_check_notices_a_wrong_mask_in_every_precision(passes, batch, name, dtype, monkeypatch) -> None:
    target = load_target("reference", dtype=dtype, kv_tokens=512)
    target.passes = passes
    honest = target.check()
    mask = getattr(batch, name)
    monkeypatch.setattr(batch, name, lambda *arguments: torch.zeros_like(mask(*arguments)))
    with pytest.raises(ModelRefused, match="differs from the model's own"):
        target.check()
    monkeypatch.undo()
    assert target.check() == honest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_check_notices_keys_in_the_wrong_places(dtype, monkeypatch) -> None:
    target = load_target("reference", dtype=dtype, kv_tokens=512)
    write = target.pool.write
    monkeypatch.setattr(
        target.pool, "write", lambda layer, slots, keys, values: write(layer, slots.flip(0), keys, values)
    )
    with pytest.raises(ModelRefused, match="differs from the model's own"):
        target.check()
