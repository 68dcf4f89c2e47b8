"""Attention of many sessions in a few calls, a row's bits kept: keys in chunks of few lengths.

Kernels add in one order for one number of keys, whatever else is in the batch, but in another where keys are more, even
masked ones; so texts of several lengths cannot share a batch as they are. Here keys are cut at the multiples of 256
positions, and the last chunk is filled up to a multiple of 64, with zeros. A block of a session's rows with one chunk
is an entry of a call's batch, and chunks of one length share calls. Whole chunks before a branch are those of its
session, whose entries take its rows in. A row's results over its chunks are weighted by the
sums of their exponentials (FlashAttention, Dao et al. 2022, section 3.1) and added in their order. What a row adds up,
and in which order, follows from its position alone.

Keys and values are gathered first, as many at a time as a core's own cache holds, which costs less than reading them in
place, where those of a head lie apart. Indexes and masks are made once a pass; those that positions do not change are
kept for the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from outrider.cloud.target.attention import CALL_ROWS, RaggedBatch, RowSpan, joined, rounded_up
from outrider.cloud.target.kv_cache import BranchCache

CHUNK = 256  # positions; shorter ones take more entries, longer ones more memory
ROWS = 64  # positions of a block of rows, which all have as many keys; divides a chunk
_CALL_BYTES = 1 << 20  # keys of a call
_BAND_BYTES = 1 << 24  # keys of the calls whose results are put together at once
_VECTOR = 16  # numbers of 32 bits that a core works on at once
_CALL_WORK = 1 << 12  # query rows * keys * key heads that take as long as a further call


class _Heads(NamedTuple):
    """The heads of a layer: `kv` key heads of `size`, each of `group` query heads, which become rows of it."""

    kv: int
    group: int
    size: int

    @property
    def number(self) -> int:
        """Number of query heads."""
        return self.kv * self.group


class _Block(NamedTuple):
    """Rows first..first + length of the pass, which see `whole` whole chunks and `last` keys of another.

    Their first `shared` chunks are those of every block of the same `session`, which is a number.
    """

    first: int
    length: int
    whole: int
    last: int
    session: int
    shared: int


@dataclass(slots=True)
class _Entry:
    """An entry of a call: `size` keys of chunk `chunk` of the first of `blocks`, and all their `length` rows."""

    chunk: int
    size: int
    blocks: list[int] = field(default_factory=list)
    length: int = 0


class _Entries(NamedTuple):
    """The batch of a call: entries which have `size` keys, each of a block and a chunk in `chunks`.

    Attributes:
        rows: [entries, m] rows of the band that attend, filled up with the last.
        queries: [entries * kv_heads * padded] int64, the head and row of each query.
        padded: query rows of an entry.
    """

    size: int
    chunks: Sequence[tuple[int, int]]
    rows: np.ndarray
    queries: torch.Tensor
    padded: int


@dataclass(frozen=True, slots=True)
class _Layout:
    """The shape of a band, which is calls and the rows whose results they make.

    Attributes:
        calls: entries of each call.
        results: [chunks * n] int64, indices of each row's and head's results over its chunks.
        missing: [chunks, rows] bool, whether a row has no such chunk.
        blocks: [rows], the block of each row.
        offsets: [rows], how far into its block each row is.
    """

    calls: Sequence[_Entries]
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
        gathered: buffers for keys and values [n, width].
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
        results: indices of the results, as in the layout.
        absent: [chunks, n] float32, -inf where a row sees nothing of a chunk; None: rows have one chunk.
        count: rows * heads; n fills it up to whole vectors, since exponentials round otherwise in a part of one.
    """

    calls: Sequence[_Call]
    results: torch.Tensor
    absent: torch.Tensor | None
    count: int


