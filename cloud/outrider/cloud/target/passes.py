"""Passes of the model: how the rows of a step are put into them, and what that guarantees of a row's bits."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from outrider.cloud.target.attention import BLOCK
from outrider.cloud.target.chunked_attention import CHUNK, ROWS
from outrider.proto.types import Guarantee


@dataclass(frozen=True, slots=True)
class Passes:
    """A way of putting a step's rows into passes.

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
_MULTIPLES = 1, 2, 4, 8
TOGETHER = tuple(Passes(Guarantee.BYTES, multiple, block=ROWS, chunk=CHUNK) for multiple in _MULTIPLES)
ROUNDED = tuple(Passes(Guarantee.BYTES, multiple) for multiple in _MULTIPLES)
# All products have one shape, and every row attends alone; the weights are read once for 16 rows.
TILES = Passes(Guarantee.BYTES_BY_TILES, multiple=16, limit=16, block=1)
FREE = Passes(Guarantee.DISTRIBUTION, block=512)
