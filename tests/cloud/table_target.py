"""A target whose logits are a table over texts, each read back from the KV cache; and trees of drafts on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from outrider.cloud.grammar.grammar import GrammarMatcher
from outrider.cloud.serving.batching import Share
from outrider.cloud.serving.runner import ModelRunner
from outrider.cloud.serving.sessions import Sessions
from outrider.cloud.serving.slots import Outbox, Slot
from outrider.cloud.target.attention import RaggedBatch, RowSpan
from outrider.cloud.target.backend import TargetFacts
from outrider.cloud.target.kv_cache import PagedKVCache
from outrider.cloud.target.target import SessionRows
from outrider.cloud.target.transformers_backend import TransformersBackend
from outrider.proto.session.verifier import VerifierRules, VerifierSession
from outrider.proto.types import BlockBranch, DraftToken, Open, Sampling, token_ids

CPU = torch.device("cpu")
HASH = "0" * 64
Table = Callable[[tuple[int, ...]], Sequence[float]]
Tree = tuple[tuple[int, ...], tuple[tuple[int, tuple[int, ...]], ...]]  # a block, and branches by where they begin


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


def drafts(tokens: Sequence[int]) -> tuple[DraftToken, ...]:
    return tuple(map(DraftToken, tokens))


def decode_trees(
    logits_after: Table,
    sampling: Sampling,
    trees: Sequence[tuple[int, Tree]],
    *,
    prompt: tuple[int, ...],
    length: int,
    eos: frozenset[int] = frozenset(),
    matcher: Callable[[], GrammarMatcher] | None = None,
    watch: Callable[[Any], None] = lambda result: None,
    **asked: Any,
) -> tuple[list[tuple[tuple[int, ...], Any]], int]:
    """The texts and their ends, one for each (seed, tree), which is verified in every step; and how many followed one.

    `matcher` makes that of a text's grammar; `watch` sees the result of each step before its tokens are committed;
    `asked` are fields of the request.
    """
    backend = TableBackend(logits_after)
    rules = VerifierRules("v", "m", HASH, backend.facts.vocab_size, 64, eos, 8)
    runner, sessions = ModelRunner(backend, {}), Sessions(backend, rules, len(trees))
    slots = []
    for seed, tree in trees:
        settings = replace(sampling, seed=seed, max_tokens=length)
        session = VerifierSession(Open("m", HASH, prompt, settings, "s", drafting=False, **asked), rules, 0.0)
        slot = Slot(len(slots), session, Outbox(), 0.0, handle=backend.open((), str(len(slots))))
        slot.matcher = matcher and matcher()
        backend.reserve(slot.handle, len(prompt) + length)
        slots.append((slot, tree))
    followed = 0
    while running := [(slot, tree) for slot, tree in slots if slot.session.finish is None]:
        shares = []
        for slot, (block, branches) in running:
            depth = length - slot.session.generated - 1
            kept = ((index, tokens[: depth - index]) for index, tokens in branches if index < depth)
            beside = tuple(BlockBranch(index, drafts(tokens)) for index, tokens in kept)
            shares.append(Share(slot, slot.num_uncomputed_tokens, drafts(block[:depth]), beside))
        shares = sessions.masked(shares, 0.0, lambda: None)
        blocks = {share.slot: share.block for share in shares}
        result = runner.run(shares)
        watch(result)
        for slot, verified in result.verified:
            followed += verified.block != blocks[slot]
            commit = slot.session.on_verified(verified, 1.0)
            if slot.matcher is not None:
                slot.matcher.advance(token_ids(commit.tokens))
            slot.forget_drafts(backend)
    for slot, _ in slots:
        backend.release(slot.handle)
    assert backend.capacity.used_pages == 0
    return [(tuple(slot.session.transcript), slot.session.finish) for slot, _ in slots], followed
