"""The engine of a verifier: what joins the next step, what each stream is sent, and what fails.

`EngineCore` is the engine without its thread. Whoever drives it calls `turn` again and again, or `handle`, and `step`
for each step that this returns: the thread of `Engine`, or a harness on a virtual clock, where a step takes time.
Nothing in it waits, and the time is that of the clock it is given.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from outrider.cloud.grammar.grammar import GrammarMatcher
from outrider.cloud.learning.lessons import NoLessons, StepLessons
from outrider.cloud.serving.batching import Batch, Batching, Share
from outrider.cloud.serving.heartbeat import Heartbeat
from outrider.cloud.serving.local_source import NoSource
from outrider.cloud.serving.recovery import Recovery, VerifierFailed
from outrider.cloud.serving.sessions import Sessions
from outrider.cloud.serving.slots import ANYBODY, Outbox, Owner, Slot
from outrider.cloud.serving.steps import Runner, StepResult, StepTiming
from outrider.cloud.serving.verifier_metrics import VerifierMetrics
from outrider.cloud.target.backend import Backend, TargetFacts
from outrider.cloud.verifier_config import VerifierConfig
from outrider.proto.plumbing.logs import about
from outrider.proto.policy import Smoothed
from outrider.proto.release import release
from outrider.proto.session.verifier import Verified, VerifierRules
from outrider.proto.types import Branches, Cancel, Commit, Draft, EdgeFrame, Open

if TYPE_CHECKING:
    from outrider.cloud.target.projection import Projection

BACKLOG_S = 0.05  # between looks at a client that leaves its commits unread
IDLE_S = 0.5  # between turns of the thread in which nothing happens
MAX_TIMINGS = 4096

T = TypeVar("T")

log = logging.getLogger(__name__)


class _Event(NamedTuple):
    run: Callable[[], None]
    session: Hashable
    drafts: bool


class Inbox:
    """Events from any thread, in their order, but that drafts may be taken before others, though none of their session.

    Drafts that come while a step runs are of use to its commit: one may be what follows a miss.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        """Wait for whoever takes the events; `ring` is called after each, in the thread that it comes from."""
        self._events: deque[_Event] = deque()
        self._lock = threading.Lock()
        self._ring = ring

    def __len__(self) -> int:
        return len(self._events)

    def post(self, run: Callable[[], None], session: Hashable = None, frame: EdgeFrame | None = None) -> None:
        with self._lock:
            self._events.append(_Event(run, session, isinstance(frame, Draft | Branches)))
        self._ring()

    def take(self) -> list[Callable[[], None]]:
        with self._lock:
            events = [event.run for event in self._events]
            self._events.clear()
            return events

    def take_drafts(self) -> list[Callable[[], None]]:
        """Return the events that bring drafts and have no other of their session before them; they wait no longer."""
        taken, left, blocked = list[Callable[[], None]](), deque[_Event](), set[Hashable]()
        with self._lock:
            for event in self._events:
                if event.drafts and event.session not in blocked:
                    taken.append(event.run)
                else:
                    left.append(event)
                    blocked.add(event.session)
            self._events = left
        return taken


