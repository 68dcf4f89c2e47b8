"""KV pages: found by their text, shared, copied before they change, evicted least recently used, and never mixed up.

A machine takes a pool through any order of its calls, beside an oracle that keeps each text in a list: what a session
reads must be the keys and values of its own text, what is cached must be those of the text it is known by, and what is
found must be all that the texts before have left, and of one isolation alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from table_target import TableBackend

from outrider.cloud.target.backend import StepRow
from outrider.cloud.target.kv_cache import PagedKVCache, SessionCache
from outrider.cloud.target.prefix_tree import CachedPage, PrefixTree
from outrider.cloud.target.verification import VerificationInput
from outrider.proto.errors import ResourceExhausted
from outrider.proto.types import Sampling

PAGE, LAYERS = 4, 3  # of the layers the last keeps keys alone, which are its values too
TOKENS = st.lists(st.sampled_from((1, 1, 1, 2)), max_size=11)
BIG = 400


def pool_of(pages: int) -> PagedKVCache:
    return PagedKVCache(pages * PAGE, PAGE, torch.float32, torch.device("cpu"))


class Contents:
    """Keys and values of every text: of a position, they depend on all tokens up to it."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, ...], int] = {}

    def of(self, text: Sequence[int], start: int = 0) -> torch.Tensor:
        """[n - start, 1, 1], those of the positions from `start` on."""
        numbers = [self._numbers.setdefault(tuple(text[: i + 1]), len(self._numbers) + 1) for i in range(len(text))]
        return torch.tensor(numbers[start:], dtype=torch.float32)[:, None, None]

    def write(self, pool: PagedKVCache, cache: SessionCache, tokens: Sequence[int]) -> None:
        """Let a session compute `tokens` next, for which it has pages."""
        pool.begin_write(cache, len(tokens))
        slots = cache.slots[cache.length : cache.length + len(tokens)]
        numbers = self.of([*cache.tokens, *tokens], cache.length)
        for layer in range(LAYERS):
            pool.write(layer, slots, numbers + layer / 2, values_of(layer, numbers + layer / 2))
        cache.extend(tokens)

    def check(self, pool: PagedKVCache, cache: SessionCache, text: Sequence[int]) -> None:
        """A session must read the keys and values of `text`."""
        assert cache.tokens == list(text)
        for layer in range(LAYERS) if text else ():
            keys, values = pool.read(layer, cache, len(text))
            assert torch.equal(keys, self.of(text) + layer / 2), "another text's keys"
            assert torch.equal(values, keys if layer == LAYERS - 1 else -keys)


def values_of(layer: int, keys: torch.Tensor) -> torch.Tensor | None:
    return None if layer == LAYERS - 1 else -keys


def extended(pool: PagedKVCache, contents: Contents, cache: SessionCache, tokens: Sequence[int]) -> SessionCache:
    pool.resize(cache, cache.length + len(tokens))
    contents.write(pool, cache, tokens)
    return cache


def left(pool: PagedKVCache, contents: Contents, text: Sequence[int], isolation: str = "") -> None:
    """A text comes and goes."""
    cache = pool.open(text, isolation)
    pool.release(extended(pool, contents, cache, text[cache.length :]))


def cached_texts(pool: PagedKVCache) -> dict[int, tuple[str, tuple[int, ...]]]:
    """Isolation and whole text up to the end of each cached page."""
    found: dict[int, tuple[str, tuple[int, ...]]] = {}

    def walk(isolation: str, text: tuple[int, ...], cached: CachedPage) -> None:
        for tokens, child in cached.children.items():
            assert (child.tokens, child.parent) == (tokens, cached)
            assert child.page not in found, "one page, two texts"
            assert not (child.children and len(tokens) < PAGE)
            found[child.page] = isolation, (*text, *tokens)
            walk(isolation, (*text, *tokens), child)

    for isolation, root in pool._tree._roots.items():
        walk(isolation, (), root)
    return found


def check_pool(pool: PagedKVCache, contents: Contents, sessions: Sequence[SessionCache]) -> None:
    """Check counts, and that cached pages hold the texts by which they are known."""
    holders = Counter(page for cache in sessions for page in cache.pages)
    assert pool._holders.tolist() == [holders[page] for page in range(pool.page_count)]
    assert pool.free_pages == pool.page_count - len(holders)
    texts, tree = cached_texts(pool), pool._tree
    assert set(texts) == set(tree._by_page) == set(tree.cached.nonzero()[0].tolist())
    assert {each.page for idle in tree._idle.values() for each in idle} == set(texts) - set(holders)
    for page, (_, text) in texts.items():
        start = (len(text) - 1) // PAGE * PAGE
        for layer in range(LAYERS):
            keys, *values = (held[page * PAGE :][: len(text) - start] for held in pool._held[layer])
            assert torch.equal(keys, contents.of(text, start) + layer / 2), "a cached page has changed"
            assert len(values) == (layer < LAYERS - 1)
            assert all(torch.equal(each, -keys) for each in values)


