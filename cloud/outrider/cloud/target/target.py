"""The target: any decoder-only model of transformers, run on ragged batches."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface

from outrider.cloud.models.family_index import (
    eos_tokens,
)
from outrider.cloud.target import attention
from outrider.cloud.target.architecture import CHECK_TOLERANCE, REJECTED, checked_length, steps
from outrider.cloud.target.attention import BLOCK, RaggedBatch, RowSpan, joined, rounded_up
from outrider.cloud.target.backend import precision_of, quantization_of
from outrider.cloud.target.chunked_attention import CHUNK, ROWS, ChunkedBatch
from outrider.cloud.target.kv_cache import MAX_STATES, PagedKVCache, SessionCache
from outrider.cloud.target.kv_size import kv_tokens_by_memory, session_length
from outrider.cloud.target.packed_linear import PACKED_ROWS, Packing
from outrider.cloud.target.projection import Taps
from outrider.cloud.target.recorded.straight_pass import Pass, StraightPass, own_pass
from outrider.cloud.target.recurrence import attach
from outrider.cloud.target.session_states import BORDER, SessionStates
from outrider.proto.errors import ModelRefused
from outrider.proto.plumbing.logs import STAGES
from outrider.proto.tokenizer import tokenizer_hash
from outrider.proto.types import Guarantee

# Positions whose bits are compared, and how they are cut the second time, beside how many rows of each other session.
_COMPARED, _DEEP, _FAR, _FEW = 288, 1300, 24, 4
_PIECES = (1, 16, 2, 100, 3, 33, 5, 64, 9, 4, 7, 1, 10)
_BESIDE = (), (1,), (3, *[1] * 7), (5,), (2, 1, 4, 1), (), (17, 3), ()

log, stages = logging.getLogger(__name__), logging.getLogger(STAGES)

AttentionInterface.register(attention.NAME, attention.paged_attention)


@dataclass(frozen=True, slots=True)
class Passes:
    """A way of putting a step's rows into passes of the model, and what it guarantees of a row's bits.

    Attributes:
        guarantee: promise that it keeps, where the check at load finds so.
        multiple: a pass takes a multiple of it; rows whose results nobody reads fill it up.
        limit: most rows of a pass.
        block: most positions of a session whose rows attend in one call.
        chunk: keys of a session that are one entry in a call of many sessions; 0: each session has calls of its own.
    """

    guarantee: Guarantee
    multiple: int = 1
    limit: int = sys.maxsize
    block: int = BLOCK
    chunk: int = 0


# Kernels for few rows often add in another order than those for many, which filling up avoids: in float32 those of
# plain products for one to three rows, and at 4,096 inputs those of packed ones for a single row.
_MULTIPLES = 1, 2, 4, 8, 16
TOGETHER = tuple(Passes(Guarantee.BYTES, multiple, block=ROWS, chunk=CHUNK) for multiple in _MULTIPLES)
ROUNDED = tuple(Passes(Guarantee.BYTES, multiple) for multiple in _MULTIPLES)
# All products have one shape, and every row attends alone; the weights are read once for 16 rows.
TILES = Passes(Guarantee.BYTES_BY_TILES, multiple=16, limit=16, block=1)
FREE = Passes(Guarantee.DISTRIBUTION, block=512)


@dataclass(frozen=True, slots=True)
class SessionRows:
    """One session's rows of a step: `tokens` [n] from position cache.length on, logits for the last `wanted`.

    The last `drafts` of them may be cut back.
    """

    cache: SessionCache
    tokens: tuple[int, ...]
    wanted: int
    drafts: int = 0


class Target:
    """A loaded target and its KV cache.

    Attributes:
        packing: how the linear layers multiply, where `load_target` has chosen it.
        passes: how the rows of a step are put into passes, which `load_target` chooses too.
        straight: the model's pass in a straight line; None: the model runs as it is written.
        model_pass: the function that runs, of what `PassInputs` has.
        attention: the attention function by which the model runs.
        verifies_branches: whether a step can verify branches beside a session's block.
    """

    attention = attention.NAME
    verifies_branches = True

    def __init__(
        self,
        model: Any,
        tokenizer_json: str,
        *,
        kv_tokens: int,
        page_size: int,
        context_length: int = 0,
        max_sessions: int = 32,
        passes: Passes = FREE,
        packing: Packing | None = None,
        straight: StraightPass | None = None,
    ) -> None:
        self.model = model
        self.straight = straight
        self.model_pass: Pass = straight.compiled() if straight else partial(own_pass, model)
        self.packing = packing or Packing()
        self.tokenizer_json = tokenizer_json
        self.tokenizer_sha256 = tokenizer_hash(tokenizer_json)
        self.passes = passes
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        config = model.config.get_text_config()
        self.vocab_size = int(config.vocab_size)
        longest = session_length(config, context_length)
        new_states = self._new_states(model)
        if not kv_tokens:
            states = (max_sessions + MAX_STATES) * _state_bytes(model) if new_states is SessionStates else 0
            kv_tokens = kv_tokens_by_memory(config, self.dtype, self.device, max_sessions * longest, states)
        self.eos_tokens = eos_tokens(model.generation_config, config)
        self.pool = PagedKVCache(kv_tokens, page_size, self.dtype, self.device, new_states)
        self.context_length = min(longest, self.pool.page_count * page_size)
        model.set_attn_implementation(self.attention)
        self._tapped: Taps | None = None

    @staticmethod
    def _new_states(model: Any) -> Callable[[], SessionStates] | None:
        """Return what makes the states of a session; None: all layers keep keys and values alone."""
        return SessionStates if attach(model) else None

    @property
    def precision(self) -> str:
        """Types and device that decide how its logits round."""
        return precision_of(self.dtype, device=self.device.type, quantization=quantization_of(self.model.config))

    def tap(self, layers: Sequence[int]) -> None:
        """Keep what enters `layers`, and no other, in every later step; ModelRefused: it has no such layers."""
        if self._tapped is not None:
            self._tapped.close()
        self._tapped = Taps(self.model, layers)
        if self.straight is not None:
            self.model_pass = self.straight.compiled(layers)

    def tapped(self, rows: Sequence[int]) -> torch.Tensor:
        """Return [n, taps * hidden] float32: the stream into the tapped layers in `rows` [n] of the newest logits."""
        if self._tapped is None:
            raise RuntimeError("the target is not tapped")
        return self._tapped.of(rows)

    @torch.inference_mode()
    def forward(self, batch: list[SessionRows]) -> torch.Tensor:
        """Return logits [sum of wanted, vocab] float32 of all sessions' rows, and extend their caches."""
        if self._tapped is not None:
            self._tapped.begin()
        for rows in batch:
            self.pool.begin_write(rows.cache, len(rows.tokens))
            rows.cache.states.read(rows.cache.length + len(rows.tokens) - rows.drafts)
        logits = [self._pass(pieces) for pieces in _cut(batch, self.passes.limit)]
        for rows in batch:
            rows.cache.extend(rows.tokens)
        return joined(logits)

    def _pass(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Return logits of the wanted rows [n, vocab] among those of one pass."""
        tokens: list[int] = []
        positions: list[int] = []
        spans: list[RowSpan] = []
        wanted: list[int] = []
        for rows, begin, end in pieces:
            first, start = len(tokens), rows.cache.length + begin
            tokens += rows.tokens[begin:end]
            positions += range(start, start + end - begin)
            spans.append(RowSpan(rows.cache, first, end - begin, start))
            wanted += range(first + max(0, len(rows.tokens) - rows.wanted - begin), len(tokens))
        slots = torch.cat([span.cache.slots[span.start : span.context] for span in spans])
        missing = self._filled(len(tokens)) - len(tokens)
        filled = (wanted or [0]) + [wanted[-1] if wanted else 0] * (self._filled(len(wanted)) - max(1, len(wanted)))
        batch = (
            ChunkedBatch(self.pool, spans, slots, self.passes.block, chunk=self.passes.chunk)
            if self.passes.chunk
            else RaggedBatch(self.pool, spans, slots, self.passes.block)
        )
        logits, *entered = self.model_pass(
            torch.tensor([tokens + tokens[-1:] * missing], device=self.device),
            torch.tensor([positions + positions[-1:] * missing], device=self.device),
            torch.tensor(filled, device=self.device),
            batch,
        )
        if self._tapped is not None:
            if entered:
                self._tapped.enter(entered)
            self._tapped.keep(wanted)
        return logits[0].float()[: len(wanted)]

    def _filled(self, rows: int) -> int:
        """Return the rows that a product of `rows` takes: a multiple of what passes need, and four if packed.

        oneDNN's products of four rows in its own layout take less time than those of one or two.
        """
        least = PACKED_ROWS if self.packing.packed else 1
        return rounded_up(max(rows, least), self.passes.multiple)

    @torch.inference_mode()
    def check(self) -> float:
        """Compare its passes, as they will run, with the model's own, and return the relative difference of logits.

        Raises:
            ModelRefused: they disagree by more than the type's rounding explains.
        """
        wanted = checked_length(self.model.config.get_text_config())
        length = min(wanted, self.context_length, self.pool.page_count * self.pool.page_size)
        tokens = torch.randint(0, self.vocab_size, (length,), generator=torch.Generator().manual_seed(0)).tolist()
        cache, pieces = self.pool.allocate(length), []
        try:
            for start, end in itertools.pairwise(steps(length)):
                if start:
                    rejected = tuple(tokens[: min(REJECTED, length - start)])
                    self.forward([SessionRows(cache, rejected, 1, len(rejected))])
                    cache.truncate(start)
                pieces.append(self.forward([SessionRows(cache, tuple(tokens[start:end]), end - start)]))
        finally:
            self.pool.release(cache)
        self.model.set_attn_implementation("eager")
        plain = self.model(input_ids=torch.tensor([tokens], device=self.device), use_cache=False).logits[0].float()
        self.model.set_attn_implementation(self.attention)
        difference = float((torch.cat(pieces) - plain).norm() / plain.norm())
        if not difference <= CHECK_TOLERANCE[self.dtype]:
            raise ModelRefused(
                f"its pass differs from the model's own by {difference:.2g}; the architecture is not supported",
                field="target",
            )
        return difference

    @torch.inference_mode()
    def keeps_bits(self) -> bool:
        """Return whether rows keep their bits by `passes`: together, in pieces, beside others, far into a text."""
        room = self.pool.page_count * self.pool.page_size
        length = min(_COMPARED, self.context_length, room // 3 - self.pool.page_size)
        depth = min(_DEEP, self.context_length, (room - length) // 2 - self.pool.page_size)
        if depth > length + _FAR:
            depth -= (depth - _FAR - length) % BORDER  # states go on only where chunks lie alike
        if length < 1:
            log.warning("a KV cache of %d positions is too small to compare a row's bits in it", room)
            return False
        tokens = torch.randint(0, self.vocab_size, (depth,), generator=torch.Generator().manual_seed(1)).tolist()
        caches: list[SessionCache] = []
        try:
            caches += (self.pool.allocate(size) for size in (depth, depth, length))
            one, other, *beside = caches
            while len(beside) < max(map(len, _BESIDE)) and self.pool.free_pages >= self.pool.pages_for(_FEW):
                caches.append(self.pool.allocate(_FEW))
                beside.append(caches[-1])
            rows = min(64, length)
            together = self._logits(one, tokens[:length], (length - rows or rows, rows), ((),), beside)
            if not self._same(together, self._logits(other, tokens[:length], _PIECES, _BESIDE, beside), one, other):
                return False
            far = tokens[depth - _FAR :] if depth > length + _FAR else []
            for cache in (one, other):
                self._repeat(cache, depth - len(far) if far else length)
            together = self._logits(one, far, (_FAR,), ((),), beside)
            return self._same(together, self._logits(other, far, _PIECES, _BESIDE, beside), one, other)
        finally:
            for cache in caches:
                cache.truncate(0)
                self.pool.release(cache)

    def _logits(
        self,
        cache: SessionCache,
        tokens: list[int],
        sizes: Sequence[int],
        others: Sequence[Sequence[int]],
        beside: Sequence[SessionCache],
    ) -> torch.Tensor:
        """Return logits of the last 64 `tokens`; passes take `sizes` of them and `others` rows of sessions `beside`."""
        logits, at = [torch.empty(0, self.vocab_size, device=self.device)], 0
        for size, counts in zip(itertools.cycle(sizes), itertools.cycle(others)):
            piece = tuple(tokens[at : at + size])
            if not piece:
                return torch.cat(logits)
            at += len(piece)
            for each in beside:
                each.truncate(0)
            company = [SessionRows(each, tuple(tokens[:rows]), 1) for each, rows in zip(beside, counts, strict=False)]
            wanted = min(len(piece), max(0, at - len(tokens) + 64))
            logits.append(self.forward([*company, SessionRows(cache, piece, wanted)])[len(company) :])
        raise AssertionError

    def _repeat(self, cache: SessionCache, length: int) -> None:
        """Fill `cache` up to `length` with repetitions of what it holds."""
        source = torch.arange(length) % cache.length
        for layer in self.pool.layers:
            self.pool.copy(layer, cache.slots[source], cache.slots[:length])
        cache.states.shift(length - cache.length)
        cache.extend([0] * (length - cache.length))  # whatever they are: nobody looks for them

    def _same(self, logits: torch.Tensor, others: torch.Tensor, cache: SessionCache, other: SessionCache) -> bool:
        held = (
            zip(*(self.pool.read(layer, each, cache.length) for each in (cache, other)), strict=True)
            for layer in self.pool.layers
        )
        states, of_other = cache.states.states(), other.states.states()
        return (
            torch.equal(logits, others)
            and all(torch.equal(*pair) for pairs in held for pair in pairs)
            and all(torch.equal(states[key], of_other[key]) for key in states)
        )


@torch.inference_mode()
def _state_bytes(model: Any) -> int:
    """Return the bytes that a session's states take, for a model whose attention is that of the paged KV cache."""
    model.set_attn_implementation(attention.NAME)
    pool = PagedKVCache(BORDER, BORDER, model.dtype, model.device)
    cache = pool.allocate(BORDER)
    cache.states.read(BORDER)
    rows = torch.arange(BORDER, device=model.device)
    own_pass(
        model, rows[None] % 2, rows[None], rows[-1:], RaggedBatch(pool, [RowSpan(cache, 0, BORDER, 0)], cache.slots)
    )
    return sum(state.nbytes for state in cache.states.states().values())


Piece = tuple[SessionRows, int, int]  # the rows from begin to end of a session's rows in one pass


def _cut(batch: Sequence[SessionRows], limit: int) -> Iterator[list[Piece]]:
    """Cut rows into passes of `limit` at most."""
    pieces: list[Piece] = []
    room = limit
    for rows in batch:
        begin = 0
        while begin < len(rows.tokens):
            end = min(len(rows.tokens), begin + room)
            pieces.append((rows, begin, end))
            room -= end - begin
            begin = end
            if not room:
                yield pieces
                pieces, room = [], limit
    if pieces:
        yield pieces
