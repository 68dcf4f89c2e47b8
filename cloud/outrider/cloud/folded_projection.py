"""A trained projection as a verifier runs it."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.nn import functional

from outrider.cloud.steering import Projection


class FoldedProjection:
    """The same codes as a `Projection`'s, of one matrix product and little after it.

    A step leaves no cache warm, so on a CPU a code costs what its calls and the weights that it reads cost. With
    W' = (I - 11'/H) W, LayerNorm(W x) = gamma W' x / s + beta, s^2 = |W' x|^2 / H + eps: both W' x, of which s comes,
    and V (gamma W' x) are rows of one product, and V beta is a constant.
    """

    def __init__(self, projection: Projection, device: torch.device) -> None:
        self.layers = projection.layers
        self._hidden = projection.hidden
        self._eps = projection.norm.eps
        with torch.no_grad():
            mix, norm, down = projection.mix.weight.double(), projection.norm, projection.down.weight.double()
            centred = mix - mix.mean(dim=0)
            scaled = down * norm.weight.double()
            self._weight = torch.cat([centred, scaled @ centred]).float().to(device)
            self._constant = (down @ norm.bias.double()).float().cpu().numpy()

    @torch.inference_mode()
    def __call__(self, taps: torch.Tensor) -> list[np.ndarray]:
        """The codes [rank] float32, on the host, of `taps` [n, taps * hidden] float32."""
        return [self._code(row) for row in functional.linear(taps, self._weight).cpu().numpy()]

    def _code(self, row: np.ndarray) -> np.ndarray:
        """[rank] of one row [hidden + rank] of the product; not finite where that is not."""
        state = row[: self._hidden]
        size = math.sqrt(float(state.dot(state)) / self._hidden + self._eps)
        with np.errstate(over="ignore", invalid="ignore"):
            code: np.ndarray = row[self._hidden :] * np.float32(1 / size) + self._constant
        return code
