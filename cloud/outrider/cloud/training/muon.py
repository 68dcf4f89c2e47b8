"""Muon (Jordan et al. 2024) in the parameters' own precision.

torch.optim.Muon orthogonalises in bfloat16, which is several times slower than float32 on processors without
bfloat16 units; this one does not convert. Its learning rate means the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

# Quintic Newton-Schulz iteration of Muon: steep at zero, settling near one.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Momentum whose update is replaced by the nearest semi-orthogonal matrix; for 2-D parameters only."""

    def __init__(self, params: Iterable[torch.Tensor] | Iterable[dict[str, Any]], lr: float, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state: dict[str, Any] = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                momentum = state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalised(parameter.grad.lerp(momentum, group["momentum"]))
                rows, columns = parameter.shape
                parameter.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """Bring the singular values of `matrix` ([rows, columns]) near one, leaving its singular vectors."""
    a, b, c = COEFFICIENTS
    x: torch.Tensor
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide / wide.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if matrix.shape[0] <= matrix.shape[1] else x.T
