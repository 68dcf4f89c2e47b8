"""The texts that KV pages hold: a page is found by the page before it and by its own tokens, never by a hash alone."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.cloud.target.session_states import States
from outrider.proto.types import common_length


@dataclass(slots=True, eq=False)
class CachedPage:
    """A page whose text is known, or the beginning of all texts of one isolation, which is no page.

    Attributes:
        parent: page before it; None: it is such a beginning.
        tokens: [1..page_size] tokens of its positions; fewer than page_size: the rest holds nothing yet.
        page: number of the page.
    """

    parent: CachedPage | None
    tokens: tuple[int, ...]
    page: int
    isolation: str
    children: dict[tuple[int, ...], CachedPage] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """API key whose sessions may share it; empty: none is asked for."""
        return self.isolation.partition("/")[0]


class PrefixTree:
    """The cached pages of all isolations, and those of each API key that no session holds, least recently used first.

    An isolation is the name of an API key, or that, a slash and a mark of the text's owner. Sessions release their
    pages from the end of the text, so that the least recently used page is a leaf, or its successors are held by texts
    that have computed the same beginning twice.

    Attributes:
        cached: [pages] bool, whether a page's text is known.
    """

    def __init__(self, page_count: int) -> None:
        self.cached = np.zeros(page_count, dtype=bool)
        self._roots: dict[str, CachedPage] = {}
        self._by_page: dict[int, CachedPage] = {}
        self._with_states: OrderedDict[CachedPage, States] = OrderedDict()  # longest unused first
        self._idle: defaultdict[str, OrderedDict[CachedPage, None]] = defaultdict(OrderedDict)  # longest unused first

    @property
    def num_idle(self) -> int:
        """Cached pages that nobody holds."""
        return sum(map(len, self._idle.values()))

    def of_page(self, page: int) -> CachedPage | None:
        return self._by_page.get(page)

    def has(self, cached: CachedPage) -> bool:
        return self._by_page.get(cached.page) is cached

    def find(self, isolation: str, tokens: Sequence[int], page_size: int) -> list[CachedPage]:
        """Return the full pages with which `tokens` [n] begin, in order."""
        found: list[CachedPage] = []
        here: CachedPage | None = self._roots.get(isolation)
        for start in range(0, len(tokens) - page_size + 1, page_size):
            here = here and here.children.get(tuple(tokens[start : start + page_size]))
            if here is None:
                break
            found.append(here)
        return found

    def closest(self, isolation: str, last: CachedPage | None, tokens: Sequence[int]) -> tuple[CachedPage | None, int]:
        """Return the page after `last` (None: the first) that agrees with most of the first `tokens`, and how many."""
        parent = last or self._roots.get(isolation)
        best, agreed = None, 0
        if parent is not None and tokens:
            for child in parent.children.values():
                if child.tokens[0] == tokens[0] and (common := common_length(child.tokens, tokens)) > agreed:
                    best, agreed = child, common
        return best, agreed

    def add(self, isolation: str, last: CachedPage | None, tokens: tuple[int, ...], page: int) -> CachedPage:
        """Know `page`, which somebody holds, by its text; return the page that is known by it already, if one is.

        A text that was known of the page so far must be the beginning of this one.
        """
        parent = last or self._roots.setdefault(isolation, CachedPage(None, (), -1, isolation))
        if (there := parent.children.get(tokens)) is not None:
            return there
        shorter = self._by_page.get(page)
        added = parent.children[tokens] = self._by_page[page] = CachedPage(parent, tokens, page, isolation)
        if shorter is not None:
            del parent.children[shorter.tokens]
        self.cached[page] = True
        return added

    def remove(self, cached: CachedPage | None) -> None:
        """Forget a page's text, if it is known, and the pages after it, which cannot be found without it."""
        if cached is None or not self.has(cached):
            return
        parent = cached.parent
        assert parent is not None  # noqa: S101 - no page is a root
        del parent.children[cached.tokens]
        stack = [cached]
        while stack:
            gone = stack.pop()
            stack += gone.children.values()
            del self._by_page[gone.page]
            self._idle[gone.key].pop(gone, None)
            self._with_states.pop(gone, None)
            self.cached[gone.page] = False
        if parent.parent is None and not parent.children:
            del self._roots[parent.isolation]

    def move(self, moves: Mapping[int, int]) -> None:
        """Know pages by the texts of others, all at once: `moves` maps each page of a text to its next."""
        moved = [(to, cached) for page, to in moves.items() if (cached := self._by_page.pop(page, None)) is not None]
        self.cached[list(moves)] = False
        for to, cached in moved:
            self._by_page[to], cached.page = cached, to
            self.cached[to] = True

    def hold(self, page: int) -> None:
        if (cached := self._by_page.get(page)) is not None:
            self._idle[cached.key].pop(cached, None)

    def give_back(self, page: int) -> None:
        """Note that nobody holds a page any more, which was used just now."""
        if (cached := self._by_page.get(page)) is not None:
            self._idle[cached.key][cached] = None

    def touch(self, cached: CachedPage) -> None:
        """Note that a page's text was used just now, also where nobody holds it."""
        if cached in self._idle[cached.key]:
            self._idle[cached.key].move_to_end(cached)

    def states(self, cached: CachedPage) -> States | None:
        """Return the states at the end of a page, which are used now; None: they are not kept."""
        if cached in self._with_states:
            self._with_states.move_to_end(cached)
        return self._with_states.get(cached)

    def keep_states(self, cached: CachedPage, states: States, most: int) -> None:
        """Keep the states at the end of a page, and `most` in all."""
        self._with_states[cached] = states
        self._with_states.move_to_end(cached)
        while len(self._with_states) > most:
            self._with_states.popitem(last=False)

    def next_to_evict(self) -> CachedPage:
        """Return the page used least recently of the key that has most pages that nobody holds; there must be one."""
        most = max(self._idle, key=lambda key: len(self._idle[key]))
        return next(iter(self._idle[most]))

    def evict(self) -> None:
        self.remove(self.next_to_evict())
