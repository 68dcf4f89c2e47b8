"""Attention of many sessions in a few calls, a row's bits kept: keys in chunks of few lengths.

Kernels add in one order for one number of keys, whatever else is in the batch, but in another where keys are more, even
masked ones; so texts of several lengths cannot share a batch as they are. Here keys are cut at the multiples of 256
positions, and the last chunk is filled up to a multiple of 64, with zeros. A block of a session's rows with one chunk
is an entry of a call's batch, and chunks of one length share calls. A row's results over its chunks are weighted by the
sums of their exponentials (FlashAttention, Dao et al. 2022, section 3.1) and added in their order. What a row adds up,
and in which order, follows from its position alone.

Keys and values are gathered first, as many at a time as a core's own cache holds, which costs less than reading them in
place, where those of a head lie apart. Indexes and masks are made once a pass; those that positions do not change are
kept for the next.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from outrider.cloud.attention import CALL_ROWS, RaggedBatch, RowSpan, rounded_up

CHUNK = 256  # positions; shorter ones take more entries, longer ones more memory
ROWS = 64  # positions of a block of rows, which all have as many keys; divides a chunk
_CALL_BYTES = 1 << 20  # keys of a call
_BAND_BYTES = 1 << 24  # keys of the calls whose results are put together at once
_VECTOR = 16  # numbers of 32 bits that a core works on at once
_FEW_ROWS = 32  # up to which blocks share a call with longer ones; from there on with those up to twice as long


class _Heads(NamedTuple):
    """The heads of a layer: `kv` key heads of `size`, each of `group` query heads, which become rows of it."""

    kv: int
    group: int
    size: int

    @property
    def number(self) -> int:
        """Query heads."""
        return self.kv * self.group


class _Block(NamedTuple):
    """Rows first..first + length of the pass, which see `whole` whole chunks and `last` keys of another."""

    first: int
    length: int
    whole: int
    last: int


class _Entries(NamedTuple):
    """The batch of a call: an entry for each of `chunks` (block, chunk), which have `size` keys.

    `queries` [entries * kv_heads * m] int64 are the head and row of each query.
    """

    size: int
    chunks: Sequence[tuple[int, int]]
    queries: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Layout:
    """The shape of a band, which is calls and the rows whose results they make.

    Attributes:
        calls: entries of each call.
        most: rows of the longest block, to which others are filled up.
        padded: query rows of an entry.
        results: [chunks * n] int64, places of each row's and head's results over its chunks.
        missing: [chunks, rows] bool, whether a row has no such chunk.
        blocks: [rows], the block of each row.
        offsets: [rows], how far into its block each row is.
    """

    calls: Sequence[_Entries]
    most: int
    padded: int
    results: torch.Tensor
    missing: np.ndarray
    blocks: np.ndarray
    offsets: np.ndarray


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of one batch.

    Attributes:
        queries: [entries * kv_heads * m] int64, the head and row of each query.
        units: [n] int64, units of the pool that hold the entries' keys.
        gathered: places for keys and values [n, width].
        keys: view of them [entries, kv_heads, size, head_dim].
        values: view of them [entries, kv_heads, size, head_dim].
        mask: [entries, 1, m, size], 0 where a row may look, else -inf.
    """

    queries: torch.Tensor
    units: torch.Tensor
    gathered: tuple[torch.Tensor, torch.Tensor]
    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Band:
    """Calls whose results are put together at once.

    Attributes:
        calls: the calls.
        results: places of the results, as in the layout.
        absent: [chunks, n] float32, -inf where a row sees nothing of a chunk; None: rows have one chunk.
        count: rows * heads; n fills it up to whole vectors, since exponentials round otherwise in a part of one.
    """

    calls: Sequence[_Call]
    results: torch.Tensor
    absent: torch.Tensor | None
    count: int


class _Plan(NamedTuple):
    """The bands of a layer; `order` [rows * heads] int64 puts their results in order; None: they are."""

    bands: Sequence[_Band]
    order: torch.Tensor | None


