"""The KV cache of a branch: drafts that a step verifies beside a session's block.

To attention a branch is a session like any other, with a text that begins as the session's: its keys lie in order of
their positions, so a row has the bits that it would have in a chain, and branches see nothing of each other. Only the
page where it leaves the session's text is a copy, made in each layer once the rows before it are written. What it has
on lent pages of its own ends with the step, or is copied to the session that follows it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from outrider.cloud.target.kv_cache import PagedKVCache, SessionCache


@dataclass(slots=True, eq=False)
class BranchCache(SessionCache):
    """A branch that leaves a session's text at position `base`.

    Attributes:
        session: the session.
        base: position of the first of `tokens`, which are its own.
        borrowed: [n] int64, the session's slots of the n positions before `base` that it has copies of.
    """

    session: SessionCache = field(kw_only=True)
    base: int = 0
    borrowed: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    @classmethod
    def beside(
        cls, pool: PagedKVCache, cache: SessionCache, base: int, count: int, lent: list[int]
    ) -> BranchCache | None:
        """Return a branch of `count` positions beside `cache`, on pages that it takes from `lent`; None: too few.

        It is valid until the session's pages change.
        """
        shared = base // pool.page_size
        wanted = pool.pages_for(base + count) - shared
        if wanted > len(lent):
            return None
        own, lent[:] = lent[:wanted], lent[wanted:]
        begins = shared * pool.page_size
        branch = cls(pool.page_size, torch.cat([cache.slots[:begins], pool.slots_of(own)]), session=cache, base=base)
        branch.pages, branch.contiguous = [*cache.pages[:shared], *own], False
        branch.borrowed = cache.slots[begins:base]
        return branch

    @property
    def length(self) -> int:
        """Positions that hold valid keys and values."""
        return self.base + len(self.tokens)

    @property
    def begins(self) -> int:
        """Positions of the session's pages that it lies on, too."""
        return self.base - len(self.borrowed)

    @property
    def copies(self) -> torch.Tensor:
        """[n] int64, its slots of what it has copies of."""
        return self.slots[self.begins : self.base]

    def replace_end(self, pool: PagedKVCache, cache: SessionCache) -> None:
        """Let the session go on with what the branch holds, in place of its own positions from there on."""
        cache.truncate(self.base)
        pool.begin_write(cache, len(self.tokens))
        own = slice(self.base, self.length)
        for layer in pool.layers:
            pool.copy(layer, self.slots[own], cache.slots[own])
        cache.extend(self.tokens)
