"""The grammar of a session: compiled when it opens, asked at every position, in threads of its own.

The parsers are llguidance's. A grammar comes from a stranger: its size is bounded when it is decoded, it is compiled in
a child process first, which is killed where it takes too much, what llguidance may spend on a mask and on a text is
limited, and neither the event loop nor the engine's thread waits for it. One that costs much slows down its own session
only.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from outrider.cloud.grammar.grammar_compiler import (
    FIELD,
    STACK_BYTES,
    TRIAL_S,
    GrammarTrial,
    TooCostly,
    compile_grammar,
    make_tokenizer,
    one_line,
)
from outrider.proto.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from outrider.proto.plumbing.extras import lacking
from outrider.proto.types import Grammar, common_length

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

COMPILING_THREADS = 2
RESUMING_THREADS = COMPILING_THREADS + 1  # one of them is for texts at their beginning
MASKING_THREADS = max(1, min(8, (os.cpu_count() or 2) - 1))
KEPT_GRAMMARS = 16
WAIT_S = 4 * TRIAL_S  # behind others
KEPT_REFUSALS = 256
REFUSED_FOR_S = 60.0  # without another trial
# Processor time that a text may be ahead of what each token and each row of a mask grants it. In the slowest of eight
# grammars that no rule makes ambiguous, on a vocabulary of 150,000, they take 6 us and 3 ms.
AHEAD_S = 2.0
TOKEN_S = 50e-6
ROW_S = 0.03


class _Pools(NamedTuple):
    """Threads: of grammars that are tried and compiled, of those that are known, and of masks."""

    compiling: ThreadPoolExecutor
    resuming: ThreadPoolExecutor
    masking: ThreadPoolExecutor


DraftsBeside = tuple[int, tuple[int, ...]]  # drafts beside a block, after how many of the block's
Beside = tuple[DraftsBeside, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Allowed:
    """The tokens that the grammar allows in a step.

    Attributes:
        block: [k] the first of the drafts asked about, as far as the grammar allows them and goes on after them.
        tokens: [k + 1, vocab] bool; row j: the tokens that may follow the committed text and block[:j], at least one.
        branches: by the drafts asked about beside it, [m, vocab] bool for the first m of them, as far as the grammar
            allows them and goes on after them; row j: the tokens that may follow drafts[: j + 1], at least one. Those
            of which it allows none, or which do not leave this block, are not there.
    """

    block: tuple[int, ...]
    tokens: np.ndarray
    branches: Mapping[DraftsBeside, np.ndarray] = field(default_factory=dict)

    def about(self, block: tuple[int, ...], branches: Beside) -> Allowed:
        """Return the answer as far as it is about the drafts `block` [k] and those beside them."""
        agreed = common_length(self.block, block)
        found: dict[DraftsBeside, np.ndarray] = {}
        for (index, drafts), ((asked_index, asked), tokens) in itertools.product(branches, self.branches.items()):
            known = tokens[: common_length(asked, drafts)]
            if asked_index == index <= agreed and len(known) > len(found.get((index, drafts), ())):
                found[index, drafts] = known
        return Allowed(block[:agreed], self.tokens[: agreed + 1], found)


class Grammars:
    """The grammars of one target, compiled; the first one builds the tokenizer's trie."""

    def __init__(
        self,
        tokenizer_json: str,
        vocab_size: int,
        eos_tokens: frozenset[int],
        killed: Callable[[], None] = lambda: None,
    ) -> None:
        """Call `killed`, from another thread, whenever a grammar is given up because of its cost."""
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_tokens = eos_tokens
        self._starting = threading.Lock()
        self._loading = threading.Lock()
        self._keeping = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._refused: OrderedDict[Grammar, tuple[str, float]] = OrderedDict()  # why, and until when
        self._killed = killed
        self._trials = [GrammarTrial(tokenizer_json, vocab_size, eos_tokens) for _ in range(COMPILING_THREADS)]
        self._idle_trials = deque(self._trials)  # as many as threads that use them
        self._pools: _Pools | None = None
        self._trial_turns = FairTurns(COMPILING_THREADS)
        self._resume_turns = FairTurns(COMPILING_THREADS)

    def begin(self, grammar: Grammar, committed: Sequence[int] = ()) -> Future[GrammarMatcher]:
        """Make the matcher of a text that has come as far as `committed`, in another thread.

        Raises, from the future:
            InvalidArgument: the grammar is wrong, costs too much or allows nothing; `committed` does not follow it.
            FailedPrecondition: this target or this installation cannot serve grammars.
            Unavailable: no process can be started that compiles it.
        """
        return self._threads().compiling.submit(lambda: self._resumed(self._matcher(grammar), committed))

    async def matcher(
        self, grammar: Grammar | None, committed: Sequence[int] = (), owner: str = ""
    ) -> GrammarMatcher | None:
        """Return the matcher of a grammar, or refuse the grammar before any step; None: there is none.

        One that has not been compiled, or has text to read, waits for a turn of its `owner`, such as an API key.

        Raises:
            ResourceExhausted: others keep it waiting; `retry_after_s` is set.
            OutriderError: those of `begin`.
        """
        if grammar is None:
            return None
        try:
            async with asyncio.timeout(WAIT_S):
                compiled = self._known(grammar)
                if compiled is not None and not committed:
                    return await asyncio.wrap_future(self._threads().resuming.submit(self._resumed, compiled, ()))
                turns = self._trial_turns if compiled is None else self._resume_turns
                await turns.take(owner)
                if compiled is None:
                    resuming = self.begin(grammar, committed)
                else:
                    resuming = self._threads().resuming.submit(self._resumed, compiled, committed)
                loop = asyncio.get_running_loop()
                resuming.add_done_callback(  # work that nobody waits for any more still has its turn
                    lambda _: loop.is_closed() or loop.call_soon_threadsafe(turns.give_back, owner)
                )
                return await asyncio.wrap_future(resuming)
        except TimeoutError as error:
            waits = "has to wait too long behind others to be compiled; try again"
            raise ResourceExhausted(waits, field=FIELD, retry_after_s=1.0) from error

    def close(self) -> None:
        """End the threads after their present work, and what compiles in a child at once."""
        for trial in self._trials:
            trial.close()
        for pool in self._pools or ():
            pool.shutdown(wait=False, cancel_futures=True)

    def _threads(self) -> _Pools:
        with self._starting:
            if self._pools is None:
                before = threading.stack_size(STACK_BYTES)
                try:
                    self._pools = _Pools(
                        _pool("compile", COMPILING_THREADS),
                        _pool("resume", RESUMING_THREADS),
                        _pool("mask", MASKING_THREADS),
                    )
                finally:
                    threading.stack_size(before)
            return self._pools

    def _resumed(self, compiled: LLMatcher, committed: Sequence[int]) -> GrammarMatcher:
        masking = self._threads().masking
        matcher = GrammarMatcher(compiled.deep_copy, self._vocab_size, self._eos_tokens, masking)
        matcher.resume(list(committed))
        return matcher

    def _known(self, grammar: Grammar) -> LLMatcher | None:
        """Return what a grammar has been compiled to, or None; raise InvalidArgument if it was refused lately."""
        with self._keeping:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar]
            why, until = self._refused.get(grammar, ("", 0.0))
        if until > time.monotonic():
            raise InvalidArgument(why, field=FIELD)
        return None

    def _matcher(self, grammar: Grammar) -> LLMatcher:
        compiled = self._known(grammar)
        if compiled is None:
            self._tokenizer_of_target()
            self._try(grammar)
            compiled = self._compile(grammar)
            with self._keeping:
                self._compiled[grammar] = compiled
                while len(self._compiled) > KEPT_GRAMMARS:
                    self._compiled.popitem(last=False)
        return compiled.deep_copy()

    def _try(self, grammar: Grammar) -> None:
        """Have a child compile a grammar; remember for a while why it may not be compiled here."""
        trial = self._idle_trials.pop()
        try:
            trial.check(grammar)
        except InvalidArgument as refusal:
            if isinstance(refusal, TooCostly):
                self._killed()
            with self._keeping:
                self._refused[grammar] = refusal.message, time.monotonic() + REFUSED_FOR_S
                while len(self._refused) > KEPT_REFUSALS:
                    self._refused.popitem(last=False)
            raise
        finally:
            self._idle_trials.append(trial)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        return compile_grammar(grammar, self._tokenizer_of_target())

    def _tokenizer_of_target(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is not None:
                return self._tokenizer
            if not self._eos_tokens:
                raise FailedPrecondition("the target has no EOS token, with which such a text could end", field=FIELD)
            try:
                self._tokenizer = make_tokenizer(self._tokenizer_json, self._vocab_size, self._eos_tokens)
            except ImportError as error:
                raise FailedPrecondition(lacking("cloud", "llguidance"), field=FIELD) from error
            except ValueError as error:
                message = f"the target's tokenizer cannot serve grammars: {one_line(str(error))}"
                raise FailedPrecondition(message, field=FIELD) from error
            return self._tokenizer


class GrammarMatcher:
    """The matcher of one text; its state is that of the committed text, whatever drafts were asked about."""

    def __init__(
        self, fresh: Callable[[], LLMatcher], vocab_size: int, eos_tokens: frozenset[int], threads: Executor
    ) -> None:
        """Begin a text; `fresh` makes a matcher at its beginning, `threads` compute masks."""
        self._fresh = fresh
        self._vocab_size = vocab_size
        self._eos_tokens = eos_tokens
        self._threads = threads
        self._matcher = fresh()
        self._left_s = AHEAD_S  # of processor time
        self._text: list[int] = []
        self._consumed = 0  # tokens of the text that the matcher has seen,
        self._drafts = 0  # and of drafts after them
        self._asked: tuple[tuple[int, ...], Beside] = ((), ())
        self._answer: Future[Allowed] | None = None

    def resume(self, committed: list[int]) -> None:
        """Take over a text, and ask once what may follow, so that a grammar that costs too much is refused now.

        Raises:
            InvalidArgument: `committed` does not follow the grammar, or it costs too much.
        """
        self._text = committed
        if not self._catch_up():
            raise InvalidArgument("does not follow sampling.grammar", field="open.committed")
        self._allowed(())

    # --- the engine's thread ---

    def ask(self, block: tuple[int, ...], answered: Callable[[], None], branches: Beside = ()) -> Future[Allowed]:
        """Ask what is allowed after the committed text and the drafts `block` [k]; while busy, return that answer.

        `answered` is called from another thread. The future raises InvalidArgument where the grammar is at its end
        without being complete, or has become too costly; where only a branch beside the block comes to such an end, it
        does not.
        """
        if self._answer is None or not (self.busy or self._asked == (block, branches)):
            self._asked = block, branches
            self._answer = self._threads.submit(self._allowed_with, block, branches)
            self._answer.add_done_callback(lambda _: answered())
        return self._answer

    @property
    def asked(self) -> bool:
        return self._answer is not None

    @property
    def busy(self) -> bool:
        """Whether it has been asked and has not answered yet."""
        return self._answer is not None and not self._answer.done()

    def allowed(self, block: tuple[int, ...], branches: Beside = ()) -> Allowed | None:
        """Return its answer, as far as that is about the drafts `block` [k] and those beside; None: there is none yet.

        Raises what `ask` does.
        """
        if self._answer is None or not self._answer.done():
            return None
        return self._answer.result().about(block, branches)

    def advance(self, tokens: tuple[int, ...]) -> None:
        """Note that `tokens` [n] are committed."""
        self._text += tokens
        self._answer = None

    # --- one thread at a time ---

    def _allowed(self, block: tuple[int, ...]) -> Allowed:
        if not self._catch_up():
            raise InvalidArgument(self._complaint(), field=FIELD)
        first = self._row()
        if first is None:  # drafts may have filled what a matcher may keep; without them it must answer
            self._rebuild()
            first = self._row()
        if first is None:
            raise InvalidArgument(self._complaint(), field=FIELD)
        rows = [first]
        for draft in block:
            row = self._row_after(draft) if rows[-1][draft] else None
            if row is None:
                break
            rows.append(row)
        self._back_to_the_text()
        return Allowed(block[: len(rows) - 1], np.stack(rows))

    def _allowed_with(self, block: tuple[int, ...], branches: Beside) -> Allowed:
        answer = self._allowed(block)
        if not branches:
            return answer
        beside = {(index, drafts): self._allowed_beside(answer, index, drafts) for index, drafts in branches}
        return replace(answer, branches={asked: np.stack(rows) for asked, rows in beside.items() if rows})

    def _allowed_beside(self, answer: Allowed, index: int, drafts: tuple[int, ...]) -> list[np.ndarray]:
        """Return what may follow each draft of a branch; none where it does not leave the block, or is not allowed."""
        rows: list[np.ndarray] = []
        if index > len(answer.block):
            return rows
        row = answer.tokens[index]
        if all(map(self._consumed_draft, answer.block[:index])):
            for draft in drafts:
                after = self._row_after(draft) if row[draft] else None
                if after is None:
                    break
                row = after
                rows.append(row)
        self._back_to_the_text()
        return rows

    def _consumed_draft(self, draft: int) -> bool:
        taken = self._takes(draft)
        self._drafts += taken
        return taken

    def _takes(self, token: int) -> bool:
        with self._charged(TOKEN_S):
            return bool(self._matcher.consume_token(token))

    def _row_after(self, draft: int) -> np.ndarray | None:
        """Return `_row` after one token more, or None after EOS: the row before says the same, and nothing follows."""
        if draft in self._eos_tokens or not self._consumed_draft(draft):
            return None
        return self._row()

    def _row(self) -> np.ndarray | None:
        """Return [vocab] bool, the tokens that may come next; None: the matcher has failed or is at a dead end."""
        with self._charged(ROW_S):
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            row = np.unpackbits(bits, bitorder="little").view(bool)[: self._vocab_size]
            if self._matcher.is_error() or not row.any():
                return None
            ends = sum(bool(row[token]) for token in self._eos_tokens)
            if ends and not self._matcher.is_accepting():  # llguidance answers EOS where it gave up
                return None
            return row

    @contextmanager
    def _charged(self, granted_s: float) -> Iterator[None]:
        """Take the time of some work from what the text has left; raise InvalidArgument from then on if it has none."""
        began = time.thread_time()
        yield
        self._left_s = min(AHEAD_S, self._left_s + granted_s - (time.thread_time() - began))
        if self._left_s < 0:
            self._left_s = -math.inf  # its state may be that of drafts
            raise InvalidArgument("takes too long to follow; make it less ambiguous", field=FIELD)

    def _back_to_the_text(self) -> None:
        if self._matcher.is_error() or not self._matcher.rollback(self._drafts):
            self._rebuild()
        self._drafts = 0

    def _catch_up(self) -> bool:
        """Feed the matcher the tokens of the text that it has not seen, and return whether it takes them."""
        while self._consumed < len(self._text):
            if not self._takes(self._text[self._consumed]):
                return False
            self._consumed += 1
        return True

    def _rebuild(self) -> None:
        """Replace a matcher that has failed, which it never recovers from, and read the text again."""
        self._matcher = self._fresh()
        self._consumed = 0
        self._catch_up()

    def _complaint(self) -> str:
        why = one_line(self._matcher.get_error()) or "nothing that it allows can come next"
        return f"cannot be followed to its end, or not at a bounded cost; simplify it ({why})"


def _pool(name: str, threads: int) -> ThreadPoolExecutor:
    """Make a pool and start all its threads, which get the stack size of new threads now."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix=f"outrider-grammar-{name}")
    here = threading.Barrier(threads + 1)
    for _ in range(threads):
        pool.submit(here.wait)
    here.wait()
    return pool


class FairTurns:
    """A semaphore for one event loop that is fair between owners: each holds it once at most, and they take turns."""

    def __init__(self, most: int) -> None:
        """Let at most `most` owners hold it at once."""
        self._free = asyncio.Semaphore(most)  # at which one of each owner waits, so that its order is fair
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._having: dict[str, asyncio.Lock] = {}

    async def take(self, owner: str) -> None:
        """Wait until `owner` holds it; `give_back` releases it. A wait that is cancelled takes nothing."""
        lock = self._locks.setdefault(owner, asyncio.Lock())
        await lock.acquire()
        try:
            await self._free.acquire()
        except asyncio.CancelledError:
            lock.release()
            raise
        self._having[owner] = lock

    def give_back(self, owner: str) -> None:
        """Release it for the next owner."""
        self._free.release()
        self._having.pop(owner).release()
