"""Attention of a ragged batch over the paged KV cache, for any decoder-only architecture of transformers.

The rows of all sessions are one sequence to the model, [1, rows]; their positions are explicit, and the only place
where rows meet is attention. So only one attention function, registered under a name of its own, knows about sessions:
it stores the new keys and values and lets the rows of each session see the positions of that session alone.

A row's result keeps its bits whatever shares its step, and however its text is cut into steps, if kernels of alike
shapes add in one order. So the number of keys follows from a row's position alone: rows attend in blocks of 16
positions, over all keys up to the end of their block, those after each row masked. Only the number of rows in a call
varies, in multiples of four, since kernels for one to three rows often add otherwise. `Target.keeps_bits` tries at load
whether this machine's kernels do so. `chunked_attention` takes fewer calls for it, on a CPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from outrider.cloud.target.kv_cache import BranchCache, PagedKVCache, SessionCache
from outrider.cloud.target.latent_attention import OURS, Latents
from outrider.proto.errors import ModelRefused

NAME = f"{OURS}paged"
BLOCK = 16  # positions; small, since a row attends to all keys of its block
CALL_ROWS = 4


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Consecutive rows of one session: rows[first : first + count] stand at positions start.. of `cache`."""

    cache: SessionCache
    first: int
    count: int
    start: int

    @property
    def context(self) -> int:
        """Positions that the last row sees."""
        return self.start + self.count

    @property
    def num_keys(self) -> int:
        """Positions up to the end of the last row's block."""
        return rounded_up(self.context, BLOCK)

    def blocks(self, size: int) -> Iterator[RowSpan]:
        """Cut at the multiples of `size` positions."""
        if self.start // size == (self.context - 1) // size:
            yield self
            return
        cuts = [self.start, *range(rounded_up(self.start + 1, size), self.context, size), self.context]
        for start, end in itertools.pairwise(cuts):
            yield RowSpan(self.cache, self.first + start - self.start, end - start, start)


@dataclass(slots=True)
class RaggedBatch:
    """The rows of each session.

    Attributes:
        pool: pages of all sessions.
        spans: rows of each session, in order; rows of a pass after the last span fill it up, and attend to nothing.
        slots: [rows of all spans] int64, slots in the pool of the keys and values of each row.
        block: most positions of a session whose rows attend in one call.
        rest: [n] int64, slots after each session's last row that are read with it, which must hold numbers.
        borrowed: [n] int64, slots of what branches that begin here have copies of; None: there are none.
        copies: [n] int64, slots of these copies.
    """

    pool: PagedKVCache
    spans: Sequence[RowSpan]
    slots: torch.Tensor
    block: int = BLOCK
    rest: torch.Tensor = field(init=False)
    borrowed: torch.Tensor | None = field(default=None, init=False)
    copies: torch.Tensor | None = field(default=None, init=False)
    masks: dict[tuple[int, int, int, int], torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        last = {id(span.cache): span for span in sorted(self.spans, key=lambda span: span.context)}
        self.rest = torch.cat([span.cache.slots[span.context : self._num_held(span)] for span in last.values()])
        caches = {id(span.cache): span.cache for span in self.spans if span.start == span.cache.length}
        began = [cache for cache in caches.values() if isinstance(cache, BranchCache)]
        if began:
            self.borrowed = torch.cat([branch.borrowed for branch in began])
            self.copies = torch.cat([branch.copies for branch in began])

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor | None) -> None:
        """Store `keys` and `values` [rows, kv_heads, head_dim] of the spans, what branches copy, and zeros after them.

        Without values, the keys are the values too. Masked keys count for nothing, but what a page's last owner has
        left there may be no number.
        """
        rows = len(self.slots)
        self.pool.write(layer, self.slots, keys[:rows], None if values is None else values[:rows])
        if self.borrowed is not None and self.copies is not None:
            self.pool.copy(layer, self.borrowed, self.copies)
        if len(self.rest):
            self.pool.clear(layer, self.rest)

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
        """Let the rows of `query` [1, heads, rows, head_dim] attend to what is written, each session in its own calls.

        Scores are multiplied by `scaling` (None: 1 / sqrt(head_dim)), and bounded by tanh at `softcap` (Gemma 2; None:
        they are not). A row sees `window` positions, itself included; 0: all. `sinks` [heads] are the scores of a key
        without a value that each row sees besides (GPT-OSS; None: there is none).

        Returns:
            [1, rows of all spans, heads, head_dim].
        """
        group = query.shape[1] // kv_heads  # its heads become rows of their key head
        attended = []
        for span in self.spans:
            keys, values = (each.transpose(0, 1)[None] for each in self.read(layer, span))
            for block in span.blocks(self.block):
                rows = query[0, :, block.first : block.first + block.count].reshape(
                    1, kv_heads, group * block.count, -1
                )
                seen = _attend(
                    _filled(rows),
                    keys[:, :, : block.num_keys],
                    values[:, :, : block.num_keys],
                    self.mask(block, window, group, query.dtype),
                    scaling,
                    softcap,
                    None if sinks is None else _filled(_of_rows(sinks, kv_heads, block.count)).to(query.dtype),
                )
                attended.append(seen[:, :, : group * block.count].reshape(1, kv_heads * group, block.count, -1))
        return joined(attended, dim=2).transpose(1, 2)

    def read(self, layer: int, span: RowSpan) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [num_keys, kv_heads, head_dim]; beyond the last row's page they are zeros."""
        held = self._num_held(span)
        keys, values = self.pool.read(layer, span.cache, held)
        missing = (0, 0, 0, 0, 0, span.num_keys - held)
        return (functional.pad(keys, missing), functional.pad(values, missing)) if missing[-1] else (keys, values)

    def mask(self, span: RowSpan, window: int, copies: int, dtype: torch.dtype) -> torch.Tensor:
        """Return [copies * count, num_keys] to add to scores, with rows of zeros up to the next multiple of four.

        It is 0 where a row may look, else -inf. All layers of a kind share one mask, which is made once.
        """
        key = (span.start, span.count, window, copies)
        if key not in self.masks:
            device, seen_by_all = self.slots.device, span.start - span.start % BLOCK
            mask = torch.zeros(rounded_up(copies * span.count, CALL_ROWS), span.num_keys, dtype=dtype, device=device)
            rows = mask[: copies * span.count].view(copies, span.count, span.num_keys)
            row = torch.arange(span.start, span.context, device=device)[:, None]
            column = torch.arange(seen_by_all, span.num_keys, device=device)
            rows[:, :, seen_by_all:].masked_fill_(column > row, float("-inf"))
            if window and window < span.context:
                column = torch.arange(span.context, device=device)
                rows[:, :, : span.context].masked_fill_(column <= row - window, float("-inf"))
            self.masks[key] = mask
        return self.masks[key]

    def _num_held(self, span: RowSpan) -> int:
        """Return the positions up to the end of the last row's block, or of its page if that comes first."""
        return min(span.num_keys, rounded_up(span.context, self.pool.page_size))


