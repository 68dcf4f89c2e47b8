"""Straight passes: what the model computes, by fewer calls, for every row by itself; others run as they are written."""

from __future__ import annotations

import pytest
import torch
from random_models import SMALL, VOCAB, architectures, save_random_model
from torch import nn
from torch.overrides import TorchFunctionMode

from outrider.cloud.target import attention
from outrider.cloud.target.attention import RaggedBatch, RowSpan
from outrider.cloud.target.kv_cache import PagedKVCache
from outrider.cloud.target.recorded import call_fusion
from outrider.cloud.target.recorded.straight_pass import own_pass, straight_pass
from outrider.cloud.target.target_loading import load_model, load_target
from outrider.cloud.testing import tiny_llama

ARCHITECTURES = architectures(positions=256) | {"llama": SMALL | {"attention_bias": True}}
CLOSE = {"float32": 1e-6, "bfloat16": 2e-2}  # relative; the bits of rounding may differ where products are joined


@pytest.fixture(params=ARCHITECTURES)
def folder(request, tmp_path):
    save_random_model(tmp_path, request.param, **ARCHITECTURES[request.param])
    return str(tmp_path)


def small(**config):
    model = tiny_llama(seed=0, **({name: SMALL[name] for name in SMALL if name != "pad_token_id"} | config)).eval()
    model.set_attn_implementation(attention.NAME)
    return model


def given(pool, rows, wanted=None, start=0):
    """Inputs of a pass of one session."""
    cache = pool.allocate(start + rows)
    tokens = torch.randint(3, VOCAB, (1, start + rows), generator=torch.Generator().manual_seed(7))
    batch = RaggedBatch(pool, [RowSpan(cache, 0, rows, start)], cache.slots[start : start + rows])
    pool.release(cache)
    kept = torch.arange(rows if wanted is None else wanted)
    return tokens[:, start:], torch.arange(start, start + rows)[None], kept, batch


def pool_of(model, tokens=1024):
    parameter = next(model.parameters())
    return PagedKVCache(tokens, 16, parameter.dtype, parameter.device)


def close(got, expected, tolerance):
    return float((got.float() - expected.float()).norm() / expected.float().norm()) < tolerance


