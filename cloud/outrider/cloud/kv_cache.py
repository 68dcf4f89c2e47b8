"""The paged KV cache: keys and values of all sessions in one pool, rolled back by one verb, `truncate`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import torch

from outrider.proto.errors import ResourceExhausted


@dataclass(slots=True)
class SessionCache:
    """One session's share of the pool.

    Attributes:
        pages: the pages that it holds, in order of position.
        slots: [capacity] int64, the pool slot of each position.
        length: positions that hold valid keys and values.
    """

    pages: list[int]
    slots: torch.Tensor
    length: int = 0
    first_slot: int = field(init=False)
    contiguous: bool = field(init=False)

    def __post_init__(self) -> None:
        self.lie_on(self.pages, self.slots)

    def lie_on(self, pages: list[int], slots: torch.Tensor) -> None:
        """Hold `pages` with their `slots`; positions that hold something stay where they are."""
        self.pages, self.slots = pages, slots
        self.first_slot = int(slots[0]) if pages else 0
        self.contiguous = all(after == before + 1 for before, after in itertools.pairwise(pages))

    @property
    def num_pages(self) -> int:
        """Pages that it holds."""
        return len(self.pages)

    @property
    def capacity(self) -> int:
        """Positions that its pages have room for."""
        return len(self.slots)

    def truncate(self, length: int) -> None:
        """Forget all positions from `length` on; what is forgotten is overwritten later, never read."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate {self.length} positions to {length}")
        self.length = length


