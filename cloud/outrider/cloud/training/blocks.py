"""The blocks of text that a step reads: a pure function of the seed and the blocks read before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outrider.proto.errors import InvalidArgument


@dataclass(frozen=True)
class Source:
    """One stream of tokens (uint32 [total]) and the share of blocks it gives."""

    name: str
    tokens: np.ndarray
    weight: float


class BlockSampler:
    """A sampler of contiguous blocks; every epoch reads each source in a new order, from a new offset.

    `taken` (blocks read of each source) and `drawn` (blocks in all) are the whole state.
    """

    def __init__(self, sources: list[Source], block: int, seed: int):
        for source in sources:
            if len(source.tokens) < 2 * block:
                raise InvalidArgument(
                    f"{source.name} has {len(source.tokens)} tokens to train on, fewer than two blocks of {block}; "
                    "give more text or shorter blocks",
                    field="block",
                )
        total = sum(source.weight for source in sources)
        if total <= 0:
            raise InvalidArgument("at least one domain needs a weight above zero", field="domain_weights")
        self.sources = sources
        self.block = block
        self.seed = seed
        self.shares = np.array([source.weight / total for source in sources])
        self.taken = [0] * len(sources)
        self.drawn = 0

    def draw(self, blocks: int) -> np.ndarray:
        """Return the next blocks, int64 [blocks, block]."""
        rows = np.empty((blocks, self.block), dtype=np.int64)
        for row in rows:
            index = int(np.random.default_rng([self.seed, 2, self.drawn]).choice(len(self.sources), p=self.shares))
            row[:] = self._block(index, self.taken[index])
            self.taken[index] += 1
            self.drawn += 1
        return rows

    def _block(self, index: int, number: int) -> np.ndarray:
        tokens = self.sources[index].tokens
        blocks_an_epoch = len(tokens) // self.block - 1
        epoch, place = divmod(number, blocks_an_epoch)
        order = np.random.default_rng([self.seed, 3, index, epoch])
        offset = int(order.integers(self.block))
        first = offset + self.block * int(order.permutation(blocks_an_epoch)[place])
        return tokens[first : first + self.block]