@dataclass(slots=True)
class ChunkedBatch(RaggedBatch):
    """The rows of each session, which attend in calls that sessions share.

    Attributes:
        chunk: keys of a whole chunk, a multiple of `block`.
    """

    chunk: int = CHUNK
    plans: dict[tuple[_Heads, int], _Plan] = field(default_factory=dict)

    def attend(
        self, layer: int, query: torch.Tensor, kv_heads: int, scaling: float | None, window: int, softcap: float | None
    ) -> torch.Tensor:
        """Let the rows of `query` attend as `RaggedBatch.attend` does."""
        _, num_heads, rows, size = query.shape
        heads = _Heads(kv_heads, num_heads // kv_heads, size)
        plan = self.plans.get((heads, window))
        if plan is None:
            plan = self.plans[heads, window] = self._plan(layer, heads, window, query)
        queries = query[0].reshape(num_heads * rows, size)
        bands = []
        for band in plan.bands:
            seen, sums = [], []
            for call in band.calls:
                self.pool.gather(layer, call.units, call.gathered)
                own = queries.index_select(0, call.queries).view(len(call.keys), kv_heads, -1, size)
                results, logarithms = _attend(own, call.keys, call.values, call.mask, scaling, softcap)
                seen.append(results.reshape(-1, results.shape[-1]))
                sums.append(logarithms.reshape(-1))
            bands.append(_together(_joined(seen), _joined(sums), band))
        together = _joined(bands)
        if plan.order is not None:
            together = together.index_select(0, plan.order)
        return together.view(1, rows, num_heads, -1)

    @property
    def _unit(self) -> int:
        """Positions that are gathered as one."""
        return math.gcd(self.pool.page_size, self.block)

    def _num_held(self, span: RowSpan) -> int:
        return rounded_up(span.context, self._unit)

    def _plan(self, layer: int, heads: _Heads, window: int, query: torch.Tensor) -> _Plan:
        spans = [block for span in self.spans for block in span.blocks(self.block)]
        classes = {id(span): _row_class(heads.group * span.count) for span in spans}
        spans.sort(key=lambda span: classes[id(span)])
        max_keys = _BAND_BYTES // (heads.kv * heads.size * query.element_size())
        bands = []
        for _, alike in itertools.groupby(spans, key=lambda span: classes[id(span)]):
            bands += [self._band(layer, some, heads, window, query) for some in self._cut(list(alike), max_keys)]
        rows = [row for span in spans for row in range(span.first, span.first + span.count)]
        if rows == list(range(len(rows))):
            return _Plan(bands, None)
        order = np.argsort(rows)[:, None] * heads.number + np.arange(heads.number)
        return _Plan(bands, torch.from_numpy(order.ravel()))

    def _cut(self, spans: Sequence[RowSpan], max_keys: int) -> Iterator[Sequence[RowSpan]]:
        """Cut blocks into those that have `max_keys` keys together at most, or one block."""
        first = keys = 0
        for i, span in enumerate(spans):
            more = rounded_up(span.context, self.block)
            if i > first and keys + more > max_keys:
                yield spans[first:i]
                first, keys = i, 0
            keys += more
        yield spans[first:]

    def _band(self, layer: int, spans: Sequence[RowSpan], heads: _Heads, window: int, query: torch.Tensor) -> _Band:
        blocks = []
        for span in spans:
            context = span.start + span.count
            whole = (context - 1) // self.chunk
            blocks.append(_Block(span.first, span.count, whole, rounded_up(context - whole * self.chunk, self.block)))
        max_keys = _CALL_BYTES // (heads.kv * heads.size * query.element_size())
        layout = _layout(tuple(blocks), heads, query.shape[2], self.chunk, max_keys)
        positions = np.array([(span.start, span.count - 1) for span in spans])
        position = positions[:, :1] + np.minimum(np.arange(layout.most), positions[:, 1:])  # [blocks, most]
        calls = []
        for entries in layout.calls:
            units = self._units(spans, entries)
            gathered = self.pool.buffers(layer, len(units), self._unit)
            keys, values = (
                each.view(len(entries.chunks), entries.size, heads.kv, -1).transpose(1, 2) for each in gathered
            )
            mask = self._mask(position, entries, heads, window, layout.padded).to(query.dtype)
            calls.append(_Call(entries.queries, units, gathered, keys, values, mask))
        count = len(layout.blocks) * heads.number
        if len(layout.missing) == 1:
            return _Band(calls, layout.results, None, count)
        absent = layout.missing
        if window:
            ends = np.arange(1, len(absent) + 1)[:, None] * self.chunk
            absent = absent | (ends <= positions[layout.blocks, 0] + layout.offsets - window + 1)
        weights = np.where(absent, -math.inf, 0.0).astype(np.float32).repeat(heads.number, axis=1)
        weights = np.pad(weights, ((0, 0), (0, -count % _VECTOR)))
        return _Band(calls, layout.results, torch.from_numpy(weights), count)

    def _units(self, spans: Sequence[RowSpan], entries: _Entries) -> torch.Tensor:
        """Return the units that hold the keys of each entry, up to its block's last row, and zeros after."""
        unit = self._unit
        of_page, of_entry = self.pool.page_size // unit, entries.size // unit
        units: list[int] = []
        for block, chunk in entries.chunks:
            span = spans[block]
            begin = chunk * self.chunk // unit
            end = min(begin + of_entry, -(-(span.start + span.count) // unit))
            pages = span.cache.pages
            if of_page == 1:
                units += pages[begin:end]
            else:
                units += (pages[i // of_page] * of_page + i % of_page for i in range(begin, end))
            units += [self.pool.blank_page * of_page] * (begin + of_entry - end)
        return torch.from_numpy(np.array(units))

    def _mask(self, position: np.ndarray, entries: _Entries, heads: _Heads, window: int, padded: int) -> torch.Tensor:
        """Return [entries, 1, padded, size] float32: 0 where a row may look, else -inf.

        `position` [blocks, most] is that of each row of a block.
        """
        block, chunk = np.array(entries.chunks).T
        row = position[block, :, None]
        key = chunk[:, None, None] * self.chunk + np.arange(entries.size)
        hidden = key > row
        if window:
            hidden |= key <= row - window
        most = position.shape[1]
        mask = np.zeros((len(block), 1, padded, entries.size), dtype=np.float32)
        for head in range(heads.group):
            mask[:, 0, head * most : (head + 1) * most][hidden] = -math.inf
        return torch.from_numpy(mask)


@lru_cache(maxsize=64)
def _layout(blocks: tuple[_Block, ...], heads: _Heads, rows: int, chunk: int, max_keys: int) -> _Layout:
    """Return the shape of a band of a pass of `rows` rows, with `max_keys` keys in a call at most."""
    counts, firsts = np.array([(block.length, block.first) for block in blocks]).T
    most = int(counts.max())
    used = heads.group * most
    padded = rounded_up(used, CALL_ROWS)
    row = firsts[:, None] + np.minimum(np.arange(most), counts[:, None] - 1)  # [blocks, most], the last one repeated
    queries = np.zeros((len(blocks), heads.kv, padded), dtype=np.int64)
    head = np.arange(heads.number).reshape(heads.kv, heads.group, 1) * rows
    queries[:, :, :used] = (head + row[:, None, None]).reshape(len(blocks), heads.kv, used)

    by_size: dict[int, list[tuple[int, int]]] = {}
    for i, block in enumerate(blocks):
        for k in range(block.whole):
            by_size.setdefault(chunk, []).append((i, k))
        by_size.setdefault(block.last, []).append((i, block.whole))
    calls: list[_Entries] = []
    places = np.zeros((1 + max(block.whole for block in blocks), len(blocks)), dtype=np.int64)
    for size, entries in sorted(by_size.items()):
        for first in range(0, len(entries), max(1, max_keys // size)):
            some = entries[first : first + max(1, max_keys // size)]
            at = sum(len(call.chunks) for call in calls)
            for i, (of, k) in enumerate(some):
                places[k, of] = (at + i) * heads.kv * padded
            calls.append(_Entries(size, some, torch.from_numpy(queries[[of for of, _ in some]].ravel())))

    of_row = np.repeat(np.arange(len(blocks)), counts)
    offsets = np.arange(len(of_row)) - (np.cumsum(counts) - counts)[of_row]
    whole = np.array([block.whole for block in blocks])
    missing = np.arange(len(places))[:, None] > whole[of_row]
    of_head = np.arange(heads.kv)[:, None] * padded + np.arange(heads.group) * most
    results = ((places[:, of_row] + offsets)[:, :, None, None] + of_head).reshape(len(places), -1)
    if len(places) > 1:
        results = np.pad(results, ((0, 0), (0, -results.shape[1] % _VECTOR)))
    return _Layout(calls, most, padded, torch.from_numpy(results.ravel()), missing, of_row, offsets)


def _row_class(rows: int) -> int:
    """Return a number that blocks of `rows` rows share with those which attend in the same calls."""
    return max(_FEW_ROWS, 1 << (rows - 1).bit_length())


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _together(seen: torch.Tensor, sums: torch.Tensor, band: _Band) -> torch.Tensor:
    """Return [rows * heads, head_dim] of the entries' results and the logarithms of their sums."""
    results = seen.index_select(0, band.results)
    if band.absent is None:
        return results
    weights = torch.softmax(sums.index_select(0, band.results).view_as(band.absent) + band.absent, dim=0)
    weighted = results.view(*weights.shape, -1)[:, : band.count] * weights[:, : band.count, None]
    total = weighted[0]
    for each in weighted[1:]:  # one by one: where a chunk is absent, nothing else changes
        total = total + each
    return total.to(seen.dtype)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend in a batch: query [b, kv_heads, n, d], keys and values [b, kv_heads, chunk, d].

    Returns:
        Results in the shape of `query`, and the logarithm of the sum of each row's exponentials [b, kv_heads, n]. Where
        a row sees no key, its result is zero, and the logarithm has no meaning.
    """
    if softcap is None and query.shape[-1] == values.shape[-1]:
        seen, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, attn_mask=mask, scale=scaling
        )
        return seen, sums
    scores = (query @ keys.transpose(2, 3)).float() * (scaling if scaling is not None else query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + mask
    highest = scores.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    exponentials = torch.exp(scores - highest)
    total = exponentials.sum(dim=-1, keepdim=True)
    shares = exponentials / total.clamp(min=torch.finfo(scores.dtype).tiny)
    return shares.to(query.dtype) @ values, (highest + torch.log(total))[..., 0]
