"""Scales of a KV cache of 8-bit numbers: one for each channel of a head's keys and values, found on drawn texts.

The graph's attention rounds new keys and values when it writes them, and multiplies with the levels. A scale is fixed,
so what is larger than any of the texts had is cut off at `HEADROOM` times that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from outrider.cloud.export.check import drawn_texts
from outrider.cloud.export.model import Anatomy, CacheScales

HEADROOM = 1.1
MAX_LEVEL = 127
SEED = 1  # other texts than those that the graph is checked on


@torch.inference_mode()
def with_int8_cache(anatomy: Anatomy, plain: PreTrainedModel) -> Anatomy:
    """Return the anatomy of the model with a cache of int8.

    Args:
        anatomy: that with a cache of float32.
        plain: model, with transformers' own attention.
    """
    filled: Any = DynamicCache()
    plain(input_ids=drawn_texts(plain, seed=SEED), past_key_values=filled, use_cache=True, logits_to_keep=1)
    scales = tuple(
        CacheScales(_scales(_turned(layer.keys) if rotation else layer.keys.abs()), _scales(layer.values.abs()))
        for layer, rotation in zip(filled.layers, anatomy.rotations, strict=True)
    )
    return replace(anatomy, shape=replace(anatomy.shape, dtype="int8"), scales=scales)


def _turned(keys: torch.Tensor) -> torch.Tensor:
    """Return the largest that each number of `keys` [rows, kv_heads, n, head_dim] is at any position.

    Rotation turns the pairs of channel j and j + head_dim / 2 and keeps their lengths.
    """
    first, second = keys.chunk(2, dim=-1)
    lengths = torch.hypot(first, second)
    return torch.cat([lengths, lengths], dim=-1)


def _scales(sizes: torch.Tensor) -> torch.Tensor:
    """Return the scales [1, kv_heads, 1, head_dim] of `sizes` [rows, kv_heads, n, head_dim], none of them zero."""
    largest = sizes.float().amax(dim=(0, 2), keepdim=True)
    return (HEADROOM / MAX_LEVEL * largest).clamp(min=1e-6)
