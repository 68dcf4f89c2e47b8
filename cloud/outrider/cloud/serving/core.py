"""The verifier's engine without its thread: what joins the next step, what each stream is sent, and what fails.

Whoever drives it calls `turn` again and again, or `handle`, and `step` for each step that this returns: a thread, or a
harness on a virtual clock, where a step takes time. Nothing here waits, and the time is that of the clock it is given.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from outrider.cloud.grammar.grammar import GrammarMatcher
from outrider.cloud.learning.lessons import NoLessons, StepLessons
from outrider.cloud.serving.batching import Batch, Batching
from outrider.cloud.serving.heartbeat import Heartbeat
from outrider.cloud.serving.inbox import Inbox
from outrider.cloud.serving.local_source import NoSource
from outrider.cloud.serving.masks import Masks, masks_by_of
from outrider.cloud.serving.recovery import Probe, Recovery, Runner, VerifierFailed
from outrider.cloud.serving.sessions import Sessions
from outrider.cloud.serving.slots import KeyLimit, Outbox, Slot, Slots
from outrider.cloud.serving.step_timing import StepMeter
from outrider.cloud.serving.verifier_metrics import VerifierMetrics
from outrider.cloud.target.backend import Backend
from outrider.proto.plumbing.logs import about
from outrider.proto.session.verifier import Verified, VerifierRules
from outrider.proto.types import Cancel, Commit, EdgeFrame, Open

BACKLOG_S = 0.05  # between looks at a client that leaves its commits unread

T = TypeVar("T")

log = logging.getLogger(__name__)


class EngineCore:
    """The decoding of many sessions on one target; `post_*` may be called from any thread, as may what only reads.

    Attributes:
        sessions: what events do to the sessions in `slots`.
        inbox: events that wait.
        heart: notes of turns and steps, for whoever judges.
        meter: times of steps.
    """

    def __init__(
        self,
        backend: Backend,
        runner: Runner,
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
        """Decode on `backend`, whose steps `runner` runs, by the time of `clock`.

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
        self.slots = Slots(backend, rules.name, metrics.begin_text)
        self.sessions = Sessions(self.slots, backend, rules, max_sessions, self.source, metrics.commit)
        self._lessons = lessons or NoLessons()
        self._clock = clock
        self.meter = StepMeter(metrics, clock())
        self._runner = runner
        self._masks = Masks(self.slots, lambda: self.inbox.post(lambda: None))
        probe = Probe(rules, backend, batching, runner)
        self._recovery = Recovery(
            self.slots, batching, probe, backend, self._step_again, self._masks, metrics.corrupted.inc, clock
        )
        self._on_failure = on_failure
        self._delayed_until = 0.0
        self.source.serve(self.slots, batching, self.inbox.post, metrics)

    # --- from any thread ---

    def post_open(
        self,
        key: int,
        frame: Open,
        outbox: Outbox,
        matcher: GrammarMatcher | None = None,
        isolation: str = "",
        teacher: str | None = None,
        limit: KeyLimit | None = None,
    ) -> None:
        """Admit a session as `key`, or put the error into its outbox; those of one `isolation` share KV pages.

        `teacher` names an API key that allows learning from its texts, which its edge must allow, too; None: no key.
        `limit` is that of its API key.
        """
        self.inbox.post(lambda: self._admit(key, frame, outbox, matcher, isolation, teacher, limit))

    def post_frame(
        self, key: int, frame: EdgeFrame, taken: Callable[[], None], matcher: GrammarMatcher | None = None
    ) -> None:
        """Take a later frame of session `key`, then call `taken`; `matcher` enforces a Continue's grammar, if any."""
        arrived = self._clock()  # before it is queued: a step may be running
        self.inbox.post(lambda: self._take_frame(key, frame, arrived, taken, matcher), key, frame)

    def post_close(self, key: int) -> None:
        """Free what `key` held: its stream is gone."""
        self.inbox.post(lambda: self._close(key), key)

    def post_half_close(self, key: int) -> None:
        """Expect nothing more on the stream of `key`; a text that runs goes on to its end."""
        self.inbox.post(lambda: self.sessions.half_close(key), key)

    def post_drain(self) -> None:
        """Send all sessions elsewhere and admit no more."""
        self.inbox.post(self.sessions.drain)

    def post_send_away(self, sessions: frozenset[str]) -> None:
        """End the texts of these sessions here."""
        self.inbox.post(lambda: self.sessions.send_away(sessions))

    @property
    def failed(self) -> bool:
        """Whether steps fail whatever they are for, so that sessions are refused until the process is replaced."""
        return self.sessions.failed

    # --- turns ---

    def handle(self) -> Batch[Slot]:
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

    def step(self, batch: Batch[Slot]) -> None:
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
        """Send every session elsewhere, and admit no more: no step succeeds here."""
        if self.failed:
            return
        line = "the verifier has failed, its sessions go elsewhere: %s"
        log.critical(line, failure, extra=about(verifier=self.rules.name))
        self.sessions.give_up()
        self._on_failure()

    def _begin_next(self) -> Batch[Slot]:
        batch = self._plan_or_recover()
        if batch.shares:
            self.source.begin(batch.shares, self._clock())
            self._note_begin(batch)
        return batch

    def _plan_or_recover(self) -> Batch[Slot]:
        """Plan; where that fails, end the sessions that are at fault."""
        now = self._clock()
        try:
            batch = self._schedule(now)
            self._recovery.note_plan()
            return batch
        except Exception as error:  # a defect, in one session's plan or in everybody's
            self._note_defect("planning failed; trying each session alone", error)
        self._recovery.after_plan(lambda slot: self.batching.plan([slot], now))
        return Batch(wake_at=now)

    def _schedule(self, now: float) -> Batch[Slot]:
        """Return the step that begins now, or when to look again if nothing happens before."""
        self.slots.expire(now)
        self.metrics.preemptions.inc(len(self.slots.grow()))
        self.slots.start_waiting()
        running = self.slots.running()
        self.source.drive(now)
        if (masks_by := masks_by_of(running)) > now:
            return Batch(wake_at=masks_by)
        asked = [slot for slot in running if slot.busy]  # too late for this step
        ready = [slot for slot in running if not (slot.backlogged or slot.busy)]
        batch = self.batching.plan(ready, now)
        if batch.delayed and self._delayed_until <= now:
            self.metrics.batching_delays.inc()
        self._delayed_until = batch.wake_at if batch.delayed else now
        if not batch.shares:
            backlogged = len(asked) + len(ready) < len(running)
            return replace(batch, wake_at=min(batch.wake_at, now + BACKLOG_S)) if backlogged else batch
        shares = self._masks.applied(batch.shares, now)
        return Batch(shares) if len(shares) == len(batch.shares) else Batch(wake_at=masks_by_of(running))

    def _step_or_recover(self, batch: Batch[Slot]) -> None:
        try:
            self._step(batch)
            return
        except VerifierFailed:
            raise
        except Exception as error:  # torch may raise anything, lack of memory included
            self.heart.fail()
            self._note_defect(f"a step of {len(batch.shares)} sessions failed; trying again", error)
            self.metrics.failed_steps.inc()
        self._recovery.after_step(batch)

    def _step_again(self, batch: Batch[Slot]) -> None:
        self._note_begin(batch)
        self._step(batch)

    def _note_begin(self, batch: Batch[Slot]) -> None:
        self.heart.begin(batch.num_rows, reads=not batch.only_decodes)

    def _step(self, batch: Batch[Slot]) -> None:
        """Run the batch and commit the target's tokens."""
        result = self._runner.run(batch.shares)
        self.heart.end()
        self.meter.record(batch, result.times)
        self.batching.measure(batch, result.times.verify_s, self.slots.num_running)
        self._take(self.inbox.take_drafts())
        for slot, frame in result.scored:
            slot.outbox.put(frame)
        judged = [
            StepLessons(slot.key, slot.session, verified, self._commit_or_end(slot, verified))
            for slot, verified in result.verified
        ]
        self._lessons.take(result.logits, judged, result.times.verify_s)

    def _commit_or_end(self, slot: Slot, verified: Verified) -> Commit | None:
        if self.slots.get(slot.key) is not slot:
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

    def _admit(
        self,
        key: int,
        frame: Open,
        outbox: Outbox,
        matcher: GrammarMatcher | None,
        isolation: str,
        teacher: str | None,
        limit: KeyLimit | None,
    ) -> None:
        try:
            admitted = self.sessions.admit(key, frame, outbox, matcher, isolation, self._clock(), limit)
        except Exception as error:  # a defect, which must end nobody else
            self._note_defect("an admission failed", error)
            self._recovery.refuse(outbox, limit, error)
            return
        if not admitted:
            return
        if teacher is not None and frame.learning is not None:
            self._lessons.permit(key, teacher)
        self.metrics.admitted.inc()
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
                self._lessons.end(key)
        except Exception as error:  # as above
            self._note_defect("a frame failed", error)
            self._recovery.end(slot, error)

    def _close(self, key: int) -> None:
        self._lessons.close(key)
        self.sessions.close(key)
