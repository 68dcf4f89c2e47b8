"""Linear layers with exchanged operands compute what linear layers compute."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outrider.cloud.target import ExchangedLinear, exchange_linears

torch.set_num_threads(1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 8, 17, 48, 49])
@pytest.mark.parametrize("shape", [(), (1,), (2, 1)])
@torch.inference_mode()
def test_the_result_is_that_of_the_plain_layer(bias, rows, shape):
    torch.manual_seed(3)
    layer = nn.Linear(96, 40, bias=bias)
    x = torch.randn(*shape, 96, rows).transpose(-1, -2)  # as a view that is not contiguous
    plain = layer(x)
    exchange_linears(layer)
    got = layer(x)
    assert got.shape == plain.shape
    assert got.is_contiguous()
    assert torch.allclose(got, plain, atol=1e-5)


def test_only_plain_float32_layers_are_exchanged_and_no_weight_is_copied():
    class Own(nn.Linear):
        """Its forward might do more."""

    model = nn.Sequential(nn.Linear(4, 4), Own(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16), nn.LayerNorm(4))
    weights = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    exchange_linears(model)
    assert [type(layer) for layer in model] == [ExchangedLinear, Own, nn.Linear, nn.LayerNorm]
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == weights
