"""One list of texts on one engine, with shared KV pages, without, and with so few that all are evicted: all are equal.

The texts begin alike, go on from each other in new streams and in turns, are reopened half-way and asked for again, at
temperature 0 and above, with penalties, cuts and a grammar. Engines that share pages wrongly must write other texts.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from collecting_outbox import CollectingOutbox
from fuzzed_fleet import HashedGrammar

from outrider.cloud.serving.engine import Engine
from outrider.cloud.target.backend import StepRow
from outrider.cloud.target.distribution import VerificationInput
from outrider.cloud.target.kv_cache import PagedKVCache
from outrider.cloud.target.prefix_tree import CachedPage, PrefixTree
from outrider.cloud.target.target import Target, load_target
from outrider.cloud.target.transformers_backend import TransformersBackend
from outrider.cloud.testing import save_tiny_target
from outrider.cloud.verifier_config import VerifierConfig
from outrider.proto.session import VerifierRules
from outrider.proto.types import (
    Commit,
    CommittedToken,
    Continue,
    FinishReason,
    Grammar,
    GrammarKind,
    Guarantee,
    Open,
    Opened,
    Sampling,
    token_ids,
)

PAGE = 16
CONTEXT = 192
MANY, FEW = 400, CONTEXT // PAGE  # pages; the few hold one text of full length
SETTINGS = (
    Sampling(max_tokens=24, temperature=1.0, seed=1, ignore_eos=True),
    Sampling(max_tokens=24, temperature=1.0, seed=2, ignore_eos=True),
    Sampling(max_tokens=20, ignore_eos=True),
    Sampling(max_tokens=24, temperature=0.9, seed=3, repetition_penalty=1.3, presence_penalty=0.4, top_p=0.9),
    Sampling(max_tokens=24, temperature=1.2, seed=4, grammar=Grammar(GrammarKind.REGEX, "half"), top_k=30),
    Sampling(max_tokens=40, temperature=1.0, seed=5, stop_tokens=(7, 8, 9, 10)),
)


@dataclass
class Stream:
    """One text as it comes.

    Attributes:
        frame: what opens it, as of its present turn.
        key: of its session in the engine.
        tokens: committed tokens of the turn.
        finish: why the turn has ended; None: it has not.
    """

    frame: Open
    key: int
    outbox: CollectingOutbox = field(default_factory=CollectingOutbox)
    tokens: list[CommittedToken] = field(default_factory=list)
    finish: FinishReason | None = None

    @property
    def transcript(self) -> tuple[int, ...]:
        return (*self.frame.prompt, *token_ids(self.tokens))


class Bench:
    """An engine, and everything that was written on it.

    Attributes:
        written: [texts] tokens with their log probabilities and why the text ended, in the order of the list.
        cached_tokens: tokens that texts found computed.
    """

    def __init__(self, engine: Engine, target: Target, threads: Executor, *, shares: bool) -> None:
        self.written: list[tuple[tuple[CommittedToken, ...], FinishReason | None]] = []
        self.cached_tokens = 0
        self._engine = engine
        self._target = target
        self._threads = threads
        self._shares = shares
        self._keys, self._names = itertools.count(), itertools.count()

    def frame(self, prompt: Sequence[int], sampling: Sampling, **options: Any) -> Open:
        sha256 = self._target.tokenizer_sha256
        named = {"drafting": False, "logprobs": True, "top_logprobs": 2} | options
        return Open("tiny", sha256, tuple(prompt), sampling, f"text-{next(self._names)}", **named)

    def write(self, frames: Sequence[Open]) -> list[Stream]:
        """Write texts at the same time, to their ends."""
        streams = [self.open(frame) for frame in frames]
        self.finish(streams)
        return streams

    def open(self, frame: Open) -> Stream:
        stream = Stream(frame, next(self._keys))
        isolation = "" if self._shares else str(stream.key)
        self._engine.post_open(stream.key, stream.frame, stream.outbox, self._matcher(stream.frame), isolation)
        return stream

    def turn(self, stream: Stream, start: int, prompt: tuple[int, ...], sampling: Sampling) -> None:
        """Begin another turn on the session of a text that has ended."""
        transcript = (*stream.transcript[:start], *prompt)
        stream.frame = replace(stream.frame, prompt=transcript, sampling=sampling, committed=())
        stream.tokens, stream.finish = [], None
        frame = Continue(start, prompt, sampling, 1)
        self._engine.post_frame(stream.key, frame, lambda: None, self._matcher(stream.frame))

    def finish(self, streams: Sequence[Stream], *, close: bool = True) -> None:
        """Take what comes until all texts have ended, and note it in their order."""
        for stream in streams:
            while stream.finish is None:
                self._take(stream, stream.outbox.items.get(timeout=60))
        for stream in streams:
            self.written.append((tuple(stream.tokens), stream.finish))
            if close:
                self._engine.post_close(stream.key)

    def _take(self, stream: Stream, item: object) -> None:
        if isinstance(item, Commit):
            stream.tokens += item.tokens
            stream.finish = item.finish
            self.cached_tokens += item.cached_tokens
        else:
            assert isinstance(item, Opened), item

    def _matcher(self, frame: Open) -> HashedGrammar | None:
        grammar = frame.sampling.grammar
        if grammar is None:
            return None
        return HashedGrammar(grammar, self._target.vocab_size, self._threads, frame.committed)


def tokens(seed: int, count: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(11, 60), k=count))


def write_the_list(bench: Bench) -> None:
    """Write all texts; those of one group run at the same time."""
    prompt, other = tokens(1, 40), tokens(2, 40)
    twin = (prompt[0] % 49 + 11, *prompt[1:])  # differs in its first token alone
    first = bench.write([bench.frame(prompt, sampling) for sampling in SETTINGS])  # as `n` texts of one request
    bench.write([bench.frame(each, sampling) for each in (twin, other, prompt[:21]) for sampling in SETTINGS[1:4]])
    # Chats in new streams, each on the answer before.
    chats = first
    for i in range(2):
        chats = bench.write([bench.frame((*chat.transcript, *tokens(i, 5)), SETTINGS[i + 1]) for chat in chats[:4]])
    # Turns of kept sessions: on all of the text, and on its beginning.
    kept = [bench.open(bench.frame(prompt, each, keep_s=60.0)) for each in SETTINGS[2:5]]
    bench.finish(kept, close=False)
    before: list[Open] = []
    for cut, close in ((0, False), (30, True)):
        for stream, sampling in zip(kept, SETTINGS[3:], strict=True):
            length = len(stream.transcript)
            before.append(bench.frame((*stream.transcript, *tokens(7, 3)), sampling))
            bench.turn(stream, length - min(cut, len(stream.tokens)), tokens(cut, 9), sampling)
        bench.finish(kept, close=close)
    bench.write(before)  # on what the turns have dropped
    # Texts that another stream has begun, and the first ones once more.
    halves = [(stream.frame, token_ids(stream.tokens[: len(stream.tokens) // 2])) for stream in first]
    bench.write([replace(frame, session=f"half-{i}", committed=half) for i, (frame, half) in enumerate(halves)])
    bench.write([replace(stream.frame, session=f"again-{i}") for i, stream in enumerate(first)])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = save_tiny_target(
        tmp_path_factory.mktemp("target"), num_hidden_layers=2, initializer_range=0.4, sharpness=4.0
    )
    return load_target(str(folder), kv_tokens=CONTEXT)


@contextmanager
def serving(target: Target, pages: int, *, shares: bool) -> Iterator[Bench]:
    target.pool = PagedKVCache(pages * PAGE, PAGE, torch.float32, torch.device("cpu"))
    rules = VerifierRules("v", "tiny", target.tokenizer_sha256, target.vocab_size, CONTEXT, frozenset({2}), keep_s=60.0)
    engine = Engine(TransformersBackend(target), rules, VerifierConfig(threads=1, max_sessions=32))
    engine.start()
    try:
        with ThreadPoolExecutor(1) as threads:
            yield Bench(engine, target, threads, shares=shares)
    finally:
        engine.stop()


def written(target: Target, pages: int, *, shares: bool) -> Bench:
    with serving(target, pages, shares=shares) as bench:
        write_the_list(bench)
    return bench


@pytest.fixture(scope="module")
def alone(target: Target) -> Bench:
    """Each stream on pages of its own."""
    return written(target, MANY, shares=False)


@pytest.fixture
def evicted(monkeypatch: pytest.MonkeyPatch) -> list[CachedPage]:
    """Pages whose text was forgotten for their room."""
    found: list[CachedPage] = []
    evict = PrefixTree.evict

    def noting(self: PrefixTree) -> Any:
        found.append(self.next_to_evict())
        return evict(self)

    monkeypatch.setattr(PrefixTree, "evict", noting)
    return found


def test_a_step_without_memory_for_a_shared_page_says_so_and_moves_no_other_text(target, monkeypatch) -> None:
    target.pool = PagedKVCache(8 * PAGE, PAGE, torch.float32, torch.device("cpu"))
    backend = TransformersBackend(target)

    def row(handle: Any, tokens: tuple[int, ...], transcript: tuple[int, ...]) -> StepRow:
        return StepRow(handle, tokens, VerificationInput(Sampling(), list(transcript), len(transcript), ()))

    text = tuple(range(3, 3 + PAGE + 4))
    first, other = backend.open(), backend.open()
    backend.reserve(first, len(text))
    backend.reserve(other, PAGE)
    backend.step([row(first, text, text)])
    shares = backend.open(text[: PAGE + 1])
    backend.truncate(shares, 4)  # inside a page that both have
    copy, lacks = target.pool._copy, torch.OutOfMemoryError("no memory for a copy")

    def copy_nothing(moves: dict[int, int]) -> None:
        if moves:
            raise lacks
        copy(moves)

    monkeypatch.setattr(target.pool, "_copy", copy_nothing)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        backend.step([row(shares, text[4:8], text[:8]), row(other, (7, 8, 9), (7, 8, 9))])
    assert raised.value is lacks
    assert (first.length, other.length) == (len(text), 0)


def test_the_list_has_what_it_should(target, alone) -> None:
    assert target.passes.guarantee is not Guarantee.DISTRIBUTION, "or log probabilities may differ by rounding"
    finishes = [finish for _, finish in alone.written]
    assert {FinishReason.LENGTH, FinishReason.EOS, FinishReason.STOP_TOKEN} <= {*finishes}
    texts = [token_ids(text) for text, _ in alone.written]
    assert len(texts) == 6 + 9 + 8 + 9 + 6 + 12
    assert texts[-6:] == texts[:6], "asked for again"
    assert len({*texts}) > 30
    told = [(token.logp, token.logprob, *token.top) for text, _ in alone.written for token in text]
    assert all(None not in each and len(each) == 4 for each in told)


def test_texts_are_those_of_an_engine_that_shares_nothing(target, alone, evicted) -> None:
    shared = written(target, MANY, shares=True)
    assert shared.written == alone.written
    assert shared.cached_tokens > 3 * alone.cached_tokens > 0, "without sharing only kept sessions find their own"
    assert evicted == []


def test_texts_are_the_same_where_pages_are_evicted_all_the_time(target, alone, evicted) -> None:
    starved = written(target, FEW, shares=True)
    assert starved.written == alone.written
    assert len(evicted) > 50
    assert starved.cached_tokens > 0


# --- engines that share pages wrongly ---


def ignore_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find a page whose text has another first token."""
    add, find = PrefixTree.add, PrefixTree.find

    def masked(tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(0 if i % PAGE == 0 else token for i, token in enumerate(tokens))

    def wrong_add(self: PrefixTree, isolation: str, last: CachedPage | None, text: tuple[int, ...], page: int) -> Any:
        return add(self, isolation, last, masked(text), page)

    def wrong_find(self: PrefixTree, isolation: str, text: Sequence[int], page_size: int) -> Any:
        return find(self, isolation, masked(text), page_size)

    monkeypatch.setattr(PrefixTree, "add", wrong_add)
    monkeypatch.setattr(PrefixTree, "find", wrong_find)


def leave_pages_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Move no content of pages that change places or are shared in part."""
    monkeypatch.setattr(PagedKVCache, "_copy", lambda *_: None)


def take_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take one position more of a page that agrees in part."""
    closest = PrefixTree.closest

    def wrong(self: PrefixTree, isolation: str, last: CachedPage | None, text: Sequence[int]) -> Any:
        page, agreed = closest(self, isolation, last, text)
        return page, min(agreed + 1, len(text), len(page.tokens)) if page is not None else 0

    monkeypatch.setattr(PrefixTree, "closest", wrong)


def remember_the_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find pages by their text still after others got their room."""

    def evict(self: PrefixTree) -> None:
        gone = self.next_to_evict()
        del self._idle[gone.key][gone]
        del self._by_page[gone.page]
        self.cached[gone.page] = False

    monkeypatch.setattr(PrefixTree, "evict", evict)


@pytest.mark.parametrize(
    ("defect", "pages"),
    [(ignore_a_token, MANY), (leave_pages_behind, MANY), (take_one_more, MANY), (remember_the_evicted, FEW)],
)
def test_an_engine_that_shares_wrongly_writes_other_texts(defect, pages, target, alone, monkeypatch) -> None:
    defect(monkeypatch)
    wrong = written(target, pages, shares=True)
    texts, expected = ([token_ids(text) for text, _ in bench.written] for bench in (wrong, alone))
    assert texts != expected
