"""The verifier's engine: one thread that takes events, plans a step, runs it and commits its tokens."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from outrider.cloud.config import VerifierConfig
from outrider.cloud.grammar.grammar import GrammarMatcher
from outrider.cloud.learning.lessons import NoLessons, StepLessons
from outrider.cloud.serving.admission import Admission
from outrider.cloud.serving.batching import Batch, Batching
from outrider.cloud.serving.engine_state import EngineState
from outrider.cloud.serving.heartbeat import Heartbeat
from outrider.cloud.serving.inbox import Inbox
from outrider.cloud.serving.local_source import NoSource
from outrider.cloud.serving.masks import Masks, masks_by_of
from outrider.cloud.serving.metrics import VerifierMetrics
from outrider.cloud.serving.recovery import Probe, Recovery, VerifierFailed
from outrider.cloud.serving.runner import ModelRunner
from outrider.cloud.serving.session_events import SessionEvents
from outrider.cloud.serving.slots import KeyLimit, Outbox, Slot, Slots
from outrider.cloud.serving.step_timing import StepMeter
from outrider.cloud.target.backend import Backend
from outrider.cloud.target.steering import Projection
from outrider.proto.plumbing.logs import about
from outrider.proto.session import Verified, VerifierRules
from outrider.proto.types import Cancel, Commit, EdgeFrame, Open

IDLE_S = 0.5
BACKLOG_S = 0.05  # between looks at a client that leaves its commits unread

log = logging.getLogger(__name__)


class Engine(EngineState):
    """The decoding of many sessions on one target, `backend`; `post_*` may be called from any thread."""

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
        """Decode on `backend`.

        Args:
            backend: target with the KV cache of all sessions; the engine's thread is the one that calls it.
            rules: rules that sessions are told.
            config: settings of the verifier.
            projections: projections that make steering vectors, by id.
            on_failure: called once, in the engine's thread, when steps fail whatever they are for.
            source: drafts made beside the target; None: there are none.
            lessons: what is kept of the steps for those who train drafters; None: nothing.
        """
        self.rules = replace(rules, projections=frozenset(projections or ()))
        self.metrics = VerifierMetrics(rules.model, rules.name)
        self.backend = backend
        slots = Slots(backend, rules.name, self.metrics.begin_text)
        self._source = source or NoSource()
        self._lessons = lessons or NoLessons()
        admission = Admission(slots, self.rules, config.max_sessions, self._source)
        self.heart = Heartbeat()
        super().__init__(slots, admission, StepMeter(self.metrics, time.monotonic()))
        self._events = SessionEvents(slots, admission, backend, self.metrics.commit)
        self._batching = Batching(config.max_gap_s, config.prefill_chunk)
        self._runner = ModelRunner(backend, projections or {}, min_step_s=config.min_step_s)
        self._masks = Masks(self._slots, self._wake)
        probe = Probe(self.rules, backend, self._batching, self._runner)
        self._recovery = Recovery(
            self._slots, self._batching, probe, backend, self._step, self._masks, self.metrics.corrupted.inc
        )
        self._on_failure = on_failure
        self._inbox = Inbox()
        self._stopping = False
        self._delayed_until = 0.0
        self._source.serve(self._slots, self._batching, self._inbox.post, self.metrics)
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)

    # --- from any thread ---

    def start(self) -> None:
        """Begin to decode."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; sessions still here get Unavailable."""
        self._inbox.post(self._stop)
        self._thread.join()
        self._source.stop()
        self._lessons.stop()

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
        self._inbox.post(lambda: self._admit(key, frame, outbox, matcher, isolation, teacher, limit))

    def post_frame(
        self, key: int, frame: EdgeFrame, taken: Callable[[], None], matcher: GrammarMatcher | None = None
    ) -> None:
        """Take a later frame of session `key`, then call `taken`; `matcher` enforces a Continue's grammar, if any."""
        arrived = time.monotonic()  # before it is queued: a step may be running
        self._inbox.post(lambda: self._take_frame(key, frame, arrived, taken, matcher), key, frame)

    def post_close(self, key: int) -> None:
        """Free what `key` held: its stream is gone."""
        self._inbox.post(lambda: self._close(key), key)

    def post_half_close(self, key: int) -> None:
        """Expect nothing more on the stream of `key`; a text that runs goes on to its end."""
        self._inbox.post(lambda: self._events.half_close(key), key)

    def post_drain(self) -> None:
        """Send all sessions elsewhere and admit no more."""
        self._inbox.post(self._admission.drain)

    def post_send_away(self, sessions: frozenset[str]) -> None:
        """End the texts of these sessions here."""
        self._inbox.post(lambda: self._admission.send_away(sessions))

    def set_pace(self, min_step_s: float) -> None:
        """Let the steps from now on take at least so many seconds."""
        self._runner.min_step_s = min_step_s

    def _wake(self) -> None:
        self._inbox.post(lambda: None)

    # --- the engine's thread ---

    def _run(self) -> None:
        wake_at = 0.0
        while not self._stopping:
            self.heart.beat()
            self._take_events(wake_at)
            wake_at = time.monotonic() + IDLE_S if self.failed else self._begin_next()

    def _begin_next(self) -> float:
        """Make the next step, if one is due, and return when to look again if nothing happens before."""
        try:
            batch = self._plan_or_recover()
            if batch.shares:
                self._step_or_recover(batch)
                return 0.0
            return batch.wake_at
        except VerifierFailed as failure:
            self._give_up(failure)
        except Exception:  # the thread's top loop must go on
            log.exception("the engine met a defect")
        return time.monotonic() + BACKLOG_S

    def _give_up(self, failure: VerifierFailed) -> None:
        """Send every session elsewhere, and admit no more: no step succeeds here."""
        if self.failed:
            return
        line = "the verifier has failed, its sessions go elsewhere: %s"
        log.critical(line, failure, extra=about(verifier=self.rules.name))
        self._events.give_up()
        self._on_failure()

    def _take_events(self, wake_at: float) -> None:
        events, waited_s = self._inbox.take(wake_at)
        if waited_s:
            self._meter.waited(waited_s)
        self._handle(events)

    def _handle(self, events: Iterable[Callable[[], None]]) -> None:
        for event in events:
            try:
                event()
            except VerifierFailed as failure:
                self._give_up(failure)
            except Exception:  # one bad event must not end every session
                log.exception("an event failed")

    def _plan_or_recover(self) -> Batch[Slot]:
        """Plan; where that fails, end the sessions that are at fault."""
        now = time.monotonic()
        try:
            batch = self._schedule(now)
            self._recovery.note_plan()
            return batch
        except Exception:  # a defect, in one session's plan or in everybody's
            log.exception("planning failed; trying each session alone")
        self._recovery.after_plan(lambda slot: self._batching.plan([slot], now))
        return Batch(wake_at=now)

    def _schedule(self, now: float) -> Batch[Slot]:
        """Return the step that begins now, or when to look again if nothing happens before."""
        self._slots.expire(now)
        self.metrics.preemptions.inc(len(self._slots.grow()))
        self._slots.start_waiting()
        running = self._slots.running()
        self._source.drive(now)
        if (masks_by := masks_by_of(running)) > now:
            return Batch(wake_at=masks_by)
        asked = [slot for slot in running if slot.busy]  # too late for this step
        ready = [slot for slot in running if not (slot.backlogged or slot.busy)]
        batch = self._batching.plan(ready, now)
        if batch.delayed and self._delayed_until <= now:
            self.metrics.batching_delays.inc()
        self._delayed_until = batch.wake_at if batch.delayed else now
        if not batch.shares:
            look_s = BACKLOG_S if len(asked) + len(ready) < len(running) else IDLE_S
            return replace(batch, wake_at=min(batch.wake_at, now + look_s))
        shares = self._masks.applied(batch.shares, now)
        return Batch(shares) if len(shares) == len(batch.shares) else Batch(wake_at=masks_by_of(running))

    def _step_or_recover(self, batch: Batch[Slot]) -> None:
        """Make a step; where it fails, make smaller ones, so that only a session at fault ends."""
        self._source.begin(batch.shares, time.monotonic())
        try:
            self._step(batch)
            return
        except VerifierFailed:
            raise
        except Exception:  # torch may raise anything, lack of memory included
            self.heart.fail()
            log.exception("a step of %d sessions failed; trying again", len(batch.shares))
            self.metrics.failed_steps.inc()
        self._recovery.after_step(batch)

    def _step(self, batch: Batch[Slot]) -> None:
        """Run the batch and commit the target's tokens."""
        self.heart.begin(batch.num_rows, reads=not batch.only_decodes)
        result = self._runner.run(batch.shares)
        self.heart.end()
        self._meter.record(batch, result.times)
        self._batching.measure(batch, result.times.verify_s, self._slots.num_running)
        self._handle(self._inbox.take_drafts())
        for slot, frame in result.scored:
            slot.outbox.put(frame)
        judged = [
            StepLessons(slot.key, slot.session, verified, self._commit_or_end(slot, verified))
            for slot, verified in result.verified
        ]
        self._lessons.take(result.logits, judged, result.times.verify_s)

    def _commit_or_end(self, slot: Slot, verified: Verified) -> Commit | None:
        if self._slots.get(slot.key) is not slot:
            return None  # a draft that came during the step was refused
        try:
            return self._commit(slot, verified)
        except Exception as error:  # a defect, and this session's alone
            log.exception("a commit failed")
            self._recovery.end(slot, error)
            return None

    def _commit(self, slot: Slot, verified: Verified) -> Commit:
        commit = self._events.commit(slot, verified, time.monotonic())
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
            slot = self._events.admit(key, frame, outbox, matcher, isolation, time.monotonic(), limit)
        except Exception as error:  # a defect, which must end nobody else
            log.exception("an admission failed")
            self._recovery.refuse(outbox, limit, error)
            return
        if slot is None:
            return
        if teacher is not None and frame.learning is not None:
            self._lessons.permit(key, teacher)
        self.metrics.admitted.inc()
        log.info("a session is admitted", extra=about(frame.session, self.rules.name))
        outbox.put(slot.session.opened())

    def _take_frame(
        self, key: int, frame: EdgeFrame, arrived: float, taken: Callable[[], None], matcher: GrammarMatcher | None
    ) -> None:
        taken()
        slot = self._events.expects(key, frame)
        if slot is None:
            return
        try:
            self._events.take(slot, frame, matcher, arrived, time.monotonic())
            if isinstance(frame, Cancel):
                self._lessons.end(key)
        except Exception as error:  # as above
            log.exception("a frame failed")
            self._recovery.end(slot, error)

    def _close(self, key: int) -> None:
        self._lessons.close(key)
        self._events.close(key)

    def _stop(self) -> None:
        self._stopping = True
        self._events.stop()