class PoolMachine(RuleBasedStateMachine):
    """Any order of a pool's calls."""

    pages = 9

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.contents = pool_of(self.pages), Contents()
        self.sessions: list[SessionCache] = []
        self.texts: dict[SessionCache, list[int]] = {}
        self.left: dict[str, set[tuple[int, ...]]] = {"": set(), "b": set()}  # texts that may be found
        self.kept: dict[str, set[tuple[int, ...]]] = {"": set(), "b": set()}  # those that must be, in a big pool
        self.shown: dict[SessionCache, int] = {}  # positions of a session that others may have found on its pages

    def any(self, data: st.DataObject) -> SessionCache:
        return data.draw(st.sampled_from(self.sessions))

    def leave(self, cache: SessionCache, length: int) -> None:
        if cache.trusted:
            for texts in (self.left, self.kept):
                texts[cache.isolation].add(tuple(self.texts[cache][:length]))

    def overwrite(self, cache: SessionCache) -> None:
        """Expect no more of what a session writes over, since its last page need not have been copied before."""
        if cache.length < self.shown[cache]:
            before = tuple(self.texts[cache][: cache.length // PAGE * PAGE])
            kept = self.kept[cache.isolation]
            gone = {text for text in kept if len(text) > len(before) and text[: len(before)] == before}
            self.kept[cache.isolation] = kept - gone | {before}
            self.shown[cache] = len(before)

    @rule(tokens=TOKENS, isolation=st.sampled_from(("", "", "b")), data=st.data())
    def open(self, tokens: list[int], isolation: str, data: st.DataObject) -> None:
        texts = sorted(self.left[isolation])
        text = [*(data.draw(st.sampled_from(texts)) if texts and data.draw(st.booleans()) else ()), *tokens]
        free = self.pool.free_pages
        cache = self.pool.open(text, isolation)
        agreeing, kept = (
            max((common(text, each) for each in found[isolation]), default=0) for found in (self.left, self.kept)
        )
        assert cache.length <= agreeing, "of another isolation, or of nobody"
        if self.pages == BIG and free:
            assert cache.length >= kept, "it is there"
        self.sessions.append(cache)
        self.texts[cache], self.shown[cache] = text[: cache.length], cache.length

    @precondition(lambda self: self.sessions)
    @rule(tokens=TOKENS, ahead=st.integers(0, 9), drafts=st.integers(0, 3), data=st.data())
    def extend(self, tokens: list[int], ahead: int, drafts: int, data: st.DataObject) -> None:
        cache = self.any(data)
        needed = cache.length + len(tokens)
        self.overwrite(cache)
        try:
            if needed > cache.capacity:
                self.pool.resize(cache, needed + ahead)
            self.contents.write(self.pool, cache, tokens)
        except ResourceExhausted:
            assert self.pool.free_pages < max(1, self.pool.pages_for(needed + ahead))
        else:
            self.texts[cache] += tokens
            good = max(0, cache.length - drafts)
            self.pool.register(cache, good)
            self.leave(cache, good // PAGE * PAGE)
            self.shown[cache] = max(self.shown[cache], good // PAGE * PAGE)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        cache = self.any(data)
        length = data.draw(st.integers(0, cache.length))
        cache.truncate(length)
        del self.texts[cache][length:]

    @precondition(lambda self: self.sessions)
    @rule(more=st.integers(0, 9), data=st.data())
    def resize(self, more: int, data: st.DataObject) -> None:
        cache = self.any(data)
        try:
            self.pool.resize(cache, cache.length + more)
        except ResourceExhausted:
            assert self.pool.free_pages < max(1, self.pool.pages_for(cache.length + more))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        cache = self.any(data)
        self.leave(cache, cache.length)
        self.sessions.remove(cache)
        del self.texts[cache]
        self.pool.release(cache)
        assert (cache.pages, cache.length) == ([], 0)

    @precondition(lambda self: self.sessions and self.pages != BIG)
    @rule(data=st.data())
    def distrust(self, data: st.DataObject) -> None:
        cache = self.any(data)
        self.pool.distrust(cache)
        assert not self.pool._tree.cached[cache.pages].any()

    @invariant()
    def all_is_right(self) -> None:
        check_pool(self.pool, self.contents, self.sessions)
        for cache, text in self.texts.items():
            self.contents.check(self.pool, cache, text)


class FullPoolMachine(PoolMachine):
    """Any order of the calls of a pool that evicts now and then."""

    pages = 5


class BigPoolMachine(PoolMachine):
    """Any order of the calls of a pool that never needs to evict."""

    pages = BIG


def common(some: Sequence[int], others: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(some, others, strict=False)) if a != b), min(len(some), len(others)))


def run(machine: type[PoolMachine], examples: int = 60) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
            report_multiple_bugs=False,
        ),
    )


