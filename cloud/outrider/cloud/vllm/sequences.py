"""The sequences of a vLLM backend: the tokens that their KV blocks hold, and what vLLM's workers know of them.

vLLM's scheduler takes no part. It would decide who steps, grow sequences as it likes and preempt them; here the engine
decides, so blocks are taken straight from vLLM's pool: exactly those that were reserved, never one that somebody holds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.cloud.target.backend import Capacity
from outrider.cloud.target.verification import VerificationInput
from outrider.cloud.vllm.adapter import Block, PoolStore
from outrider.cloud.vllm.worker_messages import PassRow
from outrider.proto.types import token_ids

_numbers = itertools.count()


@dataclass(slots=True)
class WorkerRequest:
    """A sequence as vLLM's workers know it: a request.

    Attributes:
        name: the request's id, used once.
        tokens: prompt and text of the request.
        prompt_length: tokens that it began with; the workers can forget those after them, no others.
        num_blocks: leading blocks of the sequence that the workers know of.
        agreed: leading tokens whose keys and values are in the sequence's blocks.
    """

    name: str
    tokens: list[int]
    prompt_length: int
    num_blocks: int
    agreed: int

    def serves(self, start: int, tokens: tuple[int, ...], *, ends: bool) -> bool:
        """Return whether `tokens` [n] can follow the first `start`, and be the last of the request if one `ends`."""
        end = start + len(tokens)
        fits = self.agreed >= start and tuple(self.tokens[start:end]) == tokens
        return fits and (end >= self.prompt_length or not ends)


@dataclass(slots=True, eq=False)
class BlockSequence:
    """A sequence of tokens on KV blocks.

    Attributes:
        isolation: only sequences of the same may share blocks.
        tokens: [length] the tokens of the positions that hold valid keys and values.
        coming: tokens that it was opened for, which probably follow.
        blocks: blocks that it holds, in order of position.
        keys: keys of its leading blocks that are full for good.
        request: what the workers know of it; None: nothing.
    """

    isolation: str
    tokens: list[int] = field(default_factory=list)
    coming: Sequence[int] = ()
    blocks: list[Block] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    request: WorkerRequest | None = None

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def num_pages(self) -> int:
        return len(self.blocks)


class Paging:
    """KV cache blocks of all sequences: which sequence holds which, which are shared, and which are to be copied."""

    def __init__(self, store: PoolStore) -> None:
        self._store = store
        self._copies: list[tuple[Block, Block]] = []
        self.departed: set[str] = set()  # requests that the workers are to forget in the next step

    @property
    def capacity(self) -> Capacity:
        """The blocks as pages; those that hold what nobody uses now are free."""
        return Capacity(self._store.size, self._store.count, self._store.free)

    @property
    def copies(self) -> list[tuple[int, int]]:
        """Numbers of blocks to copy before the next step's pass: from, to."""
        return [(source.block_id, copy.block_id) for source, copy in self._copies]

    def open(self, tokens: Sequence[int], isolation: str) -> BlockSequence:
        """Open a sequence on the blocks found for `tokens` [n]; the last token is computed in any case."""
        sequence, size = BlockSequence(isolation, coming=tokens), self._store.size
        for start in range(0, len(tokens) - size, size):
            before = sequence.keys[-1] if sequence.keys else None
            key = self._store.key(before, tokens[start : start + size], isolation)
            block = self._store.find(key)
            if block is None:
                break
            self._store.share([block])
            sequence.blocks.append(block)
            sequence.keys.append(key)
            sequence.tokens += tokens[start : start + size]
        return sequence

    def reserve(self, sequence: BlockSequence, tokens: int) -> None:
        """Have a sequence hold blocks for `tokens` positions, at least the valid ones; ResourceExhausted: too few."""
        if tokens < sequence.length:
            raise ValueError(f"cannot hold {sequence.length} positions in {tokens}")
        wanted = max(1, math.ceil(tokens / self._store.size))
        more = wanted - len(sequence.blocks)
        if more > 0:
            self.capacity.check_room(tokens, more)
            sequence.blocks += self._store.take(more)
        elif more < 0:
            self._drop_blocks(sequence, wanted)

    def truncate(self, sequence: BlockSequence, length: int) -> None:
        """Forget the positions from `length` on, where the next ones are written.

        Where a block of these positions is shared it is exchanged, for a copy if some of it stays valid. Without a free
        block for it the sequence is cut at the block's first position, and is to be computed again from there.
        """
        if not 0 <= length <= sequence.length:
            raise ValueError(f"cannot truncate {sequence.length} positions to {length}")
        first, kept = divmod(length, self._store.size)
        for index in range(first, len(sequence.blocks)):
            block = sequence.blocks[index]
            if not self._store.is_shared(block):
                self._store.forget(block)
                continue
            self.part(sequence)
            if not self._store.free:
                self._drop_blocks(sequence, index)
                length = min(length, index * self._store.size)
                break
            [own] = self._store.take(1)
            if index == first and kept:
                self._copy(block, own)
            self._store.give_back([block])
            sequence.blocks[index] = own
        del sequence.tokens[length:]
        del sequence.keys[length // self._store.size :]
        if sequence.request is not None:
            sequence.request.agreed = min(sequence.request.agreed, length)

    def release(self, sequence: BlockSequence) -> None:
        self.part(sequence)
        self._drop_blocks(sequence, 0)
        sequence.coming = ()
        sequence.tokens.clear()
        sequence.keys.clear()

    def row(
        self, sequence: BlockSequence, tokens: tuple[int, ...], verification: VerificationInput | None, *, tapped: bool
    ) -> PassRow:
        """Return a sequence's row of the next pass: `tokens` [n], then the drafts to verify.

        It goes on with the request that the workers know where its tokens are those that they expect; else it becomes a
        new one, of all its tokens.
        """
        start, end = sequence.length, sequence.length + len(tokens)
        drafts = token_ids(verification.block) if verification is not None else ()
        request, new_tokens = sequence.request, None
        if request is None or not request.serves(start, tokens, ends=verification is not None):
            self.part(sequence)
            new_tokens = [*sequence.tokens, *tokens]
            if verification is None and tuple(sequence.coming[start:end]) == tokens:
                new_tokens += sequence.coming[end:]  # the workers then know how it goes on
            request = WorkerRequest(f"s{next(_numbers)}", list(new_tokens), len(new_tokens), 0, start)
            sequence.request = request
        elif verification is not None:
            del request.tokens[end:]  # a request whose tokens end later gives none
        new_blocks = [block.block_id for block in sequence.blocks[request.num_blocks :]]
        request.num_blocks = len(sequence.blocks)
        num_output_tokens = len(request.tokens) - request.prompt_length
        return PassRow(
            request.name, start, tokens, drafts, new_tokens, new_blocks, num_output_tokens, verification, tapped
        )

    def part(self, sequence: BlockSequence) -> None:
        """Have the workers forget a sequence; it becomes another request when it steps again."""
        if sequence.request is not None:
            self.departed.add(sequence.request.name)
            sequence.request = None

    def settle(self, sequence: BlockSequence, length: int) -> None:
        """Let others find the full blocks among the first `length` positions, which are computed and will stay."""
        size = self._store.size
        for index in range(len(sequence.keys), length // size):
            before = sequence.keys[-1] if sequence.keys else None
            key = self._store.key(before, sequence.tokens[index * size : (index + 1) * size], sequence.isolation)
            sequence.keys.append(key)
            self._store.keep(sequence.blocks[index], key)

    def distrust(self, sequence: BlockSequence) -> None:
        """Let nobody find what a sequence holds: it may be no numbers."""
        for block in sequence.blocks:
            self._store.forget(block)
        sequence.keys.clear()

    def copied(self) -> None:
        self._store.give_back([source for source, _ in self._copies])
        self._copies.clear()

    def _copy(self, source: Block, copy: Block) -> None:
        """Copy a block before the next pass; until then nobody else can get the source."""
        source = next((first for first, second in self._copies if second is source), source)  # if it is a copy itself
        self._store.share([source])
        self._copies.append((source, copy))

    def _drop_blocks(self, sequence: BlockSequence, kept: int) -> None:
        """Give back all blocks but the first `kept`."""
        if sequence.request is not None and sequence.request.num_blocks > kept:
            self.part(sequence)
        self._store.give_back(reversed(sequence.blocks[kept:]))
        del sequence.blocks[kept:]