class PagedKVCache:
    """Keys and values of every layer, [slots, kv_heads, head_dim] each, made at the layer's first write.

    A session's pages lie side by side where the pool allows it, so that reading them is a view instead of a gather: new
    ones begin amid the longest run of free pages, to grow there, and where a session cannot grow it is moved.
    """

    def __init__(self, tokens: int, page_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.page_size = page_size
        self.page_count = tokens // page_size
        self.free_pages = self.page_count
        self._dtype = dtype
        self._device = device
        self._free = np.ones(self.page_count, dtype=bool)
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}

    def empty(self) -> SessionCache:
        """Return the share of a session that holds no page yet."""
        return SessionCache([], self._slots_of([]))

    def allocate(self, tokens: int) -> SessionCache:
        """Reserve room for `tokens` positions.

        Raises:
            ResourceExhausted: not enough free pages now; try again later.
        """
        cache = self.empty()
        self.resize(cache, tokens)
        return cache

    def resize(self, cache: SessionCache, tokens: int) -> None:
        """Reserve room for `tokens` positions instead, no fewer than hold something.

        Raises:
            ResourceExhausted: not enough free pages; the session keeps what it has.
        """
        if tokens < cache.length:
            raise ValueError(f"cannot hold {cache.length} positions in {tokens}")
        wanted = max(1, self.pages_for(tokens))
        more = wanted - len(cache.pages)
        if more <= 0:
            self._take(cache, cache.pages[:wanted])
            return
        self._check_room(tokens, more)
        following = self._next_to(cache.pages, more)
        if not (following and cache.contiguous) and (run := self._run_of(wanted)):
            self._move(cache, run)
        else:
            self._take(cache, [*cache.pages, *(following or np.flatnonzero(self._free)[:more].tolist())])

    def gather(self, cache: SessionCache) -> None:
        """Move a session's pages side by side, where that many are free; each step would gather them otherwise."""
        if not cache.contiguous and (run := self._run_of(len(cache.pages))):
            self._move(cache, run)

    @torch.inference_mode()  # the layers are made in it, and may change in no other
    def copy(self, source: SessionCache, cache: SessionCache, length: int) -> None:
        """Let `cache` hold the first `length` positions of `source` in pages of its own, for which it has room."""
        here, there = source.slots[:length], cache.slots[:length]
        for layers in (self._keys, self._values):
            for tensor in layers.values():
                tensor[there] = tensor[here]
        cache.length = length

    def pages_for(self, tokens: int) -> int:
        """Return how many pages `tokens` positions take."""
        return math.ceil(tokens / self.page_size)

    def _check_room(self, tokens: int, more: int) -> None:
        """Check that `tokens` positions fit at all, and that `more` pages are free."""
        if self.pages_for(tokens) > self.page_count:
            raise ResourceExhausted(
                f"needs {tokens} positions, the verifier's KV cache holds {self.page_count * self.page_size}; "
                "lower sampling.max_tokens",
                field="open.prompt",
            )
        if more > self.free_pages:
            raise ResourceExhausted(
                f"needs {more} KV pages, {self.free_pages} are free; try again later",
                field="open.prompt",
                retry_after_s=1.0,
            )

    def _take(self, cache: SessionCache, pages: list[int]) -> None:
        """Have a session hold `pages` instead of its own, without a copy."""
        slots = self._slots_of(pages)  # first, since a device may fail
        self._free[cache.pages] = True
        self._free[pages] = False
        self.free_pages += len(cache.pages) - len(pages)
        cache.lie_on(pages, slots)

    @torch.inference_mode()  # as above
    def _move(self, cache: SessionCache, pages: list[int]) -> None:
        """Copy what a session holds to free `pages`, which it holds from then on."""
        before = cache.slots[: cache.length]
        self._take(cache, pages)
        if cache.length:
            after = cache.slots[: cache.length]
            for layers in (self._keys, self._values):
                for tensor in layers.values():
                    tensor[after] = tensor[before]

    def _slots_of(self, pages: list[int]) -> torch.Tensor:
        """Return [capacity] int64, the slot of each position on `pages`."""
        first = torch.tensor(pages, dtype=torch.int64, device=self._device) * self.page_size
        return (first[:, None] + torch.arange(self.page_size, device=self._device)).flatten()

    def _next_to(self, pages: list[int], more: int) -> list[int]:
        """Return the `more` pages after the last of `pages`, where they are free; empty: they are not."""
        first = pages[-1] + 1 if pages else self.page_count
        following = range(first, first + more)
        return list(following) if following.stop <= self.page_count and self._free[first:][:more].all() else []

    def _run_of(self, wanted: int) -> list[int]:
        """Return `wanted` free pages side by side, with free ones around them if possible; empty: there are none."""
        borders = np.flatnonzero(np.diff(self._free, prepend=False, append=False))
        starts, ends = borders[::2], borders[1::2]
        if not len(starts) or (ends - starts).max() < wanted:
            return []
        longest = int((ends - starts).argmax())
        first, spare = int(starts[longest]), int(ends[longest] - starts[longest]) - wanted
        if first > 0:
            first += spare // 2  # half of the rest is left to the session before it
        return list(range(first, first + wanted))

    def release(self, cache: SessionCache) -> None:
        """Give a session's pages back, also on a device that has failed: no tensor is made."""
        self._free[cache.pages] = True
        self.free_pages += len(cache.pages)
        cache.length = 0
        cache.lie_on([], cache.slots[:0])

    @property
    def layers(self) -> Collection[int]:
        """Layers that have keys and values."""
        return self._keys.keys()

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put `keys` and `values` [rows, kv_heads, head_dim] at `slots` [rows]."""
        if layer not in self._keys:
            slot_count = self.page_count * self.page_size
            self._keys[layer] = torch.zeros(slot_count, *keys.shape[1:], dtype=self._dtype, device=self._device)
            self._values[layer] = torch.zeros(slot_count, *values.shape[1:], dtype=self._dtype, device=self._device)
        self._keys[layer].index_copy_(0, slots, keys.to(self._dtype))
        self._values[layer].index_copy_(0, slots, values.to(self._dtype))

    def read(self, layer: int, cache: SessionCache, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [length, kv_heads, head_dim] of a session's first positions, a view if possible."""
        if cache.contiguous:
            here = slice(cache.first_slot, cache.first_slot + length)
            return self._keys[layer][here], self._values[layer][here]
        slots = cache.slots[:length]
        return self._keys[layer].index_select(0, slots), self._values[layer].index_select(0, slots)