@pytest.mark.parametrize("machine", [PoolMachine, FullPoolMachine, BigPoolMachine])
def test_in_any_order_of_calls_a_session_reads_its_own_text_and_finds_what_there_is(machine) -> None:
    run(machine)


# === single rules ===


def test_the_end_of_the_least_recently_used_text_is_evicted_first() -> None:
    pool, contents = pool_of(6), Contents()
    first, second = [1] * 2 * PAGE, [2] * 3 * PAGE
    left(pool, contents, first)
    left(pool, contents, second)
    pool.release(pool.open(first))  # used again
    pool.allocate(2 * PAGE)  # one page is blank
    assert [pool.open(text).length for text in (first, second)] == [2 * PAGE, 2 * PAGE]


def test_the_least_recently_used_page_of_the_key_with_most_is_evicted_first() -> None:
    pool, contents = pool_of(8), Contents()
    left(pool, contents, [1] * PAGE, "few")
    for tag, token in enumerate((2, 3, 4)):
        left(pool, contents, [token] * 2 * PAGE, f"many/{tag}")  # an edge may tell between any number of its own
    with pool.lend(4):
        cached = [pool.open(text, isolation).length for text, isolation in (([1] * PAGE, "few"), ([4] * 8, "many/2"))]
    assert cached == [PAGE, 2 * PAGE], "a key that leaves many texts makes room for itself"


def test_pages_after_one_that_is_evicted_are_blank_again() -> None:
    pool, contents = pool_of(4), Contents()
    text = [1] * 2 * PAGE
    once, twice = (extended(pool, contents, pool.open(), text) for _ in range(2))
    for cache in (once, twice):
        pool.register(cache, cache.length)  # both have computed the same; that of the first is known
    pool.release(once)
    extended(pool, contents, twice, [2] * PAGE)
    taken = extended(pool, contents, pool.open(), [3] * PAGE)  # evicts the last page of `once`, so that none is blank
    check_pool(pool, contents, [twice, taken])
    pool.release(twice)
    check_pool(pool, contents, [taken])
    assert pool.open([*text, *[2] * PAGE]).length == 3 * PAGE, "known again by pages of its own"


def test_texts_whose_tokens_have_one_hash_are_told_apart() -> None:
    pool, contents = pool_of(9), Contents()
    some, others = [1] * PAGE, [1 + (1 << 61) - 1] * PAGE
    assert hash(tuple(some)) == hash(tuple(others))
    left(pool, contents, [*some, *some])
    assert pool.open([*others, *some]).length == 0


def test_a_conversation_goes_on_where_it_lies_and_reads_a_view() -> None:
    pool, contents = pool_of(40), Contents()
    text: list[int] = []
    where = set()
    for turn in range(10):
        cache = pool.open(text)
        assert cache.length == len(text), "a turn reads only what is new"
        pool.resize(cache, len(text) + 30)
        contents.write(pool, cache, [turn] * 6)
        text += [turn] * 6
        contents.check(pool, cache, text)
        assert cache.contiguous
        where.add(cache.pages[0])
        pool.resize(cache, len(text))
        pool.release(cache)
    assert len(where) == 1, "nothing is copied"


def test_a_conversation_in_a_full_pool_still_lies_side_by_side() -> None:
    pool, contents = pool_of(30), Contents()
    for i in range(20):
        left(pool, contents, [i] * 9)
    text: list[int] = []
    for turn in range(10):
        cache = pool.open(text)
        assert cache.length == len(text)
        extended(pool, contents, cache, [100 + turn] * 6)
        text += [100 + turn] * 6
        contents.check(pool, cache, text)
        assert cache.contiguous, "what is cached in its way must move"
        check_pool(pool, contents, [cache])
        pool.release(cache)
        left(pool, contents, [50 + turn] * 5)


