"""The format of drafter packages, as they are exported, served and loaded."""

from __future__ import annotations

from dataclasses import dataclass

DRAFTER_FORMAT = "outrider-drafter/2"
ON_TRIAL = "@"  # which no name contains
CACHE_LAYOUT = "[1, kv_head, position, head_dim]"  # keys, and values, of a layer
CACHE_DTYPES = {"float32": 4, "int8": 1}  # bytes of a number


def trial_name(name: str, version: str) -> str:
    """Return the name of a version on trial, which drafts beside the current version of the same name."""
    return f"{name}{ON_TRIAL}{version}"


def published_name(name: str) -> str:
    """Return the name in the manifest of a drafter that may be on trial."""
    return name.partition(ON_TRIAL)[0]


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Shape of a drafter's KV cache: for each layer, keys and values, `dtype` [1, kv_heads, positions, head_dim].

    Attributes:
        dtype: one of `CACHE_DTYPES`; the graph has the scales of int8.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str = "float32"

    def bytes_of(self, positions: int) -> int:
        return CACHE_DTYPES[self.dtype] * 2 * self.layers * self.kv_heads * self.head_dim * positions