@dataclass(slots=True)
class ChunkedBatch(RaggedBatch):
    """The rows of each session, in calls that sessions share; a chunk is `chunk` keys, a multiple of `block`."""

    chunk: int = CHUNK
    plans: dict[tuple[_Heads, int], Sequence[_Band]] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        kv_heads: int,
        scaling: float | None,
        window: int,
        softcap: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        _, num_heads, rows, size = query.shape
        heads = _Heads(kv_heads, num_heads // kv_heads, size)
        plan = self.plans.get((heads, window))
        if plan is None:
            plan = self.plans[heads, window] = self._plan(layer, heads, window, query)
        queries = query[0].reshape(num_heads * rows, size)
        bands = []
        for band in plan:
            seen, sums = [], []
            for call in band.calls:
                self.pool.gather(layer, call.units, call.gathered)
                own = queries.index_select(0, call.queries).view(len(call.keys), kv_heads, -1, size)
                results, logarithms = _attend(own, call.keys, call.values, call.mask, scaling, softcap)
                seen.append(results.reshape(-1, results.shape[-1]))
                sums.append(logarithms.reshape(-1))
            bands.append(_together(joined(seen), joined(sums), band, sinks))
        return joined(bands).view(1, len(self.slots), num_heads, -1)

    @property
    def _unit(self) -> int:
        """Positions that are gathered as one."""
        return math.gcd(self.pool.page_size, self.block)

    def _num_held(self, span: RowSpan) -> int:
        return rounded_up(span.context, self._unit)

    def _plan(self, layer: int, heads: _Heads, window: int, query: torch.Tensor) -> Sequence[_Band]:
        spans = [block for span in self.spans for block in span.blocks(self.block)]
        max_keys = _BAND_BYTES // (heads.kv * heads.size * query.element_size())
        return [self._band(layer, some, heads, window, query) for some in self._cut(spans, max_keys)]

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
        max_keys = _CALL_BYTES // (heads.kv * heads.size * query.element_size())
        layout = _layout(tuple(self._blocks(spans)), heads, query.shape[2], self.chunk, max_keys)
        position = np.array([span.start for span in spans])[layout.blocks] + layout.offsets
        calls = []
        for entries in layout.calls:
            units = self._units(spans, entries)
            gathered = self.pool.buffers(layer, len(units), self._unit)
            keys, values = (
                each.view(len(entries.chunks), entries.size, heads.kv, -1).transpose(1, 2) for each in gathered
            )
            mask = self._mask(position[entries.rows], entries, heads, window).to(query.dtype)
            calls.append(_Call(entries.queries, units, gathered, keys, values, mask))
        count = len(position) * heads.number
        if len(layout.missing) == 1:
            return _Band(calls, layout.results, None, count)
        absent = layout.missing
        if window:
            ends = np.arange(1, len(absent) + 1)[:, None] * self.chunk
            absent = absent | (ends <= position - window + 1)
        weights = np.where(absent, -math.inf, 0.0).astype(np.float32).repeat(heads.number, axis=1)
        weights = np.pad(weights, ((0, 0), (0, -count % _VECTOR)))
        return _Band(calls, layout.results, torch.from_numpy(weights), count)

    def _blocks(self, spans: Sequence[RowSpan]) -> Iterator[_Block]:
        sessions: dict[int, int] = {}
        for span in spans:
            whole = (span.context - 1) // self.chunk
            last = rounded_up(span.context - whole * self.chunk, self.block)
            cache, session, shared = span.cache, span.cache, whole
            if isinstance(cache, BranchCache):
                session, shared = cache.session, min(whole, cache.begins // self.chunk)
            number = sessions.setdefault(id(session), len(sessions))
            yield _Block(span.first, span.count, whole, last, number, shared)

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

    def _mask(self, position: np.ndarray, entries: _Entries, heads: _Heads, window: int) -> torch.Tensor:
        """Return [entries, 1, padded, size] float32: 0 where a row may look, else -inf.

        `position` [entries, m] is that of each row.
        """
        _, chunk = np.array(entries.chunks).T
        row = position[:, :, None]
        key = chunk[:, None, None] * self.chunk + np.arange(entries.size)
        hidden = key > row
        if window:
            hidden |= key <= row - window
        most = position.shape[1]
        mask = np.zeros((len(chunk), 1, entries.padded, entries.size), dtype=np.float32)
        for head in range(heads.group):
            mask[:, 0, head * most : (head + 1) * most][hidden] = -math.inf
        return torch.from_numpy(mask)


@lru_cache(maxsize=64)
def _layout(blocks: tuple[_Block, ...], heads: _Heads, rows: int, chunk: int, max_keys: int) -> _Layout:
    """Return the shape of a band of a pass of `rows` rows, with `max_keys` keys in a call at most."""
    lengths, firsts, whole = np.array([(block.length, block.first, block.whole) for block in blocks]).T
    begins = np.cumsum(lengths) - lengths
    of_row = np.repeat(np.arange(len(blocks)), lengths)
    offsets = np.arange(len(of_row)) - begins[of_row]
    of_pass = firsts[of_row] + offsets
    head = np.arange(heads.number).reshape(heads.kv, heads.group, 1) * rows
    calls: list[_Entries] = []
    # Of each chunk and row: the index of its first head's result, and how far those of its key heads and heads lie.
    starts, far, near = np.zeros((3, 1 + whole.max(), len(of_row)), dtype=np.int64)
    at = 0
    for size, entries in _cut_into_calls(_entries(blocks, chunk), heads, max_keys):
        own = np.concatenate([np.arange(begins[i], begins[i] + lengths[i]) for entry in entries for i in entry.blocks])
        counts = np.array([entry.length for entry in entries])
        first, most = np.cumsum(counts) - counts, int(counts.max())
        used = heads.group * most
        padded = rounded_up(used, CALL_ROWS)
        attending = own[first[:, None] + np.minimum(np.arange(most), counts[:, None] - 1)]  # [entries, most]
        queries = np.zeros((len(entries), heads.kv, padded), dtype=np.int64)
        queries[:, :, :used] = (head + of_pass[attending][:, None, None]).reshape(len(entries), heads.kv, used)
        number = np.repeat(np.arange(len(entries)), counts)
        here = np.repeat([entry.chunk for entry in entries], counts), own
        starts[here] = at + number * heads.kv * padded + np.arange(len(own)) - first[number]
        far[here], near[here] = padded, most
        at += queries.size
        of = [(entry.blocks[0], entry.chunk) for entry in entries]
        calls.append(_Entries(size, of, attending, torch.from_numpy(queries.ravel()), padded))

    missing = np.arange(len(starts))[:, None] > whole[of_row]
    of_head = np.arange(heads.kv)[:, None] * far[..., None, None] + np.arange(heads.group) * near[..., None, None]
    results = (starts[..., None, None] + of_head).reshape(len(starts), -1)
    if len(starts) > 1:
        results = np.pad(results, ((0, 0), (0, -results.shape[1] % _VECTOR)))
    return _Layout(calls, torch.from_numpy(results.ravel()), missing, of_row, offsets)


def _entries(blocks: Sequence[_Block], chunk: int) -> list[_Entry]:
    """Return the entries of all blocks and chunks; blocks of a session attend to what they share in one, if few."""
    entries: list[_Entry] = []
    shared: dict[tuple[int, int], _Entry] = {}
    for number, block in enumerate(blocks):
        for k in range(block.whole + 1):
            entry = shared.get((block.session, k)) if k < block.shared else None
            if entry is None or entry.length + block.length > ROWS:
                entry = _Entry(k, chunk if k < block.whole else block.last)
                entries.append(entry)
                if k < block.shared:
                    shared[block.session, k] = entry
            entry.blocks.append(number)
            entry.length += block.length
    return entries


def _cut_into_calls(entries: Sequence[_Entry], heads: _Heads, max_keys: int) -> Iterator[tuple[int, Sequence[_Entry]]]:
    """Yield the keys of an entry and the entries of each call, which are filled up to the rows of the longest."""
    of_size: dict[int, list[_Entry]] = {}
    for entry in sorted(entries, key=lambda entry: -entry.length):
        of_size.setdefault(entry.size, []).append(entry)
    for size in sorted(of_size):
        alike, most, worth = of_size[size], max(1, max_keys // size), _CALL_WORK // (size * heads.kv)
        padded = [rounded_up(heads.group * entry.length, CALL_ROWS) for entry in alike]
        first = 0
        for i in range(1, len(alike) + 1):
            shorter = i < len(alike) and (padded[first] - padded[i]) * (len(alike) - i) > worth
            if i == len(alike) or i - first == most or shorter:
                yield size, alike[first:i]
                first = i


def _together(seen: torch.Tensor, sums: torch.Tensor, band: _Band, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Return [rows * heads, head_dim] of the entries' results and the logarithms of their sums.

    `sinks` [heads] are the logarithms of what each head adds to the sums.
    """
    results = seen.index_select(0, band.results)
    if band.absent is None and sinks is None:
        return results
    logarithms = sums.index_select(0, band.results)
    if band.absent is not None:
        logarithms = logarithms.view_as(band.absent) + band.absent
    else:
        logarithms = functional.pad(logarithms, (0, -band.count % _VECTOR))[None]
        results = functional.pad(results, (0, 0, 0, -band.count % _VECTOR))
    chunks = len(logarithms)
    if sinks is not None:
        of_rows = sinks.float().repeat(-(-logarithms.shape[1] // len(sinks)))[None, : logarithms.shape[1]]
        logarithms = torch.cat([logarithms, of_rows])
    weights = torch.softmax(logarithms, dim=0)[:chunks]
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