class EngineCore:
    """The decoding of many sessions on one target; `post_*` may be called from any thread, as may what only reads.

    Attributes:
        heart: notes of turns and steps, for whoever judges.
        timings: the newest steps' times; a reader may take them out.
        step_s: smoothed time of a decoding step.
        lessons: what keeps those of its texts.
    """

    def __init__(
        self,
        backend: Backend,
        runner: Runner | None,
        rules: VerifierRules,
        max_sessions: int,
        batching: Batching,
        metrics: VerifierMetrics,
        ring: Callable[[], None],
        on_failure: Callable[[], None] = lambda: None,
        source: NoSource | None = None,
        lessons: NoLessons | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Decode on `backend`, whose steps `runner` runs (None: an engine of another kind makes none), by `clock`.

        `ring` is called when an event comes, in the thread that it comes from, and `on_failure` once, when steps fail
        whatever they are for. Drafts beside the target come of `source`, and `lessons` keeps what its steps teach.
        """
        self.rules = rules
        self.metrics = metrics
        self.backend = backend
        self.batching = batching
        self.source = source or NoSource()
        self.heart = Heartbeat(clock)
        self.inbox = Inbox(ring)
        self.sessions = Sessions(backend, rules, max_sessions, metrics.commit, metrics.begin_text, metrics.end_service)
        self.timings: deque[StepTiming] = deque(maxlen=MAX_TIMINGS)
        self.step_s = Smoothed()
        self.lessons = lessons or NoLessons()
        self._clock = clock
        self._accounted_until = clock()
        self._runner = runner
        self._recovery = Recovery(self.sessions, batching, runner, self._step_again, self._masked, metrics.counts)
        self._on_failure = on_failure
        self._delayed_until = 0.0
        self.source.serve(self.sessions, batching, self.inbox.post, metrics)

    # --- from any thread ---

    def post_open(
        self,
        key: int,
        frame: Open,
        outbox: Outbox,
        matcher: GrammarMatcher | None = None,
        owner: Owner = ANYBODY,
    ) -> None:
        """Admit a session as stream `key`, or put the error into its outbox; `matcher` enforces its grammar, if any."""
        self.inbox.post(lambda: self._admit(key, frame, outbox, matcher, owner))

    def post_frame(
        self, key: int, frame: EdgeFrame, taken: Callable[[], None], matcher: GrammarMatcher | None = None
    ) -> None:
        """Take a later frame of session `key`, then call `taken`; `matcher` enforces a Continue's grammar, if any."""
        arrived = self._clock()  # before it is queued: a step may be running
        self.inbox.post(lambda: self._take_frame(key, frame, arrived, taken, matcher), key, frame)

    def post_close(self, key: int) -> None:
        self.inbox.post(lambda: self._close(key), key)

    def post_half_close(self, key: int) -> None:
        """Expect nothing more on the stream of `key`; a text that runs goes on to its end."""
        self.inbox.post(lambda: self.sessions.half_close(key), key)

    def post_drain(self) -> None:
        self.inbox.post(self.sessions.drain)

    def post_send_away(self, sessions: frozenset[str]) -> None:
        self.inbox.post(lambda: self.sessions.send_away(sessions))

    @property
    def failed(self) -> bool:
        return self.sessions.failed

    # --- turns ---

    def handle(self) -> Batch:
        """Take the events that wait; return the step that begins now, or when to look again if none comes before."""
        self.heart.beat()
        self._take(self.inbox.take())
        if self.failed:
            return Batch()
        batch = self._guarded("the engine met a defect", self._begin_next)
        return Batch(wake_at=self._clock() + BACKLOG_S) if batch is None else batch

    def turn(self) -> float:
        """Handle what waits, and make the step that begins, if one does; return when to do so again at the latest."""
        batch = self.handle()
        if not batch.shares:
            return batch.wake_at
        self.step(batch)
        return 0.0

    def step(self, batch: Batch) -> None:
        """Make the step that has begun; where it fails, make smaller ones, so that only a session at fault ends."""
        self._guarded("a step met a defect", lambda: self._step_or_recover(batch))

    def _take(self, events: Iterable[Callable[[], None]]) -> None:
        for event in events:
            self._guarded("an event failed", event)

    def _guarded(self, what_failed: str, act: Callable[[], T]) -> T | None:
        """Return what `act` does; None: it failed, which must end no other session."""
        try:
            return act()
        except VerifierFailed as failure:
            self._give_up(failure)
        except Exception as error:  # whoever drives the engine must go on
            self._note_defect(what_failed, error)
        return None

    def _note_defect(self, what_failed: str, error: Exception) -> None:  # noqa: ARG002 - a harness looks at it
        log.exception(what_failed)

    def _give_up(self, failure: VerifierFailed) -> None:
        if self.failed:
            return
        line = "the verifier has failed, its sessions go elsewhere: %s"
        log.critical(line, failure, extra=about(verifier=self.rules.name))
        self.sessions.give_up()
        self._on_failure()

    def _begin_next(self) -> Batch:
        now = self._clock()
        try:
            batch = self._schedule(now)
            self._recovery.note_plan()
        except Exception as error:  # a defect, in one session's plan or in everybody's
            self._note_defect("planning failed; trying each session alone", error)
            self._recovery.after_plan(now)
            return Batch(wake_at=now)
        if batch.shares:
            self.source.begin(batch.shares, self._clock())
            self._note_begin(batch)
        return batch

    def _schedule(self, now: float) -> Batch:
        """Return the step that begins now, or when to look again if nothing happens before."""
        self.sessions.expire(now)
        self.metrics.counts.preempted += len(self.sessions.grow())
        self.sessions.start_waiting()
        running = self.sessions.running()
        self.source.drive(now)
        if (masks_by := _masks_by(running)) > now:
            return Batch(wake_at=masks_by)
        asked = [slot for slot in running if slot.busy]  # too late for this step
        ready = [slot for slot in running if not (slot.backlogged or slot.busy)]
        batch = self.batching.plan(ready, now)
        if batch.delayed and self._delayed_until <= now:
            self.metrics.counts.batching_delays += 1
        self._delayed_until = batch.wake_at if batch.delayed else now
        if not batch.shares:
            backlogged = len(asked) + len(ready) < len(running)
            return replace(batch, wake_at=min(batch.wake_at, now + BACKLOG_S)) if backlogged else batch
        shares = self.sessions.masked(batch.shares, now, self._wake)
        return Batch(shares) if len(shares) == len(batch.shares) else Batch(wake_at=_masks_by(running))

    def _masked(self, shares: Sequence[Share]) -> list[Share]:
        return self.sessions.masked(shares, self._clock(), self._wake)

    def _wake(self) -> None:
        self.inbox.post(lambda: None)

    def _step_or_recover(self, batch: Batch) -> None:
        try:
            self._step(batch)
            return
        except VerifierFailed:
            raise
        except Exception as error:  # torch may raise anything, lack of memory included
            self.heart.fail()
            self._note_defect(f"a step of {len(batch.shares)} sessions failed; trying again", error)
            self.metrics.counts.failed_steps += 1
        self._recovery.after_step(batch)

    def _step_again(self, batch: Batch) -> None:
        self._note_begin(batch)
        self._step(batch)

    def _note_begin(self, batch: Batch) -> None:
        self.heart.begin(batch.num_rows, reads=not batch.only_decodes)

    def _step(self, batch: Batch) -> None:
        if self._runner is None:
            raise NotImplementedError("an engine without a runner makes no steps")
        result = self._runner.run(batch.shares)
        self.heart.end()
        self._note_times(batch, result)
        self._take(self.inbox.take_drafts())
        for slot, frame in result.scored:
            slot.outbox.put(frame)
        judged = [
            StepLessons(slot.key, slot.session, verified, self._commit_or_end(slot, verified))
            for slot, verified in result.verified
        ]
        self.lessons.take(result.logits, judged, result.verify_s)

    def _note_times(self, batch: Batch, result: StepResult) -> None:
        timing = StepTiming(
            sessions=len(batch.shares),
            rows=batch.num_rows,
            forward_s=result.forwarded - result.began,
            sample_s=result.sampled - result.forwarded,
            overhead_s=result.began - self._accounted_until,
        )
        self._accounted_until = result.ended
        self.timings.append(timing)
        self.metrics.step(timing)
        if batch.only_verifies:
            self.step_s.add(result.verify_s)
        self.batching.measure(batch, result.verify_s, self.sessions.num_running)

    def _commit_or_end(self, slot: Slot, verified: Verified) -> Commit | None:
        if self.sessions.get(slot.key) is not slot:
            return None  # a draft that came during the step was refused
        try:
            return self._commit(slot, verified)
        except Exception as error:  # a defect, and this session's alone
            self._note_defect("a commit failed", error)
            self._recovery.end(slot, error)
            return None

    def _commit(self, slot: Slot, verified: Verified) -> Commit:
        commit = self.sessions.commit(slot, verified, self._clock())
        self._recovery.note_commit()
        return commit

    # --- events ---

    def _admit(self, key: int, frame: Open, outbox: Outbox, matcher: GrammarMatcher | None, owner: Owner) -> None:
        try:
            admitted = self.sessions.admit(key, frame, outbox, matcher, owner, self._clock())
        except Exception as error:  # a defect, which must end nobody else
            self._note_defect("an admission failed", error)
            self._recovery.refuse(outbox, owner, error)
            return
        if not admitted:
            return
        if owner.teaches and frame.learning is not None:
            self.lessons.permit(key, owner.key)
        self.metrics.counts.admitted += 1
        log.info("a session is admitted", extra=about(frame.session, self.rules.name))

    def _take_frame(
        self, key: int, frame: EdgeFrame, arrived: float, taken: Callable[[], None], matcher: GrammarMatcher | None
    ) -> None:
        taken()
        slot = self.sessions.expecting(key, frame)
        if slot is None:
            return
        try:
            self.sessions.take(slot, frame, matcher, arrived, self._clock())
            if isinstance(frame, Cancel):
                self.lessons.end(key)
        except Exception as error:  # as above
            self._note_defect("a frame failed", error)
            self._recovery.end(slot, error)

    def _close(self, key: int) -> None:
        self.lessons.close(key)
        self.sessions.close(key)


class Engine(EngineCore):
    """An engine on a target, in a thread of its own, which is the one that calls the target."""

    def __init__(
        self,
        backend: Backend,
        rules: VerifierRules,
        config: VerifierConfig,
        projections: Mapping[str, Projection] | None = None,
        on_failure: Callable[[], None] = lambda: None,
        source: NoSource | None = None,
        lessons: NoLessons | None = None,
    ) -> None:
        """Decode on `backend` by `config`; steering vectors are made by `projections`, which have ids.

        `on_failure` is called in the thread; the rest is as `EngineCore` has it.
        """
        from outrider.cloud.serving.runner import ModelRunner  # imports torch

        self._model = ModelRunner(backend, projections or {}, min_step_s=config.min_step_s)
        self._bell = threading.Event()
        super().__init__(
            backend,
            self._model,
            replace(rules, projections=frozenset(projections or ())),
            config.max_sessions,
            Batching(config.max_gap_s, config.prefill_chunk),
            VerifierMetrics(rules.model, rules.name),
            self._bell.set,
            on_failure,
            source,
            lessons,
        )
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; sessions still here get Unavailable."""
        self.inbox.post(self._stop)
        self._thread.join()
        self.source.stop()
        self.lessons.stop()

    def set_pace(self, min_step_s: float) -> None:
        self._model.min_step_s = min_step_s

    def _run(self) -> None:
        while not self._stopping:
            self._wait(min(self.turn(), self._clock() + IDLE_S))

    def _wait(self, until: float) -> None:
        """Wait for an event, until a time at most; the bell may still ring for one that has been taken."""
        self._bell.clear()
        began = time.monotonic()
        if not (self.inbox or self._stopping) and until > began:
            self._bell.wait(until - began)
            self._accounted_until += time.monotonic() - began  # no overhead: there was nothing to do

    def _stop(self) -> None:
        self._stopping = True
        self.sessions.stop()


def _masks_by(slots: Sequence[Slot]) -> float:
    """Return until when a step waits for the masks of grammars, seconds; 0: it waits for none."""
    return max((slot.masks_by for slot in slots if slot.busy), default=0.0)


def rules_of(config: VerifierConfig, target: TargetFacts) -> VerifierRules:
    """Return what a verifier of these settings announces to its sessions."""
    return VerifierRules(
        name=config.name,
        model=config.model_id,
        tokenizer_sha256=target.tokenizer_sha256,
        vocab_size=target.vocab_size,
        context_length=target.context_length,
        eos_tokens=target.eos_tokens,
        max_drafts=config.most_drafts,
        max_credit=config.max_credit,
        patience=config.patience,
        goal=config.goal,
        guarantee=target.guarantee,
        keep_s=config.keep_s,
        release=release(),
        precision=target.precision,
        scores_prompts=target.scores_prompts,
        trees=target.verifies_branches,
    )
