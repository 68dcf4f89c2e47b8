"""The paged KV cache: keys and values of all sessions in one pool, rolled back by one verb, `truncate`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from outrider.proto.errors import ResourceExhausted


@dataclass(slots=True)
class SessionCache:
    """One session's share of the pool.

    Attributes:
        pages: the pages it holds, in order of position.
        slots: [capacity] int64, the pool slot of each position.
        length: positions that hold valid keys and values.
    """

    pages: list[int]
    slots: torch.Tensor
    length: int = 0
    first_slot: int = field(init=False)
    contiguous: bool = field(init=False)

    def __post_init__(self) -> None:
        self.first_slot = int(self.slots[0])
        self.contiguous = int(self.slots[-1]) - self.first_slot == len(self.slots) - 1

    def truncate(self, length: int) -> None:
        """Forget all positions from `length` on; what is forgotten is overwritten later, never read."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate {self.length} positions to {length}")
        self.length = length


class PagedKVCache:
    """Keys and values of every layer, [slots, kv_heads, head_dim] each, made at the layer's first write.

    A session's pages are reserved when it is admitted, so a running session never fails for memory, and lie side by
    side where the pool allows it, so that reading them is a view instead of a gather.
    """

    def __init__(self, tokens: int, page_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.page_size = page_size
        self.page_count = tokens // page_size
        self._dtype = dtype
        self._device = device
        self._free = set(range(self.page_count))
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}

    @property
    def free_pages(self) -> int:
        """Pages that no session holds."""
        return len(self._free)

    def allocate(self, tokens: int) -> SessionCache:
        """Reserve room for `tokens` positions.

        Raises:
            ResourceExhausted: not enough free pages now; try again later.
        """
        wanted = math.ceil(tokens / self.page_size)
        if wanted > self.page_count:
            raise ResourceExhausted(
                f"needs {tokens} positions, the verifier's KV cache holds {self.page_count * self.page_size}; "
                "lower sampling.max_tokens",
                field="open.prompt",
            )
        if wanted > len(self._free):
            raise ResourceExhausted(
                f"needs {wanted} KV pages, {len(self._free)} are free; try again later",
                field="open.prompt",
                retry_after_s=1.0,
            )
        pages = self._run_of(wanted) or sorted(self._free)[:wanted]
        self._free.difference_update(pages)
        first = torch.tensor(pages, dtype=torch.int64, device=self._device) * self.page_size
        slots = (first[:, None] + torch.arange(self.page_size, device=self._device)).flatten()
        return SessionCache(pages, slots)

    def _run_of(self, wanted: int) -> list[int]:
        """`wanted` free pages side by side; empty: there are none."""
        run: list[int] = []
        for page in sorted(self._free):
            if run and page != run[-1] + 1:
                run = []
            run.append(page)
            if len(run) == wanted:
                return run
        return []

    def release(self, cache: SessionCache) -> None:
        """Give a session's pages back."""
        self._free.update(cache.pages)
        cache.pages = []
        cache.length = 0

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put `keys` and `values` [rows, kv_heads, head_dim] at `slots` [rows]."""
        if layer not in self._keys:
            slot_count = self.page_count * self.page_size
            self._keys[layer] = torch.zeros(slot_count, *keys.shape[1:], dtype=self._dtype, device=self._device)
            self._values[layer] = torch.zeros(slot_count, *values.shape[1:], dtype=self._dtype, device=self._device)
        self._keys[layer].index_copy_(0, slots, keys.to(self._dtype))
        self._values[layer].index_copy_(0, slots, values.to(self._dtype))

    def read(self, layer: int, cache: SessionCache, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [length, kv_heads, head_dim] of a session's first positions; a view where they can be."""
        if cache.contiguous:
            here = slice(cache.first_slot, cache.first_slot + length)
            return self._keys[layer][here], self._values[layer][here]
        slots = cache.slots[:length]
        return self._keys[layer].index_select(0, slots), self._values[layer].index_select(0, slots)
