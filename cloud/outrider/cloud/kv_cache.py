"""The paged KV cache: keys and values of all sessions in one pool, rolled back by one verb, `truncate`."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

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
        self.first_slot = int(slots[0])
        self.contiguous = all(after == before + 1 for before, after in itertools.pairwise(pages))

    def truncate(self, length: int) -> None:
        """Forget all positions from `length` on; what is forgotten is overwritten later, never read."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate {self.length} positions to {length}")
        self.length = length


class PagedKVCache:
    """Keys and values of every layer, [slots, kv_heads, head_dim] each, made at the layer's first write.

    A session's pages are reserved at admission and at every turn, so a running session never fails for lack of memory.
    They lie side by side where the pool allows it, so that reading them is a view instead of a gather.
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
        self._check_room(tokens, self.pages_for(tokens))
        wanted = self.pages_for(tokens)
        pages = self._run_of(wanted) or sorted(self._free)[:wanted]
        self._free.difference_update(pages)
        return SessionCache(pages, self._slots_of(pages))

    def resize(self, cache: SessionCache, tokens: int) -> None:
        """Reserve room for `tokens` positions instead, no fewer than hold something.

        Raises:
            ResourceExhausted: not enough free pages; the session keeps what it has.
        """
        if tokens < cache.length:
            raise ValueError(f"cannot hold {cache.length} positions in {tokens}")
        wanted, had = max(1, self.pages_for(tokens)), len(cache.pages)
        if wanted > had:
            self._check_room(tokens, wanted - had)
            more = self._next_to(cache.pages[-1], wanted - had) or self._run_of(wanted - had)
            pages = [*cache.pages, *(more or sorted(self._free)[: wanted - had])]
        else:
            pages = cache.pages[:wanted]
        self._free.update(cache.pages[wanted:])
        self._free.difference_update(pages)
        cache.lie_on(pages, self._slots_of(pages))

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
        if more > len(self._free):
            raise ResourceExhausted(
                f"needs {more} KV pages, {len(self._free)} are free; try again later",
                field="open.prompt",
                retry_after_s=1.0,
            )

    def _slots_of(self, pages: list[int]) -> torch.Tensor:
        """Return [capacity] int64, the slot of each position on `pages`."""
        first = torch.tensor(pages, dtype=torch.int64, device=self._device) * self.page_size
        return (first[:, None] + torch.arange(self.page_size, device=self._device)).flatten()

    def _next_to(self, page: int, wanted: int) -> list[int]:
        """Return the `wanted` pages after `page`, where they are free; empty: they are not."""
        following = list(range(page + 1, page + 1 + wanted))
        return following if self._free.issuperset(following) else []

    def _run_of(self, wanted: int) -> list[int]:
        """Return `wanted` free pages side by side; empty: there are none."""
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
        """Return keys and values [length, kv_heads, head_dim] of a session's first positions, a view if possible."""
        if cache.contiguous:
            here = slice(cache.first_slot, cache.first_slot + length)
            return self._keys[layer][here], self._values[layer][here]
        slots = cache.slots[:length]
        return self._keys[layer].index_select(0, slots), self._values[layer].index_select(0, slots)
