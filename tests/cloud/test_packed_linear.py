"""Packed linear layers: what linear layers compute, and only where that is right and faster."""

from __future__ import annotations

import itertools
import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from outrider.cloud.models.family_index import load_tokenizer, resolve_target
from outrider.cloud.target import packed_linear
from outrider.cloud.target.packed_linear import (
    PackedLinear,
    Packing,
    pack_linears,
    packed_product,
    replace_conv1d,
    row_multiple,
)
from outrider.cloud.target.target import SessionRows, Target
from outrider.cloud.target.target_loading import load_model, load_target
from outrider.cloud.testing import save_tiny_target

DTYPES = [torch.float32, torch.bfloat16]
PROMPTS = ["def add(a, b):\n", "The river was", "Q: What is 7 times 8?\nA:", "## Installation\n\n"]


def linear(out=40, into=96, bias=True, dtype=torch.float32, seed=3):
    torch.manual_seed(seed)
    return nn.Linear(into, out, bias=bias, dtype=dtype)


def by_rows(layer):
    """Return a product for processors of any kind, of which oneDNN may pack no weights, or not of every type."""

    def product(x):
        rows = [nn.functional.linear(row, layer.weight, layer.bias) for row in x.reshape(-1, x.shape[-1])]
        return torch.stack(rows).reshape(*x.shape[:-1], -1)

    return product


@pytest.fixture
def any_processor(monkeypatch):
    """Let every processor have packed products, for tests of which product is chosen."""
    monkeypatch.setattr(packed_linear, "packed_product", by_rows)


def product_here(layer):
    """Return the packed product of `layer`; skip the test where this processor has none."""
    try:
        product = packed_product(layer)
        product(torch.zeros(1, layer.in_features, dtype=layer.weight.dtype))
    except (AttributeError, TypeError, RuntimeError) as error:
        pytest.skip(f"needs a processor for which oneDNN packs {layer.weight.dtype}: {str(error)[:100]}")
    return product


# === the product ====================================================================================================


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 17, 80])
@pytest.mark.parametrize("shape", [(), (1,), (2, 1)])
def test_the_result_is_that_of_the_plain_layer(dtype, bias, rows, shape):
    layer = linear(bias=bias, dtype=dtype)
    x = torch.randn(*shape, 96, rows).to(dtype).transpose(-1, -2)  # as a view that is not contiguous
    with torch.inference_mode():
        plain = layer(x)
        layer.__class__, layer._product = PackedLinear, product_here(layer)
        got = layer(x)
    assert got.shape == plain.shape
    assert got.is_contiguous()
    assert torch.allclose(got, plain, atol=1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.usefixtures("any_processor")
def test_packing_keeps_parameters_and_gradients():
    model = nn.Sequential(linear())
    weights = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    pack_linears(model)
    assert type(model[0]) is PackedLinear
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == weights
    model(torch.ones(2, 96)).sum().backward()
    assert torch.equal(model[0].weight.grad, torch.full((40, 96), 2.0))


# === the choice =====================================================================================================


def other_bits(product):
    """The product with its smallest bits changed."""
    return lambda rows: product(rows) * (1 + 2**-7 if rows.dtype == torch.bfloat16 else 1 + 1e-6)


def uneven_below(rows):
    """The product with its smallest bits changed in fewer rows."""
    return lambda product: lambda x: other_bits(product)(x) if len(x) < rows else product(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("packed_below", "plain_below", "kind", "multiple"),
    [
        (1, 1, PackedLinear, 1),
        (2, 1, PackedLinear, 2),
        (4, 9, PackedLinear, 4),
        (9, 2, nn.Linear, 2),
        (9, 9, nn.Linear, 0),
    ],
)
def test_the_product_whose_rows_keep_their_bits_is_chosen(
    monkeypatch, dtype, packed_below, plain_below, kind, multiple
):
    layer = linear(dtype=dtype)
    right = by_rows(layer)
    monkeypatch.setattr(packed_linear, "packed_product", lambda _: uneven_below(packed_below)(other_bits(right)))
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: uneven_below(plain_below)(by_rows(self))(x))
    packing = pack_linears(nn.Sequential(layer))
    assert type(layer) is kind
    assert packing.row_multiple == multiple
    assert ("not" in str(packing)) == (not multiple)


