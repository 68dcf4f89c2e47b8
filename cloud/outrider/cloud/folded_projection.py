"""A trained projection as a verifier runs it."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from outrider.cloud.steering import Projection, normalised


class FoldedProjection:
    """The same codes as a `Projection`'s, of one small matrix product.

    A step leaves no cache warm, so on a CPU a code costs what its calls and the weights that it reads cost.
    """

    def __init__(self, projection: Projection, device: torch.device) -> None:
        self.layers = projection.layers
        with torch.no_grad():
            self._weight = (projection.down.weight.double() @ projection.mix.weight.double()).float().to(device)

    @torch.inference_mode()
    def __call__(self, taps: torch.Tensor) -> list[np.ndarray]:
        """The codes [rank] float32, on the host, of `taps` [n, taps * hidden] float32; not finite where those are."""
        codes = functional.linear(normalised(taps, len(self.layers)), self._weight)
        return list(codes.cpu().numpy())
