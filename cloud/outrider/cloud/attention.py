"""Attention of a ragged batch over the paged KV cache, for any decoder-only architecture of transformers.

The rows of all sessions are one sequence to the model, [1, rows]; their positions are explicit, and the only place
where rows meet is attention. So only one attention function, registered under a name of its own, knows about sessions:
it stores the new keys and values and lets the rows of each session see the positions of that session alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from outrider.cloud.kv_cache import PagedKVCache, SessionCache
from outrider.proto.errors import ModelRefused

NAME = "outrider_paged"
# Up to this many rows, the query heads of a group become rows of their key head, so that keys and values are read once
# for the group. With more rows the masks would be large, and the matrix products would hide what it saves.
_FEW_ROWS = 32


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


@dataclass(slots=True)
class RaggedBatch:
    """The rows of each session; `slots` [rows] int64 says where the keys and values of each row go."""

    pool: PagedKVCache
    spans: list[RowSpan]
    slots: torch.Tensor
    masks: dict[tuple[int, int, int, int], torch.Tensor | None] = field(default_factory=dict)

    def mask(self, span: RowSpan, window: int | None, copies: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return [copies * count, context] to add to scores: 0 where a row may look, else -inf; None: all zeros.

        All layers of a kind share one mask, which is made once.
        """
        key = (span.start, span.count, window or 0, copies)
        if key not in self.masks:
            visible = _mask(span, window, self.slots.device)
            self.masks[key] = visible if visible is None else _additive(visible, copies, dtype)
        return self.masks[key]


def _mask(span: RowSpan, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Return [count, context] bool, True where a row may look; None: everywhere."""
    if span.count == 1 and not (window and window < span.context):
        return None
    row = torch.arange(span.start, span.context, device=device)[:, None]
    column = torch.arange(span.context, device=device)[None, :]
    visible = column <= row
    return visible & (column > row - window) if window else visible


def _additive(visible: torch.Tensor, copies: int, dtype: torch.dtype) -> torch.Tensor:
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, float("-inf")).repeat(copies, 1)


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
    outrider_batch: RaggedBatch | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend, by transformers' interface of attention functions.

    Args:
        module: the attention layer; its `layer_idx` names its share of the cache.
        query: [1, heads, rows, head_dim], positions already applied.
        key: [1, kv_heads, rows, head_dim].
        value: [1, kv_heads, rows, head_dim].
        attention_mask: not used.
        scaling: factor of the scores; None: 1 / sqrt(head_dim).
        dropout: not used.
        sliding_window: positions that a row sees, itself included; None: all.
        softcap: bound of the scores by tanh (Gemma 2); None: none.
        outrider_batch: the sessions that the rows belong to.
        kwargs: arguments for other attention functions; those that would change the result are refused.

    Returns:
        [1, rows, heads, head_dim], and None in place of the attention weights.
    """
    if outrider_batch is None:
        raise ModelRefused("this architecture does not hand keywords to its attention", field="target")
    if kwargs.get("s_aux") is not None:
        raise ModelRefused("attention sinks are not supported", field="target")
    batch = outrider_batch
    batch.pool.write(module.layer_idx, batch.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    attended = []
    for span in batch.spans:
        keys, values = batch.pool.read(module.layer_idx, span.cache, span.context)
        rows = query[:, :, span.first : span.first + span.count]
        heads, kv_heads = query.shape[1], key.shape[1]
        group = heads // kv_heads if span.count <= _FEW_ROWS else 1
        seen = _attend(
            rows.reshape(1, heads // group, group * span.count, -1),
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            batch.mask(span, sliding_window, group, query.dtype),
            scaling,
            softcap,
        )
        attended.append(seen.reshape(1, heads, span.count, -1))
    together = attended[0] if len(attended) == 1 else torch.cat(attended, dim=2)
    return together.transpose(1, 2), None


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attend for one session: query [1, heads, n, d], keys and values [1, kv_heads, context, d] to [1, heads, n, d]."""
    grouped = query.shape[1] != keys.shape[1]
    if softcap is None:
        return functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=scaling, enable_gqa=grouped
        )
    if grouped:
        keys = keys.repeat_interleave(query.shape[1] // keys.shape[1], dim=1)
        values = values.repeat_interleave(query.shape[1] // values.shape[1], dim=1)
    scores = query @ keys.transpose(2, 3) * (scaling if scaling is not None else query.shape[-1] ** -0.5)
    scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype) @ values
