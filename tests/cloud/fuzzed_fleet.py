"""Verifiers whose engines run on a virtual clock, without threads, and fail in every way that is known of them."""

from __future__ import annotations

import itertools
import math
import random
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hashing_model import EOS, HIDDEN, LAYERS, PLAIN, HashingModel, Language, hashing_target

from outrider.cloud.grammar.grammar import Allowed, GrammarMatcher
from outrider.cloud.serving import sessions
from outrider.cloud.serving.batching import Batching
from outrider.cloud.serving.engine import EngineCore
from outrider.cloud.serving.local_source import LocalSource
from outrider.cloud.serving.own_drafter import DraftTask, OwnDrafter
from outrider.cloud.serving.runner import ModelRunner
from outrider.cloud.serving.slots import MAX_UNREAD, Outbox, Owner
from outrider.cloud.serving.verifier_metrics import VerifierMetrics
from outrider.cloud.target.projection import Projection
from outrider.cloud.target.target import FREE, ROUNDED, TILES, TOGETHER
from outrider.cloud.target.transformers_backend import TransformersBackend
from outrider.drafters import ProposalRule
from outrider.drafters.protocol import TokenPrefix
from outrider.proto.errors import OutriderError
from outrider.proto.policy.likely_branches import RUNNERS_UP
from outrider.proto.session.verifier import VerifierRules, VerifierSession
from outrider.proto.types import CloudFrame, Continue, DraftToken, EdgeFrame, Goaway, Grammar, Open, token_ids
from research.simulator.clock import VirtualClock
from research.simulator.simulated_verifier import Link, SimulatedStream

PROJECTION, RANK = "0123456789ab", 3
CONTEXT = 165
RESTART_S = 0.3
SLOWEST_S = 0.4  # more than a piece of a task of drafting takes
NOTICED_S = 0.4
BROKEN_PLAN = "broken-plan"  # begins the names of sessions whose plans fail
STEP_S, ROW_S = 0.005, 0.0002
IDLE_S = 0.5
MAX_LOOKS = 1000  # at one moment


class HashedGrammar(GrammarMatcher):
    """Allows half of the tokens after every text, and EOS; which half, its text decides."""

    def __init__(self, grammar: Grammar, vocab_size: int, threads: Executor, committed: Sequence[int]) -> None:
        super().__init__(lambda: None, vocab_size, frozenset({EOS}), threads)  # type: ignore[arg-type, return-value]
        self._grammar = grammar
        self._text = list(committed)

    def _allowed(self, block: tuple[int, ...]) -> Allowed:
        rows, followed = [allowed_after(self._grammar, self._text, self._vocab_size)], 0
        for draft in block:
            if not rows[-1][draft] or draft == EOS:
                break
            followed += 1
            rows.append(allowed_after(self._grammar, [*self._text, *block[:followed]], self._vocab_size))
        return Allowed(block[:followed], np.stack(rows))

    def _allowed_beside(self, answer: Allowed, index: int, drafts: tuple[int, ...]) -> list[np.ndarray]:
        if index > len(answer.block):
            return []
        self._text, text = [*self._text, *answer.block[:index]], self._text
        try:
            along = self._allowed(drafts)
        finally:
            self._text = text
        return list(along.tokens[1:])


def allowed_after(grammar: Grammar, text: Sequence[int], vocab_size: int) -> np.ndarray:
    """[vocab] bool, the tokens that may follow a text."""
    row = np.random.default_rng(zlib.crc32(repr((grammar.text, *text)).encode())).random(vocab_size) < 0.5
    row[EOS] = True
    row[-1] = True
    return row


class DelayedExecutor(Executor):
    """Does its work some virtual time later, in no order."""

    def __init__(self, clock: VirtualClock, rng: random.Random) -> None:
        self._clock = clock
        self._rng = rng

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(work(*arguments, **named))
            except OutriderError as error:
                future.set_exception(error)

        if self._rng.random() < 0.3:
            run()
        else:
            self._clock.at(self._clock.now + self._rng.choice((0.0001, 0.003, 0.02)), run)
        return future


