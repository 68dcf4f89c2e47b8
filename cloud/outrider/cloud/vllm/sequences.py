"""The sequences of a vLLM backend: the tokens that their KV blocks hold, and what vLLM's workers know of them.

vLLM's scheduler takes no part. It would decide who steps, grow sequences as it likes and preempt them; here the engine
decides, so blocks are taken straight from vLLM's pool: exactly those that were reserved, never one that somebody holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from outrider.proto.errors import ResourceExhausted

Block = Any  # vLLM's KVCacheBlock


class BlockStore(Protocol):
    """The KV blocks of all sequences; what was computed stays there to be found until the block is needed."""

    @property
    def size(self) -> int:
        """Positions of a block."""
        ...

    @property
    def count(self) -> int:
        """Blocks in all."""
        ...

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        ...

    def take(self, count: int) -> list[Block]:
        """Hold `count` blocks, which are free."""
        ...

    def share(self, blocks: Iterable[Block]) -> None:
        """Hold blocks once more, or again."""
        ...

    def give_back(self, blocks: Iterable[Block]) -> None:
        """Hold blocks once less; of those that nobody holds the first are used first."""
        ...

    def is_shared(self, block: Block) -> bool:
        """Return whether it is held more than once."""
        ...

    def key(self, before: bytes | None, tokens: Sequence[int], isolation: str) -> bytes:
        """Return the key of a block of `tokens` [size] after the block of key `before`; None: it is the first."""
        ...

    def find(self, key: bytes) -> Block | None:
        """Return a block with the keys and values that `key` stands for."""
        ...

    def keep(self, block: Block, key: bytes) -> None:
        """Let a block be found by `key` from now on, if it cannot be found yet."""
        ...

    def forget(self, block: Block) -> None:
        """Let a block be found no more."""
        ...


@dataclass(slots=True)
class WorkerRequest:
    """A sequence as vLLM's workers know it: a request.

    Attributes:
        name: the request's id, used once.
        tokens: prompt and text of the request.
        prompt_length: tokens that it began with; the workers can forget those after them, no others.
        num_blocks: leading blocks of the sequence that the workers know of.
        agreed: leading tokens that are those of the sequence's keys and values.
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
        length: positions that hold valid keys and values.
        tokens: [length] the tokens of these positions.
        coming: tokens that it was opened for, which probably follow.
        blocks: blocks that it holds, in order of position.
        keys: keys of its leading blocks that are full for good.
        request: what the workers know of it; None: nothing.
    """

    isolation: str
    length: int = 0
    tokens: list[int] = field(default_factory=list)
    coming: Sequence[int] = ()
    blocks: list[Block] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    request: WorkerRequest | None = None

    @property
    def num_pages(self) -> int:
        """Blocks that it holds."""
        return len(self.blocks)

    def grow(self, tokens: Sequence[int]) -> None:
        """Note that the keys and values of `tokens` [n] are computed."""
        self.tokens += tokens
        self.length = len(self.tokens)


class Paging:
    """The sequences' shares of the blocks."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._copies: list[tuple[Block, Block]] = []
        self.departed: set[str] = set()  # requests that the workers are to forget in the next step

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
            sequence.grow(tokens[start : start + size])
        return sequence

    def reserve(self, sequence: BlockSequence, tokens: int) -> None:
        """Have a sequence hold blocks for `tokens` positions, no fewer than are valid.

        Raises:
            ResourceExhausted: not enough blocks are free.
        """
        if tokens < sequence.length:
            raise ValueError(f"cannot hold {sequence.length} positions in {tokens}")
        wanted = max(1, math.ceil(tokens / self._store.size))
        more = wanted - len(sequence.blocks)
        if more > 0:
            self._check_room(tokens, more)
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
        sequence.length = length
        if sequence.request is not None:
            sequence.request.agreed = min(sequence.request.agreed, length)

    def fork(self, sequence: BlockSequence) -> BlockSequence:
        """Return another sequence of the same tokens, which shares all full blocks.

        Raises:
            ResourceExhausted: no block is free for the rest.
        """
        full, rest = divmod(sequence.length, self._store.size)
        if rest:
            self._check_room(sequence.length, 1)
        shared = sequence.blocks[:full]
        self._store.share(shared)
        own = self._store.take(1) if rest else []
        for block in own:
            self._copy(sequence.blocks[full], block)
        tokens, keys = list(sequence.tokens), sequence.keys[:full]
        return BlockSequence(sequence.isolation, sequence.length, tokens, sequence.coming, shared + own, keys)

    def release(self, sequence: BlockSequence) -> None:
        """Give back what a sequence holds."""
        self.part(sequence)
        self._drop_blocks(sequence, 0)
        sequence.length, sequence.coming = 0, ()
        sequence.tokens.clear()
        sequence.keys.clear()

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
        """Note that the copies are made."""
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

    def _check_room(self, tokens: int, more: int) -> None:
        if math.ceil(tokens / self._store.size) > self._store.count:
            raise ResourceExhausted(
                f"needs {tokens} positions, the verifier's KV cache holds {self._store.count * self._store.size}; "
                "lower sampling.max_tokens",
                field="open.prompt",
            )
        if more > self._store.free:
            raise ResourceExhausted(
                f"needs {more} KV pages, {self._store.free} are free; try again later",
                field="open.prompt",
                retry_after_s=1.0,
            )