def test_shared_pages_are_copied_side_by_side_only_where_half_of_the_pool_is_blank() -> None:
    for pages, side_by_side in ((20, True), (10, False)):
        pool, contents = pool_of(pages), Contents()
        text = [1] * 3 * PAGE
        first = extended(pool, contents, pool.open(), text)
        pool.register(first, first.length)
        pool.resize(first, 4 * PAGE)
        second = extended(pool, contents, pool.open(text), [2] * PAGE)
        assert second.contiguous == side_by_side
        assert pool.free_pages == pages - (8 if side_by_side else 5)
        contents.check(pool, second, [*text, *[2] * PAGE])
        check_pool(pool, contents, [first, second])


def test_an_isolation_of_which_nothing_is_left_is_forgotten() -> None:
    pool, contents = pool_of(4), Contents()
    for i in range(9):
        left(pool, contents, [1] * 10, str(i))
        assert pool.open([1] * 10, str(i + 1)).length == 0
    assert len(pool._tree._roots) <= 2


def test_what_a_session_holds_that_is_not_trusted_is_found_by_nobody() -> None:
    pool, contents = pool_of(20), Contents()
    for length in (2, 10):  # within the first page, and beyond it
        left(pool, contents, [1] * length)
        cache = pool.open([1] * length)
        pool.distrust(cache)
        extended(pool, contents, cache, [1] * 9)
        pool.release(cache)
        assert pool.open([1] * length).length == 0
    holder = extended(pool, contents, pool.open(), [1] * 3)
    left(pool, contents, [1, 1, 2])
    pool.distrust(pool.open([1, 1, 2, 3]))  # the end of another text
    pool.distrust(pool.open([1, 1, 3]))  # a copy of a part of it
    assert pool.open([1, 1]).length == 0
    pool.release(holder)
    left(pool, contents, [1] * 10)
    assert pool.open([1] * 10).length == 10


def test_a_step_without_memory_for_a_shared_page_says_so_and_moves_no_other_text(monkeypatch) -> None:
    backend = TableBackend(lambda text: (0.0,) * 5)
    pool = backend.target.pool

    def row(handle: Any, tokens: tuple[int, ...], transcript: tuple[int, ...]) -> StepRow:
        return StepRow(handle, tokens, VerificationInput(Sampling(), list(transcript), len(transcript), ()))

    text = (1, 2, 3, 4, 1, 2)
    first, other = backend.open(), backend.open()
    backend.reserve(first, len(text))
    backend.reserve(other, PAGE)
    backend.step([row(first, text, text)])
    shares = backend.open(text[: PAGE + 1])
    backend.truncate(shares, 2)  # inside a page that both have
    copy, lacks = pool._copy, torch.OutOfMemoryError("no memory for a copy")

    def copy_nothing(moves: dict[int, int]) -> None:
        if moves:
            raise lacks
        copy(moves)

    monkeypatch.setattr(pool, "_copy", copy_nothing)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        backend.step([row(shares, text[2:4], text[:4]), row(other, (3, 4, 1), (3, 4, 1))])
    assert raised.value is lacks
    assert (first.length, other.length) == (len(text), 0)


@pytest.mark.parametrize("calls", range(4))
def test_a_copy_that_fails_leaves_nothing_wrong_to_find(calls, monkeypatch) -> None:
    pool, contents = pool_of(8), Contents()
    for i in range(4):
        left(pool, contents, [i] * 8)
    cache = pool.open([0] * 8)
    write = torch.Tensor.__setitem__
    count = iter(range(100))

    def setitem(tensor: torch.Tensor, index: object, value: object) -> None:
        if next(count) == calls:
            write(tensor, index, value)
            raise RuntimeError("it happens once")
        write(tensor, index, value)

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "__setitem__", setitem)
        with pytest.raises(RuntimeError):
            pool.resize(cache, 16)
    check_pool(pool, contents, [cache])
    assert cache.length == 0
    extended(pool, contents, cache, [0] * 8)
    contents.check(pool, cache, [0] * 8)
    for i in range(4):
        contents.check(pool, found := pool.open([i] * 8), [i] * found.length)


def test_a_device_that_gives_no_slots_leaves_the_pool_as_it_was(monkeypatch) -> None:
    pool, contents = pool_of(12), Contents()
    left(pool, contents, [1] * 10)
    held = pool.open([1] * 8)

    def slots_of(pages: list[int]) -> torch.Tensor:
        if pages:
            raise RuntimeError("it happens once")
        return torch.empty(0, dtype=torch.int64)

    with monkeypatch.context() as patched:
        patched.setattr(pool, "slots_of", slots_of)
        for fails in (lambda: pool.open([1] * 10), lambda: pool.resize(held, 12)):
            with pytest.raises(RuntimeError):
                fails()
    check_pool(pool, contents, [held])
    assert pool.open([1] * 10).length == 10