def rounded_up(number: int, multiple: int) -> int:
    """Return the least multiple of `multiple` from `number` on."""
    return -(-number // multiple) * multiple


def joined(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Return `tensors`, one after the other along a dimension; one alone is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim=dim)


def _filled(rows: torch.Tensor) -> torch.Tensor:
    """Append rows of zeros to [..., n, d] up to a multiple of what a call takes."""
    missing = -rows.shape[-2] % CALL_ROWS
    return functional.pad(rows, (0, 0, 0, missing)) if missing else rows


def _of_rows(sinks: torch.Tensor, kv_heads: int, count: int) -> torch.Tensor:
    """Return [1, kv_heads, heads of each * count, 1]: of each of `count` rows of each head of `sinks` [heads], its."""
    return sinks.repeat_interleave(count).view(1, kv_heads, -1, 1)


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - transformers' signature; spans say who sees whom
    scaling: float | None = None,
    dropout: float = 0.0,  # noqa: ARG001 - transformers' signature; targets never train here
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    outrider_batch: RaggedBatch | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend, by transformers' interface of attention functions, with the settings of `RaggedBatch.attend`.

    `query` is [1, heads, rows, head_dim], and `key` and `value` are [1, kv_heads, rows, head_dim], positions already
    applied, or what `Latents` hands on. `module.layer_idx` names their layer, `outrider_batch` the sessions that the
    rows belong to. Arguments for other attention functions are refused where they would change the result.

    Returns:
        [1, rows, heads, head_dim], and None in place of the attention weights.
    """
    if outrider_batch is None:
        raise ModelRefused("this architecture does not hand keywords to its attention", field="target")
    if kwargs.get("indices") is not None:
        raise ModelRefused("attention to chosen positions is not supported", field="target")
    batch, layer, latents = outrider_batch, module.layer_idx, Latents.of(module)
    if latents is None:
        batch.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    else:
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        query, key = latents.absorbed(query), torch.cat([key, value], dim=-1)
        batch.write(layer, key[0].transpose(0, 1), None)
    attended = batch.attend(layer, query, key.shape[1], scaling, sliding_window or 0, softcap, s_aux)
    missing = query.shape[2] - attended.shape[1]
    attended = functional.pad(attended, (0, 0, 0, 0, 0, missing)) if missing else attended
    return (attended if latents is None else latents.values(attended)).contiguous(), None


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend for one session: query [1, kv_heads, n, d], keys and values [1, kv_heads, keys, d or another for values].

    The n rows are those of the heads of a key head, one head after the other, and as many as fill them up.
    """
    if softcap is None and sinks is None:
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
    scores = query @ keys.transpose(2, 3) * (scaling if scaling is not None else query.shape[-1] ** -0.5)
    scores = (scores if softcap is None else softcap * torch.tanh(scores / softcap)) + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks], dim=-1)
        return torch.softmax(scores, dim=-1, dtype=torch.float32)[..., :-1].to(query.dtype) @ values
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype) @ values
