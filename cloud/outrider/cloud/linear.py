"""Linear layers for a dozen rows on a CPU.

A step of the verifier multiplies a few rows by every weight. From 8 to 48 rows the matrix product of float32 is faster
with its operands exchanged: W x^T, the wide matrix first, instead of x W^T. On the embedded target that makes a step of
9 to 48 rows 1.1 to 1.4 times as fast on two threads, 1.1 to 1.3 times on one; with fewer or more rows it would cost.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

_FEWEST_ROWS = 8
_MAX_ROWS = 48


class ExchangedLinear(nn.Linear):
    """`nn.Linear` with the same parameters and state, and another order of operands for a dozen rows."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name it has in nn.Linear
        """Map [..., in_features] to [..., out_features]."""
        rows = input.numel() // self.in_features
        if not _FEWEST_ROWS <= rows <= _MAX_ROWS:
            return functional.linear(input, self.weight, self.bias)
        # Contiguous, or later operations would pay for the exchange.
        output = torch.mm(self.weight, input.reshape(rows, self.in_features).t()).t().contiguous()
        if self.bias is not None:
            output += self.bias
        return output.view(*input.shape[:-1], self.out_features)


def exchange_linears(model: nn.Module) -> None:
    """Give the plain linear layers of `model` that are float32 on a CPU this forward, in place; no weight is copied."""
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype == torch.float32 and module.weight.device.type == "cpu":
            module.__class__ = ExchangedLinear