class EngineStream(SimulatedStream):
    """A stream to an engine, which may end it with an error.

    Attributes:
        grammar: of the present turn.
    """

    grammar: Grammar | None = None

    def __init__(
        self,
        clock: VirtualClock,
        link: Link,
        verifier: FuzzedVerifier,
        received: Callable[[SimulatedStream, CloudFrame], None],
        lost: Callable[[SimulatedStream, OutriderError], None],
    ) -> None:
        super().__init__(clock, link, verifier, received)  # type: ignore[arg-type]
        self._lost = lost

    def send_error(self, error: OutriderError) -> None:
        """Let the stream break at the edge, after the frames before."""
        for arrival, _ in self._link.down(Goaway("takes as long"), self._clock.now):
            self._clock.at(arrival, lambda: self._lost(self, error))


class StreamOutbox(Outbox):
    """Puts the engine's frames on the way of a stream, when the step that made them is over."""

    def __init__(self, fleet: Fleet, stream: EngineStream) -> None:
        self._fleet = fleet
        self._stream = stream

    def put(self, item: CloudFrame | OutriderError) -> None:
        self._fleet.clock.at(self._fleet.now(), partial(self._send, item))

    def _send(self, item: CloudFrame | OutriderError) -> None:
        if isinstance(item, OutriderError):
            self._stream.send_error(item)
        elif self._stream.is_open:
            self._stream.send_down(item)

    def unread(self) -> int:
        return MAX_UNREAD + 1 if self._fleet.rng.random() < 0.02 else 0


# Sources of drafts beside the target, and how often one is met; the last three fail in one way each.
SOURCES = {"none": 3, "whole": 6, "slow": 2, "erring": 2, "hanging": 2}


class DelayedThreads:
    """Threads of a drafter beside the target: tasks are done piece by piece some virtual time later, in any order.

    Attributes:
        hung: tasks that no thread will ever finish.
    """

    num_threads = 2

    def __init__(self, fleet: Fleet, kind: str) -> None:
        self._clock = fleet.clock
        self._now = fleet.now
        self._rng = fleet.drafting_rng
        self._counts = fleet.counts
        self._kind = kind
        self._waiting: list[DraftTask] = []
        self._prefixes: dict[DraftTask, list[int]] = {}  # that its drafts must follow
        self.hung: set[DraftTask] = set()
        self.source: LocalSource | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, task: DraftTask) -> None:
        task.queued_at = self._now()
        self._waiting.append(task)
        if not task.begun and self.source is not None:
            [session] = [each.session for each in self.source._texts.values() if each.task is task]
            self._prefixes[task] = [*session.transcript, *token_ids(session.drafts())]
        late_s = self._rng.choice((0.05, 0.3) if self._kind == "slow" else (0.0, 0.0, 0.001, 0.004, 0.05))
        self._clock.at(self._clock.now + late_s, partial(self._work, task))

    def drop(self, task: DraftTask) -> bool:
        if task.begun or task not in self._waiting:
            return False
        self._waiting.remove(task)
        return True

    def stop(self) -> bool:
        return True

    def _work(self, task: DraftTask) -> None:
        if task not in self._waiting or len(self.hung) == self.num_threads:
            return
        self._waiting.remove(task)
        often = self._rng.random() < 0.1
        try:
            if often and self._kind == "erring":
                raise ValueError("the drafter is broken")
            result = task.work()
        except (ValueError, OutriderError) as error:
            self._counts["failures here"] += 1
            task.answer(task, error)
            return
        if result is not None and (state := task.text._state) is not None:
            prefix = self._prefixes.pop(task)
            read = [*state.tokens, *task.text._unread]  # type: ignore[attr-defined]
            assert read[: len(prefix)] == prefix, "its drafts follow another text"
        if often and self._kind == "hanging":
            self._counts["hung here"] += 1
            self.hung.add(task)
            return
        late_s = self._rng.choice((0.0, 0.002, 0.02))
        then = partial(self.submit, task) if result is None else partial(task.answer, task, result)
        self._clock.at(self._clock.now + late_s, then)


class GuessingDrafter:
    """Proposes the tokens that the target likes best, now and then another, and rarely one that no target has.

    Attributes:
        states: states that are not closed.
    """

    version, steering, name = "1", None, "guessing"

    def __init__(self, language: Language, rng: random.Random, unknown: float) -> None:
        self.language = language
        self.rng = rng
        self.unknown = unknown
        self.states: set[GuessingState] = set()

    def open(self, rule: ProposalRule) -> GuessingState:
        state = GuessingState(self, rule)
        self.states.add(state)
        return state


