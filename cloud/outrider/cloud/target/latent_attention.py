"""Latent attention (DeepSeek V2, arXiv 2405.04434, section 2.1): one vector a position, which all heads share.

A model makes its heads' keys and values of that vector by one product (`kv_b_proj`). The KV cache keeps the vector and
the rotated part of the keys beside it, 576 numbers in place of 5,120 in DeepSeek V2 Lite. The product goes into queries
and results instead ("absorbed" there): q · (W_k c) = (W_k^T q) · c, and sum p W_v c = W_v sum p c. So a row attends to
vectors as to one key head whose keys are its values too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

OURS = "outrider_"  # how our attention functions' names begin

_Expand = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Latents:
    """In place of a module's `expand_kv`: hands vectors on as they are where attention is ours."""

    def __init__(self, module: Any, expand: _Expand) -> None:
        self._module = module
        self._expand = expand

    @staticmethod
    def of(module: Any) -> Latents | None:
        """Return what `attach` has given a module; None: its keys and values are those of its heads."""
        expand = getattr(module, "expand_kv", None)
        return expand if isinstance(expand, Latents) else None

    def __call__(self, latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `latent` [1, 1, rows, rank] and `rotated` [1, 1, rows, rope], or the heads' keys and values."""
        ours = self._module.config._attn_implementation.startswith(OURS)
        return (latent, rotated) if ours else self._expand(latent, rotated)

    def absorbed(self, query: torch.Tensor) -> torch.Tensor:
        """Return [1, heads, rows, rank + rope] that meet vectors as `query` [1, heads, rows, nope + rope] meet keys."""
        plain, rotated = query.split([self._module.qk_nope_head_dim, self._module.qk_rope_head_dim], dim=-1)
        return torch.cat([plain @ self._weights(query)[0], rotated], dim=-1)

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        """Return the heads' sums of values [1, rows, heads, value_dim], of vectors [1, rows, heads, rank + rope]."""
        weight = self._weights(attended)[1]
        latent = attended[..., : weight.shape[-1]].transpose(1, 2)
        return (latent @ weight.transpose(1, 2)).transpose(1, 2)

    def _weights(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what makes keys [heads, nope, rank] and values [heads, value_dim, rank], in the type of `rows`."""
        sizes, product = [self._module.qk_nope_head_dim, self._module.v_head_dim], self._module.kv_b_proj
        weight: torch.Tensor = product.weight
        if weight.dtype != rows.dtype:  # a quantised one, say
            weight = product(torch.eye(self._module.kv_lora_rank, dtype=rows.dtype, device=rows.device)).T
        keys, values = weight.reshape(-1, sum(sizes), weight.shape[1]).split(sizes, dim=1)
        return keys, values


def attach(model: Any) -> None:
    """Have each module of `model` that makes keys and values of one vector hand on the vector."""
    for module in model.modules():
        if hasattr(module, "expand_kv"):
            module.expand_kv = Latents.of(module) or Latents(module, module.expand_kv)
