"""The paged KV cache: keys and values of all sessions in one pool, shared where their texts begin alike.

A full page is known by its text from when it is computed for good. It stays when no session holds it any more, until
its room is needed: such pages count as free, and the least recently used goes first. Sessions find each other's pages
only within one isolation. Nobody writes to positions that another session holds, or that a page's text is known for.
"""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from outrider.cloud.target.backend import Capacity
from outrider.cloud.target.prefix_tree import CachedPage, PrefixTree
from outrider.cloud.target.session_states import BORDER, SessionStates

MAX_STATES = 32  # borders of texts at which states are kept


@dataclass(slots=True, eq=False)
class SessionCache:
    """One session's share of the pool.

    Attributes:
        slots: [capacity] int64, the pool slot of each position.
        isolation: only sessions of the same one share pages.
        tokens: [length] tokens whose keys and values the positions hold.
        pages: the pages that it holds, in order of position.
        known: first full pages of its text as others find them, which may be copies elsewhere.
        copied: page from which the end of what it found was copied; None: from none.
        trusted: whether others may use what it has computed.
        states: what it keeps of layers whose state cannot be cut back.
    """

    page_size: int
    slots: torch.Tensor
    isolation: str = ""
    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    known: list[CachedPage] = field(default_factory=list)
    copied: CachedPage | None = None
    trusted: bool = True
    states: SessionStates = field(default_factory=SessionStates)
    first_slot: int = 0
    contiguous: bool = True

    @property
    def length(self) -> int:
        """Positions that hold valid keys and values."""
        return len(self.tokens)

    @property
    def num_pages(self) -> int:
        return len(self.pages)

    @property
    def capacity(self) -> int:
        return len(self.slots)

    def lie_on(self, pages: list[int], slots: torch.Tensor) -> None:
        """Hold `pages` with their `slots`; the caller moves the keys and values of filled positions there."""
        self.pages, self.slots = pages, slots
        self.first_slot = pages[0] * self.page_size if pages else 0
        self.contiguous = all(after == before + 1 for before, after in itertools.pairwise(pages))

    def extend(self, tokens: Iterable[int]) -> None:
        """Note that the next positions hold the keys and values of `tokens`."""
        self.tokens += tokens

    def truncate(self, length: int) -> None:
        """Forget all positions from `length` on; what is forgotten is overwritten later, never read.

        Where a state lies beyond `length`, nothing is left.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate {self.length} positions to {length}")
        if not length or length < self.states.border:
            length, self.states = 0, type(self.states)()
        del self.tokens[length:]
        del self.known[length // self.page_size :]


@dataclass(slots=True, eq=False)
class BranchCache(SessionCache):
    """The KV cache of a branch: drafts that a step verifies beside a session's block, from position `base` on.

    To attention a branch is a session like any other, with a text that begins as the session's: its keys lie in order
    of their positions, so a row has the bits that it would have in a chain, and branches see nothing of each other.
    Only the page where it leaves the session's text is a copy, made in each layer once the rows before it are written.
    What it has on lent pages of its own ends with the step, or is copied to the session that follows it.

    Attributes:
        session: the session.
        base: position of the first of `tokens`, which are its own.
        borrowed: [n] int64, the session's slots of the n positions before `base` that it has copies of.
    """

    session: SessionCache = field(kw_only=True)
    base: int = 0
    borrowed: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    @classmethod
    def beside(
        cls, pool: PagedKVCache, cache: SessionCache, base: int, count: int, lent: list[int]
    ) -> BranchCache | None:
        """Return a branch of `count` positions beside `cache`, on pages that it takes from `lent`; None: too few.

        It is valid until the session's pages change.
        """
        shared = base // pool.page_size
        wanted = pool.pages_for(base + count) - shared
        if wanted > len(lent):
            return None
        own, lent[:] = lent[:wanted], lent[wanted:]
        begins = shared * pool.page_size
        branch = cls(pool.page_size, torch.cat([cache.slots[:begins], pool.slots_of(own)]), session=cache, base=base)
        branch.pages, branch.contiguous = [*cache.pages[:shared], *own], False
        branch.borrowed = cache.slots[begins:base]
        return branch

    @property
    def length(self) -> int:
        """Positions that hold valid keys and values."""
        return self.base + len(self.tokens)

    @property
    def begins(self) -> int:
        """Positions of the session's pages that it lies on, too."""
        return self.base - len(self.borrowed)

    @property
    def copies(self) -> torch.Tensor:
        """[n] int64, its slots of what it has copies of."""
        return self.slots[self.begins : self.base]

    def replace_end(self, pool: PagedKVCache, cache: SessionCache) -> None:
        """Let the session go on with what the branch holds, in place of its own positions from there on."""
        cache.truncate(self.base)
        pool.begin_write(cache, len(self.tokens))
        own = slice(self.base, self.length)
        for layer in pool.layers:
            pool.copy(layer, self.slots[own], cache.slots[own])
        cache.extend(self.tokens)
        cache.states.follow(self.states, self.base)


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros; on a CPU they take memory, and the time to clear it, only where they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)  # torch.zeros would write all of it
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class PagedKVCache:
    """Keys and values of all sessions, [slots, kv_heads, head_dim] each in every layer, in pages.

    A session's pages lie side by side where the pool allows it, so that reading them is a view instead of a gather: new
    ones begin amid the longest run of free pages, to grow there, and where a session cannot grow it is moved. Cached
    pages that lie in its way change places with it.

    Attributes:
        free_pages: pages that no session holds, cached ones included.
        blank_page: page of zeros that no session ever holds.
    """

    def __init__(
        self,
        tokens: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        new_states: Callable[[], SessionStates] | None = None,
    ) -> None:
        """Hold `tokens` positions; `new_states` makes what a session keeps besides; None: it keeps nothing."""
        self.page_size = page_size
        self.page_count = self.free_pages = self.blank_page = tokens // page_size
        self._dtype = dtype
        self._device = device
        self._held: dict[int, list[torch.Tensor]] = {}  # keys, and values, by layer, made at its first write
        self._buffers: list[torch.Tensor | None] = [None, None]
        self._holders = np.zeros(self.page_count, dtype=np.int32)
        self._tree = PrefixTree(self.page_count)
        self.new_states = new_states

    @property
    def capacity(self) -> Capacity:
        """Its size, and how much of it is free, cached pages included."""
        return Capacity(self.page_size, self.page_count, self.free_pages)

    def pages_for(self, tokens: int) -> int:
        return math.ceil(tokens / self.page_size)

    # --- keys and values ---

    @property
    def layers(self) -> Collection[int]:
        """Layers that have been written to."""
        return self._held.keys()

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None) -> None:
        """Put `keys` and `values` [rows, kv_heads, head_dim] at `slots` [rows]; None: the keys are the values too."""
        given = [keys] if values is None else [keys, values]
        if layer not in self._held:
            slot_count = (self.page_count + 1) * self.page_size  # the last page is the blank one
            self._held[layer] = [_zeros((slot_count, *each.shape[1:]), self._dtype, self._device) for each in given]
        for held, each in zip(self._held[layer], given, strict=True):
            held.index_copy_(0, slots, each.to(self._dtype))

    def clear(self, layer: int, slots: torch.Tensor) -> None:
        """Put zeros at `slots` [n] of a layer that has been written to."""
        for held in self._held[layer]:
            held.index_fill_(0, slots, 0.0)

    def copy(self, layer: int, before: torch.Tensor, after: torch.Tensor) -> None:
        """Copy what a layer holds at the slots `before` [n] to the slots `after` [n]."""
        for held in self._held[layer]:
            held.index_copy_(0, after, held.index_select(0, before))

    def read(self, layer: int, cache: SessionCache, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [length, kv_heads, head_dim] of a session's first positions, a view if possible."""
        if cache.contiguous:
            here = slice(cache.first_slot, cache.first_slot + length)
            found = [held[here] for held in self._held[layer]]
        else:
            found = [held.index_select(0, cache.slots[:length]) for held in self._held[layer]]
        return found[0], found[-1]

    def buffers(self, layer: int, count: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return buffers for the keys and values of `count` units of `size` slots of a layer, [count, width] each.

        All share one memory, which is kept: new memory costs more than what it is for.
        """
        buffers = []
        for kind, of_layer in enumerate(self._held[layer]):
            width = size * of_layer[0].numel()
            memory = self._buffers[kind]
            if memory is None or len(memory) < count * width:
                memory = self._buffers[kind] = of_layer.new_empty(count * width)
            buffers.append(memory[: count * width].view(count, width))
        return buffers[0], buffers[-1]

    def gather(self, layer: int, units: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Copy keys and values of `units` [n] int64 to `out`, which `buffers` has returned for units of their size.

        Unit u is the slots u * size and following; the size divides the page size.
        """
        for source, buffer in zip(self._held[layer], out, strict=False):  # keys that are the values too once
            torch.index_select(source.view(-1, buffer.shape[1]), 0, units, out=buffer)

    # --- sessions ---

    def open(self, tokens: Sequence[int] = (), isolation: str = "") -> SessionCache:
        """Return the share of a new session, which holds as many of the first `tokens` [n] as the pool has."""
        cache = SessionCache(self.page_size, self.slots_of([]), isolation)
        cache.known = self._tree.find(isolation, tokens, self.page_size)
        if self.new_states is not None:
            cache.states = self.new_states()
            self._go_on_from_states(cache)
            tokens = tokens[: len(cache.known) * self.page_size]
        full = len(cache.known) * self.page_size
        rest = tokens[full : full + self.page_size]
        end, common = self._tree.closest(isolation, cache.known[-1] if cache.known else None, rest)
        pages = [each.page for each in cache.known]
        if end is not None and common == len(end.tokens) and not self._holders[end.page]:
            pages, full, end = [*pages, end.page], full + common, None  # goes on where that text ends
        slots = self.slots_of(pages)  # first, since a device may fail
        self._hold(pages)
        cache.lie_on(pages, slots)
        cache.extend(tokens[:full])
        if end is not None and self._append_copy(cache, end.page, rest[:common]):
            cache.copied = end
        return cache

    def allocate(self, tokens: int) -> SessionCache:
        """Return the share of a new session with room for `tokens` positions; raises like `resize`."""
        cache = self.open()
        self.resize(cache, tokens)
        return cache

    def resize(self, cache: SessionCache, tokens: int) -> None:
        """Reserve room for `tokens` positions, no fewer than hold something; ResourceExhausted: the old room stays."""
        if tokens < cache.length:
            raise ValueError(f"cannot hold {cache.length} positions in {tokens}")
        wanted = max(1, self.pages_for(tokens))
        more = wanted - len(cache.pages)
        if more <= 0:
            gone = cache.pages[wanted:]
            cache.lie_on(cache.pages[:wanted], cache.slots[: wanted * self.page_size])
            self._drop(gone)
            return
        self.capacity.check_room(tokens, more)
        self._move_to(cache, self._pages_with(cache, more))

    def release(self, cache: SessionCache) -> None:
        """Give a session's pages back, also on a device that has failed: no tensor is made.

        Its text stays cached, its end included.
        """
        if states := cache.states.states():
            cache.states.kept[cache.states.border] = states
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
        self._keep_states(cache)

    def distrust(self, cache: SessionCache) -> None:
        """Let nobody find what a session holds, since it may be wrong."""
        cache.trusted = False
        for each in [*cache.known, cache.copied, *map(self._tree.of_page, cache.pages)]:
            self._tree.remove(each)

    def begin_write(self, cache: SessionCache, count: int) -> None:
        """Let a session write its next `count` positions; ResourceExhausted: none is free to copy a shared page to."""
        first = cache.length // self.page_size
        touched = range(first, self.pages_for(cache.length + count))
        if shared := [i for i in touched if self._holders[cache.pages[i]] > 1]:
            self.capacity.check_room(cache.length + count, len(shared))
            self._evict(len(shared))
            pages = list(cache.pages)
            for i, page in zip(shared, self._blank(), strict=False):
                pages[i] = int(page)
            self._move_to(cache, pages)
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

    # --- states ---

    def _go_on_from_states(self, cache: SessionCache) -> None:
        """Have a new session begin at the last of its known pages that has states.

        Where others have read on from there, the texts part, and more may come that begin alike.
        """
        parted = len(cache.known) * self.page_size
        states = None
        while cache.known and (states := self._tree.states(cache.known[-1])) is None:
            cache.known.pop()
        begins = len(cache.known) * self.page_size
        if states is not None:
            cache.states = SessionStates.at(begins, states)
        if parted - parted % BORDER > begins:
            cache.states.wanted.add(parted - parted % BORDER)

    def _keep_states(self, cache: SessionCache) -> None:
        """Keep those states of a session that others may want, and that all layers have come to."""
        kept, cache.states.kept = cache.states.kept, {}
        for border, states in kept.items():
            whole = states.keys() == cache.states.tails.keys()
            if whole and border % self.page_size == 0 and border <= len(cache.known) * self.page_size:
                self._tree.keep_states(cache.known[border // self.page_size - 1], states, MAX_STATES)

    # --- pages ---

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

    def _pages_with(self, cache: SessionCache, more: int) -> list[int]:
        """Return pages for a session that gets `more`: its own and those next to them, or a free run for them all."""
        free = self._holders == 0
        following = _next_to(cache.pages, more, free)
        if following and cache.contiguous:
            return [*cache.pages, *following]
        wanted = len(cache.pages) + more
        run = _amid_longest_run(free & ~self._tree.cached, wanted) or _amid_longest_run(free, wanted)
        shared = int((self._holders[cache.pages] > 1).sum())
        blank = self.free_pages - self._tree.num_idle
        if run and (not shared or blank - (more + shared) >= self.page_count // 2):
            return run  # copies of shared pages must leave half of the pool blank
        if not following:
            self._evict(more)
            following = self._blank()[:more].tolist()
        return [*cache.pages, *following]

    def _move_to(self, cache: SessionCache, pages: list[int]) -> None:
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
        except Exception:  # some of it may have been copied over
            for each in map(self._tree.of_page, [*displaced, *vacated]):
                self._tree.remove(each)
            cache.truncate(0)
            raise
        texts = {before: after for before, after in moves.items() if self._holders[before] == 1}
        self._tree.move(texts | dict(zip(displaced, room, strict=False)))
        self._hold(new)
        cache.lie_on(pages, slots)
        self._drop(left)

    @torch.inference_mode()  # the layers are made in it, and may change in no other
    def _copy(self, moves: dict[int, int]) -> None:
        if not moves:
            return
        before, after = self.slots_of(list(moves)), self.slots_of(list(moves.values()))
        for tensor in itertools.chain(*self._held.values()):
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