@pytest.mark.usefixtures("any_processor")
def test_each_shape_type_and_bias_is_tried_once(monkeypatch):
    tried = []
    monkeypatch.setattr(packed_linear, "row_multiple", lambda _, rows: tried.append(rows.shape[1]) or 1)
    model = nn.Sequential(linear(), linear(seed=4), linear(96, 40), linear(bias=False), linear(dtype=torch.bfloat16))
    packing = pack_linears(model)
    assert tried == [96, 40, 96, 96]
    assert packing.packed_bytes == 4 * 40 * 96 * 4 + 40 * 96 * 2
    assert f"{len(tried)} of {len(tried)} shapes packed" in str(packing)


def adding_otherwise(layer):
    """A product of bfloat16 that adds in another order for one row, which rounding hides in almost every output."""

    def product(x):
        terms = x.float()[:, None] * layer.weight.float()
        total = torch.zeros_like(terms[..., 0])
        for term in (terms if len(x) > 1 else terms.flip(2)).unbind(2):
            total = total + term
        return total.to(x.dtype)

    return product


def test_another_order_of_adding_is_found_though_rounding_hides_it(monkeypatch):
    monkeypatch.setattr(packed_linear, "packed_product", adding_otherwise)
    layer = linear(64, 96, bias=False, dtype=torch.bfloat16)
    assert torch.equal(adding_otherwise(layer)(rows_of(layer)[:1])[0], adding_otherwise(layer)(rows_of(layer))[0])
    assert pack_linears(nn.Sequential(layer)).row_multiple == 2


def rows_of(layer):
    return torch.randn(316, layer.in_features, generator=torch.Generator().manual_seed(1)).to(layer.weight.dtype)


# === the fallback ===================================================================================================


def of_another_layer(layer):
    return by_rows(linear(layer.out_features, layer.in_features, dtype=layer.weight.dtype, seed=99))


def without_a_column(layer):
    return lambda rows: by_rows(layer)(rows * (torch.arange(rows.shape[-1]) > 0))


def no_numbers(layer):
    return lambda rows: by_rows(layer)(rows) * float("nan")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", [of_another_layer, without_a_column, no_numbers])
@pytest.mark.parametrize("which", [0, 1])
def test_a_wrong_product_of_one_layer_keeps_the_shape_plain(monkeypatch, caplog, dtype, wrong, which):
    model = nn.Sequential(linear(48, 48, dtype=dtype), linear(48, 48, dtype=dtype, seed=4))
    broken = model[which]
    monkeypatch.setattr(packed_linear, "packed_product", lambda layer: (wrong if layer is broken else by_rows)(layer))
    with caplog.at_level(logging.WARNING):
        packing = pack_linears(model)
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]
    assert packing == Packing(plain=((48, 48),), row_multiple=packing.row_multiple)
    assert "not used" in caplog.text


def raises(*_):
    raise RuntimeError("could not create a primitive descriptor")


@pytest.mark.parametrize(
    "operators",
    [
        SimpleNamespace(),
        SimpleNamespace(_reorder_linear_weight=lambda weight: weight),
        SimpleNamespace(_reorder_linear_weight=raises),
        SimpleNamespace(_reorder_linear_weight=lambda weight, rows: weight, _linear_pointwise=raises),
    ],
    ids=["missing", "changed", "cannot pack", "cannot multiply"],
)
def test_without_the_operators_layers_stay_plain(monkeypatch, operators):
    monkeypatch.setattr(torch.ops, "mkldnn", operators)
    model = nn.Sequential(linear())
    packing = pack_linears(model, exact=True)
    assert type(model[0]) is nn.Linear
    assert packing.packed == ()


@pytest.mark.usefixtures("any_processor")
def test_other_devices_types_and_kinds_of_layers_stay_as_they_are():
    class Own(nn.Linear):
        """Its forward might do more."""

    model = nn.Sequential(
        linear(), Own(96, 40), linear(dtype=torch.float16), nn.LayerNorm(4), nn.Linear(96, 40, device="meta")
    )
    kinds = [type(layer) for layer in model]
    pack_linears(model)
    assert [type(layer) for layer in model] == [PackedLinear, *kinds[1:]]