class GuessingState(TokenPrefix):
    def __init__(self, drafter: GuessingDrafter, rule: ProposalRule) -> None:
        super().__init__()
        self._drafter, self._rule = drafter, rule

    def follow(self, rule: ProposalRule) -> None:
        self._rule = rule

    def propose(self, n: int) -> tuple[DraftToken, ...]:
        rng, drafts = self._drafter.rng, ()
        for _ in range(n if rng.random() < 0.95 else 0):
            token = self._guess()
            if rng.random() < self._drafter.unknown:
                token = 1 << 20
            others = tuple({self._guess(), PLAIN, PLAIN + 1} - {token})[:RUNNERS_UP]
            drafts += (DraftToken(token, rng.choice((math.nan, 0.3, 0.95)), runners_up=others),)
            self.extend((token,))
        return drafts

    def _guess(self) -> int:
        """The shared noise draws it, as the target draws where nothing is cut, edited or masked."""
        language, rule = self._drafter.language, self._rule
        if self._drafter.rng.random() < 0.15:
            return self._drafter.rng.randrange(language.vocab_size)
        logits = language.logits(tuple(self.tokens))
        order = np.argsort(-logits, kind="stable").astype(np.int64)
        order = order[np.isfinite(logits[order])]
        if not len(order):
            return 0
        log_total = float(np.log(np.exp(logits[order] - logits[order[0]]).sum()) + logits[order[0]])
        counts = rule.counts()
        if counts is not None:
            counts.extend(self.tokens)
        chosen = rule.choose(self.length, order, logits[order], log_total, counts)
        return max(0, chosen.id)

    def close(self) -> None:
        super().close()
        self._drafter.states.discard(self)


class FailingModel(HashingModel):
    """Model that fails on demand, and takes time."""

    def __init__(self, language: Language, fleet: Fleet) -> None:
        super().__init__(language, CONTEXT)
        self._fleet = fleet
        self.fails_next = ""  # the moment: before, written, sampled or pages
        self.most_rows = math.inf
        self.dead = False

    def on_rows(self, rows: int) -> None:
        self._fleet.spent_s += STEP_S + ROW_S * rows
        if self.dead:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if rows > self.most_rows:
            raise torch.OutOfMemoryError(f"no memory for {rows} rows")
        self._fail("before")

    def on_written(self) -> None:
        self._fail("written")

    def on_pages(self) -> None:
        """Pages are given out by the device too."""
        if self.dead:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self._fail("pages")

    def _fail(self, moment: str) -> None:
        if self.fails_next == moment:
            self.fails_next = ""
            raise RuntimeError("it happens once")


