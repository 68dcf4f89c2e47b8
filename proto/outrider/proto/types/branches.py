"""Branches of a chain on the wire: likely misses, and what follows them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from outrider.proto.types.checks import require, require_chain, require_tokens


class Branch(NamedTuple):
    """A likely miss of a chain at position `start`: the token in place of the draft, and drafts that follow it.

    Attributes:
        tokens: [1 + m] that token, and the drafts.
        chance: chance that the target's token is the first, given that the chain agrees before it; it travels in
            255ths. NaN: unknown.
    """

    start: int
    tokens: tuple[int, ...]
    chance: float = math.nan


@dataclass(frozen=True, slots=True)
class Branches:
    """Branches of chain number `chain`; one whose token is the target's becomes the next chain at once."""

    chain: int
    branches: tuple[Branch, ...]

    def __post_init__(self) -> None:
        require_chain(self.chain, "branches.chain")
        require(bool(self.branches), "branches.starts", "is empty")
        require_branches(self.branches, "branches.")


def require_branches(branches: tuple[Branch, ...], prefix: str) -> None:
    """Refuse branches that mean nothing; errors name the field after `prefix`."""
    for branch in branches:
        require(branch.start >= 0, f"{prefix}starts", "must be 0 or more")
        require(bool(branch.tokens), f"{prefix}lengths", "must be 1 or more")
        require_tokens(branch.tokens, f"{prefix}tokens")
        require(math.isnan(branch.chance) or 0 <= branch.chance <= 1, f"{prefix}chances", "must be probabilities")