@pytest.mark.usefixtures("any_processor")
def test_weights_are_not_copied_where_memory_is_short(monkeypatch, caplog):
    model = nn.Sequential(linear(), linear(96, 40))
    needed = 2 * 40 * 96 * 4
    monkeypatch.setattr(packed_linear, "available_bytes", lambda: 2 * needed - 1)
    assert pack_linears(model, exact=True).packed == ()
    assert "not packed" in caplog.text
    monkeypatch.setattr(packed_linear, "available_bytes", lambda: 2 * needed)
    assert pack_linears(model).packed_bytes == needed


# === bits ===========================================================================================================


@pytest.mark.parametrize(
    ("wrong", "multiple"),
    [
        (lambda x: x * (1 + 2**-7 * (len(x) == 1)), 2),
        (lambda x: x * (1 + 2**-7 * (len(x) < 4)), 4),
        (lambda x: x * (1 + 2**-7 * (len(x) in (1, 2, 3, 5, 7, 13))), 4),
        (lambda x: x * (1 + 2**-7 * (len(x) < 8)), 8),
        (lambda x: x * (1 + 2**-7 * (len(x) < 300)), 0),
        (lambda x: x * (1 + 2**-7 * (torch.arange(len(x)) == 3))[:, None].to(x.dtype), 0),
    ],
    ids=["alone", "below four", "odd numbers", "below eight", "in a small crowd", "in the fourth place"],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_whose_bits_depend_on_its_neighbours_is_found(dtype, wrong, multiple):
    assert row_multiple(wrong, rows_of(linear(dtype=dtype))) == multiple


@pytest.mark.usefixtures("any_processor")
@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_of_gpt2_are_packed_like_others(dtype, monkeypatch):
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(3)
    layer = Conv1D(40, 96).to(dtype)
    model = nn.ModuleDict({"inner": nn.Sequential(layer, nn.Identity())}).eval()
    x = torch.randn(5, 96).to(dtype)
    with torch.inference_mode():
        before = model["inner"](x)
        replace_conv1d(model)
        packing = pack_linears(model)
        after = model["inner"](x)
    assert type(model["inner"][0]) is PackedLinear
    assert packing.packed == ((40, 96),)
    assert model["inner"][0].weight.data_ptr() == layer.weight.data_ptr()
    assert torch.allclose(after, before, atol=1e-5 if dtype == torch.float32 else 2e-2)


# === the embedded target ============================================================================================


@pytest.fixture(scope="module")
def packed_and_plain():
    product_here(linear())
    model = load_model(resolve_target("reference"), "reference", device="cpu", dtype="float32")
    packing = pack_linears(model)
    assert not packing.plain
    packed = Target(model, "{}", kv_tokens=4096, page_size=16, packing=packing)
    return packed, load_target("reference", kv_tokens=4096, packed=False)


def encoded():
    tokenizer = load_tokenizer(resolve_target("reference"))
    return [tuple(tokenizer.encode(prompt)) for prompt in PROMPTS]


@pytest.mark.parametrize("rows", [1, 5, 17, 33])
def test_the_likeliest_tokens_are_the_same_packed_and_plain(packed_and_plain, rows):
    tokens = (*itertools.chain(*encoded()),) * 3
    logits = []
    for target in packed_and_plain:
        cache = target.pool.allocate(len(tokens))
        pieces = [tokens[at : at + rows] for at in range(0, len(tokens), rows)]
        logits.append(torch.cat([target.forward([SessionRows(cache, piece, len(piece))]) for piece in pieces]))
        target.pool.release(cache)
    packed, plain = logits
    assert torch.equal(packed.argmax(dim=1), plain.argmax(dim=1))
    assert float((packed - plain).abs().max()) < 1e-4


def test_a_loaded_target_says_how_its_layers_multiply(tmp_path, caplog):
    folder = str(save_tiny_target(tmp_path))
    with caplog.at_level(logging.INFO):
        packing = load_target(folder, kv_tokens=256).packing
    assert len(packing.packed) + len(packing.plain) == 5
    assert f"linear layers of {folder}: {packing}" in caplog.text
    plain = load_target(folder, kv_tokens=256, packed=False)
    assert plain.packing == Packing()
    assert not any(isinstance(module, PackedLinear) for module in plain.model.modules())