class FuzzedVerifier:
    """An engine as a simulated edge sees it; it is replaced where it fails for good."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self._fleet = fleet
        self._name = name
        self._busy_until = 0.0
        self._alarm = math.inf
        self._looked_at, self._looks = -1.0, 0
        self._keys: dict[EngineStream, int] = {}
        self._start()

    def _start(self) -> None:
        fleet = self._fleet
        self.model = FailingModel(fleet.language, fleet)
        options = {"kv_tokens": fleet.rng.choice((170, 170, 170, 4000)), "page_size": fleet.rng.choice((1, 8, 16))}
        target = hashing_target(self.model, passes=fleet.passes, **options)
        self.rules = VerifierRules(
            self._name,
            "hashing",
            target.tokenizer_sha256,
            fleet.language.vocab_size,
            CONTEXT,
            frozenset({EOS}),
            max_drafts=6,
            max_credit=12,
            projections=frozenset({PROJECTION}),
            guarantee=fleet.passes.guarantee,
            trees=True,
        )
        batching = Batching(prefill_chunk=fleet.rng.choice((5, 9, 64)))
        dice = fleet.drafting_rng
        self.drafter = GuessingDrafter(fleet.language, dice, dice.choice((0.0, 0.0, 0.05)))
        [kind] = dice.choices(list(SOURCES), list(SOURCES.values()))
        fleet.counts[f"{kind} source"] += 1
        self.drafting_threads, source = DelayedThreads(fleet, kind), None
        if kind != "none":
            own = OwnDrafter(self.drafter, fleet.language.vocab_size, reach=dice.choice((None, None, 4)))
            price = dice.choice((None, 0.0))
            source = self.drafting_threads.source = LocalSource(own, self.drafting_threads, price, fleet.now)
        backend = TransformersBackend(target)
        self.engine = EngineCore(
            backend,
            ModelRunner(backend, {PROJECTION: fleet.projection}, clock=fleet.now),
            self.rules,
            5,
            batching,
            VerifierMetrics("hashing", self._name),
            self._poke,
            self._on_failure,
            source,
            clock=fleet.now,
        )
        sampler = backend._sampler
        sample = sampler.sample

        def failing_sample(*arguments: Any) -> Any:
            sampled = sample(*arguments)
            self.model._fail("sampled")
            return sampled

        sampler.sample = failing_sample  # type: ignore[method-assign]
        slots_of = target.pool.slots_of

        def failing_slots_of(pages: list[int]) -> torch.Tensor:
            self.model.on_pages()
            return slots_of(pages)

        target.pool.slots_of = failing_slots_of  # type: ignore[method-assign]

    # --- as a stream uses it ---

    def receive(self, stream: EngineStream, frame: EdgeFrame) -> None:
        if isinstance(frame, Open):
            key = self._keys[stream] = next(self._fleet.keys)
            grammar, committed = frame.sampling.grammar, frame.committed
            matcher = self._matcher(grammar, committed)
            owner = Owner(isolation=str(zlib.crc32(frame.session.encode()) % 2))
            self.engine.post_open(key, frame, StreamOutbox(self._fleet, stream), matcher, owner)
            stream.grammar = grammar
        elif (key := self._keys.get(stream, -1)) >= 0:
            matcher = None
            if isinstance(frame, Continue):
                stream.grammar = frame.sampling.grammar if frame.sampling is not None else stream.grammar
                matcher = self._matcher(stream.grammar, ())
            self.engine.post_frame(key, frame, lambda: None, matcher)

    def release(self, stream: EngineStream) -> None:
        """A broken stream may be noticed late, when the text goes on in another already."""
        if stream in self._keys:
            late_s = self._fleet.rng.choice((0.0, 0.0, 0.0, NOTICED_S))
            self._fleet.clock.at(
                self._fleet.clock.now + late_s, partial(self.engine.post_close, self._keys.pop(stream))
            )

    def _matcher(self, grammar: Grammar | None, committed: Sequence[int]) -> HashedGrammar | None:
        if grammar is None:
            return None
        return HashedGrammar(grammar, self._fleet.language.vocab_size, self._fleet.threads, committed)

    # --- as its thread ---

    def _poke(self) -> None:
        self._look_at(max(self._fleet.clock.now, self._busy_until))

    def _look_at(self, time: float) -> None:
        if time < self._alarm:
            self._alarm = time
            self._fleet.clock.at(time, partial(self._look, time))

    def _look(self, due: float) -> None:
        """Do what the engine's thread does between two waits."""
        if due != self._alarm:
            return
        self._alarm = -math.inf  # what comes during the turn waits for its end
        self._looks = self._looks + 1 if due == self._looked_at else 0
        self._looked_at = due
        assert self._looks < MAX_LOOKS, "the engine does nothing, again and again"
        fleet = self._fleet
        if not self.engine.failed:
            fleet.tamper(self)
        wake_at = self.engine.turn()
        fleet.untamper(self)
        self._busy_until, self._alarm, fleet.spent_s = fleet.now(), math.inf, 0.0
        if self.engine.inbox:
            self._poke()
        elif self.engine.sessions.num_running:
            self._look_at(max(min(wake_at, fleet.clock.now + IDLE_S), self._busy_until))

    def drain(self) -> None:
        """Send everybody away, and be replaced when they are gone."""
        self.engine.post_drain()
        self._fleet.clock.at(self._fleet.clock.now + RESTART_S, partial(self._replace_when_empty, self.engine))

    def _replace_when_empty(self, engine: EngineCore) -> None:
        if engine is not self.engine or engine.failed:
            return  # it has failed meanwhile
        if len(engine.sessions) or engine.inbox:
            self._poke()
            self._fleet.clock.at(self._fleet.clock.now + RESTART_S, partial(self._replace_when_empty, engine))
        else:
            self._replace()

    def _on_failure(self) -> None:
        self._fleet.counts["verifiers replaced"] += 1
        self._fleet.clock.at(self._fleet.now() + RESTART_S, self._replace)

    def _replace(self) -> None:
        self.check_is_empty()
        self._keys.clear()
        self._fleet.forget(self.engine)
        self._start()

    def check_is_empty(self) -> None:
        """Check that streams which are gone have left nothing."""
        self.engine._take(self.engine.inbox.take())
        assert self.engine.backend.capacity.used_pages == 0, "a page has leaked"
        assert self.engine.sessions.num_running == self.engine.sessions.num_parked == 0
        assert self.model.complaints == []
        now, source = self._fleet.clock.now, self.engine.source
        source.drive(now)
        followed = source._texts.values() if isinstance(source, LocalSource) else ()
        at_work = {each.task for each in followed if each.gone and each.task and now - each.task.queued_at < SLOWEST_S}
        assert len(self.drafter.states) <= len(self.drafting_threads.hung | at_work), (
            "a text of its drafter is left open"
        )
        own = self.engine.metrics.counts
        self._fleet.counts["verified here"] += own.verified_here
        self._fleet.counts["accepted here"] += own.accepted_here
        self._fleet.counts["preempted"] += own.preempted