class Count(TorchFunctionMode):
    """The number of torch calls made inside."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.calls += 1
        return function(*args, **(kwargs or {}))


# === the same function ==============================================================================================


@pytest.mark.parametrize("dtype", CLOSE)
@torch.inference_mode()
def test_logits_and_what_enters_the_layers_are_the_models_own(folder, dtype):
    written, model = (load_model(folder, folder, device="cpu", dtype=dtype) for _ in range(2))
    straight = straight_pass(model)
    assert straight is not None
    written.set_attn_implementation(attention.NAME)
    entered = {}
    stack = next(m for m in written.modules() if isinstance(m, nn.ModuleList) and len(m) == 3)
    for i, layer in enumerate(stack):
        layer.register_forward_pre_hook(lambda _, args, i=i: entered.update({i: args[0]}))
    one, other = pool_of(written), pool_of(model)
    run = straight.compiled([0, 2])
    for rows, start, wanted in ((20, 0, 1), (1, 20, 1), (7, 21, 7), (150, 28, 3)):
        (own,) = own_pass(written, *given(one, rows, wanted, start))
        logits, *taps = run(*given(other, rows, wanted, start))
        assert logits.shape == own.shape == (1, wanted, VOCAB)
        assert close(logits, own, CLOSE[dtype])
        assert all(close(tap, entered[layer], CLOSE[dtype]) for tap, layer in zip(taps, (0, 2), strict=True))


@torch.inference_mode()
def test_a_pass_takes_fewer_calls(folder):
    written, model = (load_model(folder, folder, device="cpu", dtype="bfloat16") for _ in range(2))
    written.set_attn_implementation(attention.NAME)
    run, pool = straight_pass(model).compiled(), pool_of(model)
    with Count() as own:
        own_pass(written, *given(pool, 5))
    with Count() as straight:
        run(*given(pool, 5))
    assert straight.calls < 0.85 * own.calls


# === rows by themselves =============================================================================================


@pytest.mark.parametrize("dtype", CLOSE)
@torch.inference_mode()
def test_a_row_has_the_same_bits_beside_any_number_of_others_but_for_attention(dtype, shared_target):
    target = shared_target(dtype=dtype, kv_tokens=1024)
    multiple = target.packing.row_multiple
    if not multiple:
        pytest.skip("needs a processor whose products keep a row's bits at some number of rows")

    def alone(recorded, function):
        """Let each row attend to itself."""
        if recorded is not attention.paged_attention:
            return function
        return lambda _, query, key, value, *__, **___: ((query * key.repeat_interleave(3, 1)).transpose(1, 2), value)

    run = target.straight.compiled(wrap=alone)
    most = given(target.pool, 512)
    together = run(*most)[0][0]
    for rows in (*range(multiple, 34, multiple), 104, 512):
        first = run(most[0][:, :rows], most[1][:, :rows], most[2][:rows], most[3])[0][0]
        last = run(most[0][:, -rows:], most[1][:, -rows:], most[2][:rows], most[3])[0][0]
        assert torch.equal(first, together[:rows])
        assert torch.equal(last, together[-rows:])


# === joined products ================================================================================================


def test_layers_with_the_same_input_become_one_product_that_shares_their_weights():
    model = small(attention_bias=True)
    pool = pool_of(model)
    with torch.inference_mode():
        (before,) = own_pass(model, *given(pool, 5))
    straight = straight_pass(model)
    layer = model.model.layers[0]
    parts = layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj
    joined = straight.linears[0]
    assert len(straight.linears) == 3 * 4 + 1
    assert (joined.in_features, joined.out_features) == (32, 32 + 16 + 16)
    for name in ("weight", "bias"):
        assert torch.equal(getattr(joined, name), torch.cat([getattr(part, name) for part in parts]))
        storage = getattr(joined, name).untyped_storage().data_ptr()
        assert all(getattr(part, name).untyped_storage().data_ptr() == storage for part in parts)
    with torch.inference_mode():
        assert torch.equal(own_pass(model, *given(pool, 5))[0], before), "the model as it is written stays what it was"


def test_layers_that_share_a_weight_with_others_stay_apart():
    model = small()
    first, second = (layer.mlp for layer in model.model.layers[:2])
    first.up_proj.weight = second.up_proj.weight
    linears = list(straight_pass(model).linears)
    assert first.up_proj in linears
    assert second.up_proj in linears
    assert model.model.layers[2].mlp.up_proj not in linears


# === shorter calls ==================================================================================================


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(
    ("architecture", "turns"), [("llama", 3), ("qwen2", 3), ("qwen3", 6), ("gpt_neox", 6), ("gpt2", 0)]
)
def test_queries_and_keys_turn_together_where_nothing_stands_between(architecture, turns, dtype, tmp_path):
    save_random_model(tmp_path, architecture, **ARCHITECTURES[architecture])
    functions = []
    straight_pass(load_model(str(tmp_path), "target", device="cpu", dtype=dtype)).compiled(
        wrap=lambda recorded, function: functions.append(recorded) or function
    )
    assert functions.count(call_fusion.turned) == turns


@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0, 1e4])
def test_rows_over_their_root_mean_square_are_as_exact_as_the_models_own(size):
    rows, epsilon = torch.randn(5, 384) * size, 1e-6
    exact = rows.double() / (rows.double().pow(2).mean(-1, keepdim=True) + epsilon).sqrt()
    got = call_fusion.over_root_mean_square(rows, 384**0.5, torch.tensor(epsilon**0.5))
    assert close(got.double(), exact, 2e-7)


# === wanted rows ====================================================================================================


@pytest.mark.parametrize("wanted", [[3], [0, 2, 3, 6], [8, 1, 8]])
def test_after_the_last_attention_only_the_wanted_rows_are_computed(wanted):
    model = small()
    straight, pool = straight_pass(model), pool_of(model)
    rows: list[int] = []

    def counted(recorded, function):
        def call(x):
            rows.append(x.shape[1])
            return function(x)

        return call if isinstance(recorded, nn.Linear) else function

    inputs = list(given(pool, 9))
    inputs[2] = torch.tensor(wanted)
    with torch.inference_mode():
        (logits,) = straight.compiled(wrap=counted)(*inputs)
        assert close(logits, own_pass(model, *inputs)[0], 1e-6)
    assert rows == [9] * (4 + 4 + 1) + [len(wanted)] * 4


# === what cannot be straight ========================================================================================


class Odd(nn.Module):
    """Does to the rows of the last norm what no decoder does."""

    def __init__(self, does):
        super().__init__()
        self.does = does

    def forward(self, x):
        return self.does(x)


def writes(x):
    y = x * 2
    y[0, 0] = 0.0
    return y


def writes_by_operator(x):
    y = x * 2
    y += 1
    return y


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        (lambda x: x * 2 if x.sum() > 0 else x, "looks at"),
        (writes, "writes to a tensor by __setitem__"),
        (writes_by_operator, "writes to a tensor by add_"),
        (lambda x: x * (x.shape[1] + 1), "no multiples"),
        (lambda x: x * 2 if x.shape[1] > 6 else x, "other calls"),
        (lambda x: x * 2 if x.shape[1] == 1 else x, "differs"),
        (lambda x: x + torch.rand(x.shape[-1]), "differs"),
        (lambda x: x.cumsum(1), "differs"),
    ],
    ids=["looks", "writes", "adds", "counts", "branches", "branches for one", "draws", "sees rows before it"],
)
def test_a_pass_that_is_not_straight_runs_as_it_is_written(does, reason, caplog):
    caplog.set_level("INFO")
    model = small()
    model.model.norm = nn.Sequential(model.model.norm, Odd(does))
    assert straight_pass(model) is None
    assert reason in caplog.text


def test_a_simplification_that_changes_the_function_is_noticed(monkeypatch, caplog):
    caplog.set_level("INFO")
    assert straight_pass(small()) is not None
    monkeypatch.setattr(call_fusion, "first_half_negated", lambda sine, half: sine)
    assert straight_pass(small()) is None
    assert "differs" in caplog.text


def test_a_model_that_is_not_straight_is_served_and_packed_as_before(tmp_path, monkeypatch):
    save_random_model(tmp_path, "llama", **SMALL)
    monkeypatch.setattr(call_fusion, "first_half_negated", lambda sine, half: sine)
    target = load_target(str(tmp_path), kv_tokens=256)
    assert target.straight is None
    shapes = {*target.packing.packed, *target.packing.plain}
    assert (32, 32) in shapes
    assert target.check() < 1e-5


def test_a_model_that_picks_experts_is_served_as_it_is_written(tmp_path):
    save_random_model(tmp_path, "mixtral", **SMALL, num_local_experts=4, num_experts_per_tok=2)
    target = load_target(str(tmp_path), kv_tokens=256)
    assert target.straight is None
    assert target.check() < 1e-5
