"""The paged KV cache: keys and values of all sessions in one pool, shared where their texts begin alike.

A full page is known by its text from when it is computed for good. It stays when no session holds it any more, until
its room is needed: such pages count as free, and the least recently used goes first. Sessions find each other's pages
only within one isolation. Nobody writes to positions that another session holds, or that a page's text is known for.
"""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from outrider.cloud.target.prefix_tree import CachedPage, PrefixTree
from outrider.proto.errors import ResourceExhausted


@dataclass(slots=True, eq=False)
class SessionCache:
    """One session's share of the pool.

    Attributes:
        page_size: positions per page.
        slots: [capacity] int64, the pool slot of each position.
        isolation: only sessions of the same one share pages.
        tokens: [length] tokens whose keys and values the positions hold.
        pages: the pages that it holds, in order of position.
        known: first full pages of its text as others find them, which may be copies elsewhere.
        copied: page from which the end of what it found was copied; None: from none.
        trusted: whether others may use what it has computed.
    """

    page_size: int
    slots: torch.Tensor
    isolation: str = ""
    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    known: list[CachedPage] = field(default_factory=list)
    copied: CachedPage | None = None
    trusted: bool = True
    first_slot: int = 0
    contiguous: bool = True

    @property
    def length(self) -> int:
        """Positions that hold valid keys and values."""
        return len(self.tokens)

    @property
    def num_pages(self) -> int:
        """Pages that it holds."""
        return len(self.pages)

    @property
    def capacity(self) -> int:
        """Positions that its pages have room for."""
        return len(self.slots)

    def lie_on(self, pages: list[int], slots: torch.Tensor) -> None:
        """Hold `pages` with their `slots`; positions that hold something stay where they are."""
        self.pages, self.slots = pages, slots
        self.first_slot = pages[0] * self.page_size if pages else 0
        self.contiguous = all(after == before + 1 for before, after in itertools.pairwise(pages))

    def extend(self, tokens: Iterable[int]) -> None:
        """Note that the next positions hold the keys and values of `tokens`."""
        self.tokens += tokens

    def truncate(self, length: int) -> None:
        """Forget all positions from `length` on; what is forgotten is overwritten later, never read."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate {self.length} positions to {length}")
        del self.tokens[length:]
        del self.known[length // self.page_size :]


@dataclass(slots=True)
class _Buffer:
    """Memory for what is gathered, kept from step to step."""

    memory: torch.Tensor | None = None

    def of(self, layer: torch.Tensor, count: int, size: int) -> torch.Tensor:
        """Return room [count, width] for `count` units of `size` slots of `layer`."""
        width = size * layer[0].numel()
        if self.memory is None or len(self.memory) < count * width:
            self.memory = layer.new_empty(count * width)
        return self.memory[: count * width].view(count, width)


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros; on a CPU they take memory, and the time to clear it, only where they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)  # torch.zeros would write all of it
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class _KeysAndValues:
    """Keys and values of every layer, [slots, kv_heads, head_dim] each, made at the layer's first write."""

    def __init__(self, page_count: int, page_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.page_count = page_count
        self.page_size = page_size
        self.blank_page = page_count
        self._dtype = dtype
        self._device = device
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._buffers = _Buffer(), _Buffer()

    @property
    def layers(self) -> Collection[int]:
        """Layers that have keys and values."""
        return self._keys.keys()

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put `keys` and `values` [rows, kv_heads, head_dim] at `slots` [rows]."""
        if layer not in self._keys:
            slot_count = (self.page_count + 1) * self.page_size  # the last page is the blank one
            self._keys[layer], self._values[layer] = (
                _zeros((slot_count, *each.shape[1:]), self._dtype, self._device) for each in (keys, values)
            )
        self._keys[layer].index_copy_(0, slots, keys.to(self._dtype))
        self._values[layer].index_copy_(0, slots, values.to(self._dtype))

    def clear(self, layer: int, slots: torch.Tensor) -> None:
        """Put zeros at `slots` [n] of a layer that has been written to."""
        self._keys[layer].index_fill_(0, slots, 0.0)
        self._values[layer].index_fill_(0, slots, 0.0)

    def copy(self, layer: int, before: torch.Tensor, after: torch.Tensor) -> None:
        """Copy what a layer holds at the slots `before` [n] to the slots `after` [n]."""
        for layers in (self._keys, self._values):
            layers[layer].index_copy_(0, after, layers[layer].index_select(0, before))

    def read(self, layer: int, cache: SessionCache, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [length, kv_heads, head_dim] of a session's first positions, a view if possible."""
        if cache.contiguous:
            here = slice(cache.first_slot, cache.first_slot + length)
            return self._keys[layer][here], self._values[layer][here]
        slots = cache.slots[:length]
        return self._keys[layer].index_select(0, slots), self._values[layer].index_select(0, slots)

    def buffers(self, layer: int, count: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return places for the keys and values of `count` units of `size` slots of a layer, [count, width] each.

        All share one memory, which is kept: new memory costs more than what it is for.
        """
        keys, values = self._keys[layer], self._values[layer]
        return self._buffers[0].of(keys, count, size), self._buffers[1].of(values, count, size)

    def gather(self, layer: int, units: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Copy keys and values of `units` [n] int64 to `out`, which `buffers` has returned for units of their size.

        Unit u is the slots u * size and following; the size divides the page size.
        """
        for source, place in zip((self._keys[layer], self._values[layer]), out, strict=True):
            torch.index_select(source.view(-1, place.shape[1]), 0, units, out=place)


class PagedKVCache(_KeysAndValues):
    """Keys and values of all sessions, in pages.

    A session's pages lie side by side where the pool allows it, so that reading them is a view instead of a gather: new
    ones begin amid the longest run of free pages, to grow there, and where a session cannot grow it is moved. Cached
    pages that lie in its way change places with it.

    Attributes:
        free_pages: pages that no session holds, cached ones included.
        blank_page: page of zeros that no session ever holds.
    """

    def __init__(self, tokens: int, page_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(tokens // page_size, page_size, dtype, device)
        self.free_pages = self.page_count
        self._holders = np.zeros(self.page_count, dtype=np.int32)
        self._tree = PrefixTree(self.page_count)

    def pages_for(self, tokens: int) -> int:
        """Return how many pages `tokens` positions take."""
        return math.ceil(tokens / self.page_size)

    # --- sessions ---

    def open(self, tokens: Sequence[int] = (), isolation: str = "") -> SessionCache:
        """Return the share of a new session, which holds as many of the first `tokens` [n] as the pool has."""
        cache = SessionCache(self.page_size, self.slots_of([]), isolation)
        cache.known = self._tree.find(isolation, tokens, self.page_size)
        full = len(cache.known) * self.page_size
        rest = tokens[full : full + self.page_size]
        end, common = self._tree.closest(isolation, cache.known[-1] if cache.known else None, rest)
        pages = [each.page for each in cache.known]
        if end is not None and common == len(end.tokens) and not self._holders[end.page]:
            self._begin_on(cache, [*pages, end.page], tokens[: full + common])  # goes on where that text ends
            return cache
        self._begin_on(cache, pages, tokens[:full])
        if end is not None and self._append_copy(cache, end.page, rest[:common]):
            cache.copied = end
        return cache

    def fork(self, cache: SessionCache, length: int) -> SessionCache:
        """Return the share of a session with the same first `length` positions; ResourceExhausted: no page is free."""
        full = length // self.page_size
        forked = SessionCache(self.page_size, self.slots_of([]), cache.isolation, trusted=cache.trusted)
        self._begin_on(forked, cache.pages[:full], cache.tokens[: full * self.page_size])
        forked.known = cache.known[:full]
        rest = cache.tokens[forked.length : length]
        if rest and not self._append_copy(forked, cache.pages[full], rest):
            self.release(forked)
            raise ResourceExhausted("no KV page is free for a fork; try again later", retry_after_s=1.0)
        return forked

    def allocate(self, tokens: int) -> SessionCache:
        """Return the share of a new session with room for `tokens` positions; raises like `resize`."""
        cache = self.open()
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
            gone = cache.pages[wanted:]
            cache.lie_on(cache.pages[:wanted], cache.slots[: wanted * self.page_size])
            self._drop(gone)
            return
        self._check_room(tokens, more)
        self._place(cache, self._pages_with(cache, more))

    def release(self, cache: SessionCache) -> None:
        """Give a session's pages back, also on a device that has failed: no tensor is made.

        Its text stays cached, its end included.
        """
        self.register(cache, cache.length)
        full = cache.length // self.page_size
        last = cache.known[-1] if cache.known else None
        end = tuple(cache.tokens[full * self.page_size :])
        if end and cache.trusted and self._tree.closest(cache.isolation, last, end)[1] < len(end):
            self._tree.add(cache.isolation, last, end, cache.pages[full])
        self._drop(cache.pages)
        for each in reversed(cache.known):
            self._tree.touch(each)
        cache.truncate(0)
        cache.lie_on([], cache.slots[:0])

    def register(self, cache: SessionCache, length: int) -> None:
        """Let others find the full pages of a session's first `length` positions, which are computed for good."""
        if not cache.trusted:
            return
        known, size = cache.known, self.page_size
        while known and not self._tree.has(known[-1]):
            known.pop()  # evicted elsewhere, though not here
        for i in range(len(known), length // size):
            tokens = tuple(cache.tokens[i * size : (i + 1) * size])
            known.append(self._tree.add(cache.isolation, known[-1] if known else None, tokens, cache.pages[i]))

    def distrust(self, cache: SessionCache) -> None:
        """Let nobody find what a session holds, since it may be wrong."""
        cache.trusted = False
        for each in [*cache.known, cache.copied, *map(self._tree.of_page, cache.pages)]:
            if each is not None:
                self._tree.remove(each)

    def begin_write(self, cache: SessionCache, count: int) -> None:
        """Let a session write its next `count` positions.

        Raises:
            ResourceExhausted: others hold a page that it would write to, and none is free for a copy.
        """
        first = cache.length // self.page_size
        touched = range(first, self.pages_for(cache.length + count))
        if shared := [i for i in touched if self._holders[cache.pages[i]] > 1]:
            self._check_room(cache.length + count, len(shared))
            self._evict(len(shared))
            pages = list(cache.pages)
            for i, page in zip(shared, self._blank(), strict=False):
                pages[i] = int(page)
            self._place(cache, pages)
        for i in touched:
            known = self._tree.of_page(cache.pages[i])
            if known is not None and len(known.tokens) > max(0, cache.length - i * self.page_size):
                self._tree.remove(known)

    @contextmanager
    def lend(self, count: int) -> Iterator[list[int]]:
        """Lend `count` pages that hold nothing, or as many as are free; inside the block nobody else has them."""
        count = min(count, self.free_pages)
        self._evict(count)
        pages = self._blank()[:count].tolist()
        self._hold(pages)
        try:
            yield list(pages)
        finally:
            self._drop(pages)

    # --- pages ---

    def _begin_on(self, cache: SessionCache, pages: list[int], tokens: Sequence[int]) -> None:
        """Let a new session hold `pages`, which hold `tokens`."""
        slots = self.slots_of(pages)  # first, since a device may fail
        self._hold(pages)
        cache.lie_on(pages, slots)
        cache.extend(tokens)

    def _append_copy(self, cache: SessionCache, page: int, tokens: Sequence[int]) -> bool:
        """Let a new session, whose pages are full, go on with the first `tokens` of `page`; False: no room.

        Where anything else fails, the session holds nothing.
        """
        self._hold([page])  # or else it may be evicted for its copy
        try:
            if not self.free_pages:
                return False
            self.resize(cache, cache.length + len(tokens))
            self._copy({page: cache.pages[-1]})
            cache.extend(tokens)
            return True
        except Exception:
            self.release(cache)
            raise
        finally:
            self._drop([page])

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

    def _pages_with(self, cache: SessionCache, more: int) -> list[int]:
        """Return the pages that a session holds best, with `more` than now."""
        free = self._holders == 0
        following = _next_to(cache.pages, more, free)
        if following and cache.contiguous:
            return [*cache.pages, *following]
        wanted = len(cache.pages) + more
        run = _amid_longest_run(free & ~self._tree.cached, wanted) or _amid_longest_run(free, wanted)
        if run and self._may_move(cache, wanted):
            return run
        if not following:
            self._evict(more)
            following = self._blank()[:more].tolist()
        return [*cache.pages, *following]

    def _may_move(self, cache: SessionCache, wanted: int) -> bool:
        """Return whether to move to `wanted` pages: copies of shared ones must leave half of the pool blank."""
        shared = int((self._holders[cache.pages] > 1).sum())
        blank = self.free_pages - self._tree.num_idle
        return not shared or blank - (wanted - len(cache.pages) + shared) >= self.page_count // 2

    def _place(self, cache: SessionCache, pages: list[int]) -> None:
        """Let a session hold `pages`, each its own or free, with all that its own hold.

        What is cached on new ones moves to blank ones, or to those that it leaves; if these are too few, the least
        recently used is evicted.
        """
        slots = self.slots_of(pages)  # first, since a device may fail
        own, stay = set(cache.pages), set(pages)
        new = [page for page in pages if page not in own]
        left = [page for page in cache.pages if page not in stay]
        vacated = [page for page in left if self._holders[page] == 1]
        self._evict(len(new) - len(vacated))
        displaced = [page for page in new if self._tree.cached[page]]
        room = [int(page) for page in self._blank() if page not in stay] + vacated
        filled = self.pages_for(cache.length)
        moves = {
            before: after
            for i, (before, after) in enumerate(zip(cache.pages, pages, strict=False))
            if before != after and (i < filled or self._tree.cached[before])
        }
        try:
            self._copy(moves | dict(zip(displaced, room, strict=False)))
        except Exception:
            self._forget(cache, [*displaced, *vacated])
            raise
        texts = {before: after for before, after in moves.items() if self._holders[before] == 1}
        self._tree.move(texts | dict(zip(displaced, room, strict=False)))
        self._hold(new)
        cache.lie_on(pages, slots)
        self._drop(left)

    def _forget(self, cache: SessionCache, pages: list[int]) -> None:
        """Forget what `pages` hold, and all that a session holds: a copy of some of it has failed."""
        for page in pages:
            if (known := self._tree.of_page(page)) is not None:
                self._tree.remove(known)
        cache.truncate(0)

    @torch.inference_mode()  # the layers are made in it, and may change in no other
    def _copy(self, moves: dict[int, int]) -> None:
        """Copy pages to others, all at once."""
        if not moves:
            return
        before, after = self.slots_of(list(moves)), self.slots_of(list(moves.values()))
        for layers in (self._keys, self._values):
            for tensor in layers.values():
                tensor[after] = tensor[before]

    def _hold(self, pages: Sequence[int]) -> None:
        self.free_pages -= int((self._holders[pages] == 0).sum())
        self._holders[pages] += 1
        for page in pages:
            self._tree.hold(page)

    def _drop(self, pages: Sequence[int]) -> None:
        """Let a session hold `pages` no longer; the last of them will be evicted first."""
        self._holders[pages] -= 1
        for page in reversed(pages):
            if not self._holders[page]:
                self.free_pages += 1
                self._tree.give_back(page)

    def _evict(self, pages: int) -> None:
        """Have `pages` blank ones, as far as there are free ones."""
        while self.free_pages - self._tree.num_idle < pages and self._tree.num_idle:
            self._tree.evict()

    def _blank(self) -> np.ndarray:
        """Return the free pages [n] that hold nothing."""
        return np.flatnonzero((self._holders == 0) & ~self._tree.cached)

    def slots_of(self, pages: list[int]) -> torch.Tensor:
        """Return [capacity] int64, the slot of each position on `pages`."""
        first = torch.tensor(pages, dtype=torch.int64, device=self._device) * self.page_size
        return (first[:, None] + torch.arange(self.page_size, device=self._device)).flatten()


def _next_to(pages: list[int], more: int, free: np.ndarray) -> list[int]:
    """Return the `more` pages after the last of `pages`, all among `free` [pages] bool; empty: they are not."""
    first = pages[-1] + 1 if pages else len(free)
    following = range(first, first + more)
    return list(following) if following.stop <= len(free) and free[first : following.stop].all() else []


def _amid_longest_run(free: np.ndarray, wanted: int) -> list[int]:
    """Return `wanted` pages of the longest run of `free` [pages] bool; empty: it is shorter."""
    borders = np.flatnonzero(np.diff(free, prepend=False, append=False))
    starts, ends = borders[::2], borders[1::2]
    if not len(starts) or (ends - starts).max() < wanted:
        return []
    longest = int((ends - starts).argmax())
    first, spare = int(starts[longest]), int(ends[longest] - starts[longest]) - wanted
    if first > 0:
        first += spare // 2  # half of the rest is left to the session before it
    return list(range(first, first + wanted))