class Fleet:
    """Two verifiers of one target, and everything that goes wrong in them.

    Attributes:
        counts: how often what went wrong.
    """

    def __init__(self, seed: int, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rng = random.Random(f"fleet {seed}")
        self.drafting_rng = random.Random(f"drafts beside the target {seed}")
        self.clock = clock
        self.spent_s = 0.0  # time that the running step has taken so far
        self.threads = DelayedExecutor(clock, self.rng)
        self.keys = itertools.count()
        self.counts: Counter[str] = Counter()
        self.language = Language(seed, self.rng.choice((40, 40, 40, 1100)))  # short lists need 1,024 tokens
        plain = range(PLAIN, self.language.vocab_size)
        self.segments = [tuple(self.rng.choices(plain, k=16)) for _ in range(3)]  # of prompts
        self.passes = self.rng.choice((FREE, FREE, TOGETHER[0], ROUNDED[2], TILES))
        torch.manual_seed(seed)
        self.projection = Projection(range(LAYERS), HIDDEN, RANK).eval().requires_grad_(False)
        self.failing = True
        self._often = self.rng.choice((0.0, 0.03, 0.1))
        self._failing_plans: dict[int, int] = {}  # how many more of whose plans fail
        monkeypatch.setattr(sessions, "AHEAD", 8)  # so that short texts, too, grow while others hold what is left
        monkeypatch.setattr(Batching, "plan", self._plan(Batching.plan))
        monkeypatch.setattr(VerifierSession, "ready_at", _ready_at(VerifierSession.ready_at))
        self.verifiers = [FuzzedVerifier(self, name) for name in ("a", "b")]

    def now(self) -> float:
        return self.clock.now + self.spent_s

    def tamper(self, verifier: FuzzedVerifier) -> None:
        """Let the engine's next act fail, once in a while."""
        if not self.failing or self.rng.random() > self._often:
            return
        model, kinds = (
            verifier.model,
            ["before", "written", "sampled", "before", "written", "sampled", "rows", "plan", "pages"],
        )
        kind = self.rng.choice(kinds if self.rng.random() < 0.95 else ["device", "plans", "drain"])
        self.counts[kind] += 1
        match kind:
            case "rows":
                model.most_rows = self.rng.choice((1, 3, 10, 30, math.inf))
            case "plan":
                self._failing_plans[id(verifier.engine.batching)] = 1
            case "plans":
                self._failing_plans[id(verifier.engine.batching)] = 1 << 30
            case "device":
                model.dead = True
            case "drain":
                verifier.drain()
            case _:
                model.fails_next = kind

    def untamper(self, verifier: FuzzedVerifier) -> None:
        """Forget a failure that was planned once and met no step."""
        verifier.model.fails_next = ""

    def forget(self, engine: EngineCore) -> None:
        """An engine is gone, and with it what was to fail in it."""
        self._failing_plans.pop(id(engine.batching), None)

    def heal(self) -> None:
        """From now on nothing new goes wrong, and no step is too large."""
        self.failing = False
        for verifier in self.verifiers:
            verifier.model.most_rows = math.inf

    def _plan(self, right: Callable[..., Any]) -> Callable[..., Any]:
        def plan(batching: Batching, *arguments: Any) -> Any:
            if self._failing_plans.get(id(batching), 0) > 0:
                self._failing_plans[id(batching)] -= 1
                raise ZeroDivisionError("a defect of planning")
            return right(batching, *arguments)

        return plan


def _ready_at(right: Callable[..., float]) -> Callable[..., float]:
    def ready_at(session: VerifierSession, *costs: float) -> float:
        if session.id.startswith(BROKEN_PLAN) and session.generated > 2:
            raise KeyError("a defect of one session's plan")
        return right(session, *costs)

    return ready_at
