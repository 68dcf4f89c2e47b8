"""A target whose logits are a table over texts, and which reads each text back from the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from outrider.cloud.target.attention import RaggedBatch, RowSpan
from outrider.cloud.target.backend import TargetFacts
from outrider.cloud.target.kv_cache import PagedKVCache
from outrider.cloud.target.target import SessionRows
from outrider.cloud.target.transformers_backend import TransformersBackend

CPU = torch.device("cpu")
HASH = "0" * 64
Table = Callable[[tuple[int, ...]], Sequence[float]]


class TableTarget:
    """A target of one layer, whose keys are tokens: a wrong slot, page or position shows as another text."""

    device = CPU

    def __init__(self, logits_after: Table) -> None:
        self.pool = PagedKVCache(1 << 15, 4, torch.float32, CPU)
        self._logits_after = logits_after

    def forward(self, batch: list[SessionRows]) -> torch.Tensor:
        spans, first = [], 0
        for rows in batch:
            self.pool.begin_write(rows.cache, len(rows.tokens))
            spans.append(RowSpan(rows.cache, first, len(rows.tokens), rows.cache.length))
            first += len(rows.tokens)
        slots = torch.cat([span.cache.slots[span.start : span.context] for span in spans])
        ragged = RaggedBatch(self.pool, spans, slots)
        keys = torch.tensor([token + 1.0 for rows in batch for token in rows.tokens])[:, None, None]
        ragged.write(0, keys, keys)
        logits: list[Sequence[float]] = []
        for rows, span in zip(batch, spans, strict=True):
            text = tuple(int(key) - 1 for key in ragged.read(0, span)[0][:, 0, 0].tolist())
            logits += [
                self._logits_after(text[:end]) for end in range(span.context - rows.wanted + 1, span.context + 1)
            ]
            rows.cache.extend(rows.tokens)
        return torch.tensor(logits, dtype=torch.float32)


class TableBackend(TransformersBackend):
    """The port on a table."""

    def __init__(self, logits_after: Table) -> None:
        super().__init__(TableTarget(logits_after))  # type: ignore[arg-type]
        vocab = len(logits_after(()))
        self.facts = TargetFacts("", HASH, vocab, 64, frozenset(), 1, 1, CPU, verifies_branches=True)
