"""Targets with latent attention keep one vector a position, conform as all others do, and broken products are found."""

from __future__ import annotations

import pytest
import torch
from branch_conformance import BRANCH_CHECKS
from conformance import CHECKS
from conformance_oracle import Oracle
from conformance_suites import EVERY_CHECK, suite_of
from transformers import DynamicCache

from outrider.cloud.target.kv_size import bytes_per_token
from outrider.cloud.target.latent_attention import Latents
from outrider.cloud.target.own_cache import OwnCacheTarget
from outrider.cloud.target.target import SessionRows
from outrider.cloud.target.target_loading import load_target
from research.architectures.__main__ import save
from research.architectures.small_models import small_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("latent")
    save(small_model("deepseek_v3"), folder)
    return folder


@pytest.fixture(scope="module")
def oracle(folder):
    return Oracle(folder)


@pytest.mark.parametrize("check", EVERY_CHECK)
def test_latent_attention_conforms(check, folder, oracle) -> None:
    (CHECKS | BRANCH_CHECKS)[check](suite_of(folder, oracle, page_size=4))


def test_a_position_takes_one_vector_for_all_heads(folder) -> None:
    target = load_target(str(folder), kv_tokens=256)
    config, cache = target.model.config, target.pool.allocate(8)
    target.forward([SessionRows(cache, (3, 4, 5, 6), 1)])
    numbers = 0
    for layer in target.pool.layers:
        keys, values = target.pool.read(layer, cache, 4)
        assert keys.shape == (4, 1, config.kv_lora_rank + config.qk_rope_head_dim)
        assert values.data_ptr() == keys.data_ptr(), "kept once"
        numbers += keys[0].numel()
    assert bytes_per_token(config, torch.float32) == 4 * numbers
    assert numbers < config.num_hidden_layers * config.num_attention_heads * config.v_head_dim


def test_transformers_own_attention_gets_keys_and_values_as_before(folder) -> None:
    target = load_target(str(folder), kv_tokens=256)
    target.model.set_attn_implementation("eager")
    kept = DynamicCache(config=target.model.config)
    tokens = torch.arange(3, 20)[None]
    with torch.inference_mode():
        whole = target.model(input_ids=tokens, use_cache=False).logits[0, -1]
        target.model(input_ids=tokens[:, :-1], past_key_values=kept)
        last = target.model(input_ids=tokens[:, -1:], past_key_values=kept).logits[0, -1]
    assert torch.allclose(whole, last, rtol=1e-4, atol=1e-4)


class Quantised(torch.nn.Module):
    """A linear layer with a weight of eight bits."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.scale = float(layer.weight.detach().abs().max()) / 127
        self.weight = torch.nn.Parameter((layer.weight.detach() / self.scale).round().to(torch.int8), False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ (self.weight * self.scale).T


def test_weights_of_eight_bits_serve_as_the_numbers_that_they_stand_for(folder) -> None:
    target = load_target(str(folder), kv_tokens=256)
    latents = next(filter(None, map(Latents.of, target.model.modules())))
    plain = latents._weights(torch.zeros(1))
    quantised = latents._module.kv_b_proj = Quantised(latents._module.kv_b_proj)
    for weight, exact in zip(latents._weights(torch.zeros(1)), plain, strict=True):
        assert weight.shape == exact.shape
        assert (weight - exact).abs().max() <= quantised.scale


# --- defects ---


def rotated_first(patch) -> None:
    own = Latents.absorbed
    patch.setattr(Latents, "absorbed", lambda latents, query: own(latents, query).roll(1, dims=-1))


def scaled_by_the_vector(patch) -> None:
    own = Latents.absorbed

    def absorbed(latents: Latents, query: torch.Tensor) -> torch.Tensor:
        result = own(latents, query)
        return result * (query.shape[-1] / result.shape[-1]) ** 0.5

    patch.setattr(Latents, "absorbed", absorbed)


def values_of_the_next_head(patch) -> None:
    own = Latents.values
    patch.setattr(Latents, "values", lambda latents, attended: own(latents, attended.roll(1, dims=2)))


def values_by_the_weights_of_keys(patch) -> None:
    own = Latents._weights
    patch.setattr(Latents, "_weights", lambda latents, rows: own(latents, rows)[:1] * 2)


DEFECTS = [rotated_first, scaled_by_the_vector, values_of_the_next_head, values_by_the_weights_of_keys]


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_broken_product_is_not_served_together(defect, folder, monkeypatch, caplog) -> None:
    defect(monkeypatch)
    assert isinstance(load_target(str(folder), kv_tokens=256), OwnCacheTarget)
    assert "differs from the model's own pass" in caplog.text