def test_growth_that_cannot_be_had_leaves_a_session_as_it_was() -> None:
    pool, contents = pool_of(8), Contents()
    cache, _ = pool.allocate(8), pool.allocate(16)
    contents.write(pool, cache, range(8))
    for tokens, retry_after_s in ((20, 1.0), (36, 0.0)):
        with pytest.raises(ResourceExhausted) as caught:
            pool.resize(cache, tokens)
        assert caught.value.retry_after_s == retry_after_s
    assert (cache.pages, pool.free_pages) == ([0, 1], 2)
    with pytest.raises(ValueError, match="cannot hold"):
        pool.resize(cache, 7)
    for length in (9, -1):
        with pytest.raises(ValueError, match="cannot truncate"):
            cache.truncate(length)


# === what the machine would find ===


def find_without_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(tree: PrefixTree, isolation: str, tokens: Sequence[int], page_size: int) -> list[CachedPage]:
        pages = {each.tokens: each for each in tree._by_page.values()}
        found = []
        for start in range(0, len(tokens) - page_size + 1, page_size):
            if (page := pages.get(tuple(tokens[start : start + page_size]))) is None:
                break
            found.append(page)
        return found

    monkeypatch.setattr(PrefixTree, "find", find)


def isolate_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    find, add = PrefixTree.find, PrefixTree.add
    monkeypatch.setattr(PrefixTree, "find", lambda tree, _, *rest: find(tree, "", *rest))
    monkeypatch.setattr(PrefixTree, "add", lambda tree, _, *rest: add(tree, "", *rest))


def write_to_shared_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedKVCache, "begin_write", lambda *_: None)


def evict_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixTree, "hold", lambda tree, page: None)


def move_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedKVCache, "_copy", lambda pool, moves: None)


def keep_what_was_truncated(monkeypatch: pytest.MonkeyPatch) -> None:
    def truncate(cache: SessionCache, length: int) -> None:
        del cache.tokens[length:]

    monkeypatch.setattr(SessionCache, "truncate", truncate)


def lose_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    drop = PagedKVCache._drop
    monkeypatch.setattr(PagedKVCache, "_drop", lambda pool, pages: drop(pool, pages[1:]))


def forget_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixTree, "closest", lambda *_: (None, 0))


def ignore_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find a page whose text has another first token."""
    add, find = PrefixTree.add, PrefixTree.find

    def masked(tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(0 if i % PAGE == 0 else token for i, token in enumerate(tokens))

    monkeypatch.setattr(PrefixTree, "add", lambda tree, of, last, text, page: add(tree, of, last, masked(text), page))
    monkeypatch.setattr(PrefixTree, "find", lambda tree, of, text, size: find(tree, of, masked(text), size))


def take_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take one position more of a page that agrees in part."""
    closest = PrefixTree.closest

    def wrong(tree: PrefixTree, isolation: str, last: CachedPage | None, text: Sequence[int]) -> Any:
        page, agreed = closest(tree, isolation, last, text)
        return page, min(agreed + 1, len(text), len(page.tokens)) if page is not None else 0

    monkeypatch.setattr(PrefixTree, "closest", wrong)


def remember_the_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find pages by their text still after others got their room."""

    def evict(tree: PrefixTree) -> None:
        gone = tree.next_to_evict()
        del tree._idle[gone.key][gone]
        del tree._by_page[gone.page]
        tree.cached[gone.page] = False

    monkeypatch.setattr(PrefixTree, "evict", evict)


@pytest.mark.parametrize(
    ("defect", "machine"),
    [
        (find_without_parents, PoolMachine),
        (isolate_nobody, PoolMachine),
        (write_to_shared_pages, PoolMachine),
        (evict_what_is_held, PoolMachine),
        (move_without_a_copy, PoolMachine),
        (keep_what_was_truncated, BigPoolMachine),
        (lose_pages, PoolMachine),
        (forget_ends, BigPoolMachine),
        (ignore_a_token, PoolMachine),
        (take_one_more, BigPoolMachine),
        (remember_the_evicted, FullPoolMachine),
    ],
)
def test_the_machine_finds_a_defect(defect, machine, monkeypatch) -> None:
    defect(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):  # by what a session reads, or by the pool's own search
        run(machine, examples=400)
