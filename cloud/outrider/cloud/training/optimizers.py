"""Optimizers, and their learning rates over a budget of steps or minutes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

# Quintic Newton-Schulz iteration of Muon: steep at zero, settling near one.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Momentum whose update is replaced by the nearest semi-orthogonal matrix (Jordan et al. 2024); 2-D only.

    It computes in the parameters' own precision: torch.optim.Muon orthogonalises in bfloat16, which is several times
    slower than float32 on processors without bfloat16 units. Its learning rate means the same.
    """

    def __init__(self, params: Iterable[torch.Tensor] | Iterable[dict[str, Any]], lr: float, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002 - it evaluates no closure
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


def adam(parameters: list[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Return AdamW without decay, for what is no matrix of a layer."""
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)


@dataclass(frozen=True)
class Budget:
    """A limit on training by `steps` or `minutes`, one of them.

    Attributes:
        warm_up_steps: steps over which the learning rates grow linearly.
        fall: factor of their peaks by the share of the budget that is used; `linear_fall` or `cosine_fall`.
    """

    steps: int | None
    minutes: float | None
    warm_up_steps: int
    fall: Callable[[float], float]

    def spent(self, step: int, elapsed_s: float) -> float:
        """Return the share of the budget used before optimizer step `step` (from 0); 1 or more: it is over."""
        if self.minutes is not None:
            return elapsed_s / (60 * self.minutes)
        return step / (self.steps or 1)

    def rate(self, step: int, elapsed_s: float) -> float:
        """Return the factor of the learning rates at `step`."""
        warm = (step + 1) / (self.warm_up_steps + 1)
        return max(0.0, min(1.0, warm, self.fall(self.spent(step, elapsed_s))))


def linear_fall(decay_fraction: float) -> Callable[[float], float]:
    """Return the line that falls to zero over the last `decay_fraction` of a budget; it is above 1 before."""
    return lambda spent: (1 - spent) / decay_fraction if decay_fraction else 1.0


def cosine_fall(spent: float) -> float:
    """Return half a cosine, from 1 to 0 (Loshchilov and Hutter 2017, equation 5, without restarts)."""
    return 0.5 * (1 + math.cos(math.pi * min(1.0, spent)))
