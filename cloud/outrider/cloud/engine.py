"""The verifier's engine: one thread that takes events, plans a step, runs it and commits its tokens."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from outrider.cloud.admission import Admission
from outrider.cloud.batching import Batch, Batching, Share
from outrider.cloud.config import VerifierConfig
from outrider.cloud.grammar import GrammarMatcher
from outrider.cloud.metrics import VerifierMetrics
from outrider.cloud.runner import ModelRunner
from outrider.cloud.slots import Outbox, Slot, Slots
from outrider.cloud.steering import Projection
from outrider.cloud.step_timing import StepMeter, StepTiming
from outrider.cloud.target import Target
from outrider.proto.errors import Internal, InvalidArgument, OutriderError, Unavailable
from outrider.proto.plumbing.logs import about
from outrider.proto.session import Verified, VerifierRules
from outrider.proto.types import Cancel, Commit, Continue, Draft, EdgeFrame, Open, Report, token_ids

IDLE_S = 0.5
BACKLOG_S = 0.05  # between looks at a client that leaves its commits unread
MASKS_WITHIN_S = 0.005  # a session whose grammar takes longer to say what is allowed misses the step

log = logging.getLogger(__name__)


class Engine:
    """The decoding of many sessions on one target; `post_*` may be called from any thread."""

    def __init__(
        self,
        target: Target,
        rules: VerifierRules,
        config: VerifierConfig,
        projections: Mapping[str, Projection] | None = None,
    ) -> None:
        self.rules = replace(rules, projections=frozenset(projections or ()))
        self.metrics = VerifierMetrics(rules.model, rules.name)
        self._pool = target.pool
        self._slots = Slots(target.pool, rules.name)
        self._admission = Admission(self._slots, self.rules, config.max_sessions)
        self._batching = Batching(config.prefill_chunk)
        self._runner = ModelRunner(target, projections or {}, min_step_s=config.min_step_s)
        self._meter = StepMeter(self.metrics, time.monotonic())
        self._inbox: deque[Callable[[], None]] = deque()
        self._bell = threading.Condition()
        self._stopping = False
        self._delayed_until = 0.0
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)

    # --- from any thread ---

    def start(self) -> None:
        """Begin to decode."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; sessions still here get Unavailable."""
        self._post(self._stop)
        self._thread.join()

    def post_open(self, key: int, frame: Open, outbox: Outbox, matcher: GrammarMatcher | None = None) -> None:
        """Admit a session as `key`, or put the error into its outbox; `matcher` enforces its grammar, if any."""
        self._post(lambda: self._admit(key, frame, outbox, matcher))

    def post_frame(
        self, key: int, frame: EdgeFrame, taken: Callable[[], None], matcher: GrammarMatcher | None = None
    ) -> None:
        """Take a later frame of session `key`, then call `taken`; `matcher` enforces a Continue's grammar, if any."""
        arrived = time.monotonic()  # before it is queued: a step may be running
        self._post(lambda: self._take_frame(key, frame, arrived, taken, matcher))

    def post_close(self, key: int) -> None:
        """Free what `key` held: its stream is gone."""
        self._post(lambda: self._close(key))

    def post_half_close(self, key: int) -> None:
        """Expect nothing more on the stream of `key`; a text that runs goes on to its end."""
        self._post(lambda: self._half_close(key))

    def post_drain(self) -> None:
        """Send all sessions elsewhere and admit no more."""
        self._post(self._admission.drain)

    @property
    def session_count(self) -> int:
        """Admitted sessions, without those that are parked until their next turn."""
        return self._slots.num_running

    @property
    def parked_count(self) -> int:
        """Sessions that are parked until their next turn."""
        return self._slots.num_parked

    @property
    def free_pages(self) -> int:
        """KV pages that no session holds."""
        return self._pool.free_pages

    @property
    def page_count(self) -> int:
        """KV pages in all."""
        return self._pool.page_count

    @property
    def credit(self) -> int:
        """Unverified tokens that a session may have in flight."""
        return self._admission.credit

    @property
    def step_s(self) -> float:
        """Smoothed time of a decoding step, seconds; 0: none yet."""
        return self._meter.step_s.value

    @property
    def timings(self) -> deque[StepTiming]:
        """Times of the newest steps; a reader may take them out."""
        return self._meter.timings

    @property
    def draining(self) -> bool:
        """Whether sessions are being sent away."""
        return self._admission.draining

    def _post(self, event: Callable[[], None]) -> None:
        with self._bell:
            self._inbox.append(event)
            self._bell.notify()

    def _wake(self) -> None:
        self._post(lambda: None)

    # --- the engine's thread ---

    def _run(self) -> None:
        wake_at = 0.0
        while not self._stopping:
            try:
                self._take_events(wake_at)
                batch = self._schedule(time.monotonic())
                wake_at = batch.wake_at if not batch.shares else 0.0
                if batch.shares:
                    self._step_or_find_culprit(batch)
            except Exception:  # the thread's top loop must go on for the other sessions
                log.exception("the engine met a defect")

    def _take_events(self, wake_at: float) -> None:
        with self._bell:
            began = time.monotonic()
            if not self._inbox and wake_at > began:
                self._bell.wait(wake_at - began)
                self._meter.waited(time.monotonic() - began)
            events = list(self._inbox)
            self._inbox.clear()
        for event in events:
            try:
                event()
            except Exception:  # one bad event must not end every session
                log.exception("an event failed")

    def _schedule(self, now: float) -> Batch[Slot]:
        """Return the step that begins now, or when to look again if nothing happens before."""
        self._slots.expire(now)
        running = self._slots.running()
        if (masks_by := _masks_by(running)) > now:
            return Batch(wake_at=masks_by)
        asked = [slot for slot in running if slot.busy]  # too late for this step
        ready = [slot for slot in running if not (slot.backlogged or slot.busy)]
        batch = self._batching.plan(ready, self._slots.num_running, now)
        if batch.delayed and self._delayed_until <= now:
            self.metrics.batching_delays.inc()
        self._delayed_until = batch.wake_at if batch.delayed else now
        if not batch.shares:
            look_s = BACKLOG_S if len(asked) + len(ready) < len(running) else IDLE_S
            return replace(batch, wake_at=min(batch.wake_at, now + look_s))
        shares = self._with_masks(batch.shares, now)
        whole = len(shares) == len(batch.shares)
        return Batch(shares) if whole else Batch(wake_at=_masks_by(running))

    def _with_masks(self, shares: Sequence[Share[Slot]], now: float) -> list[Share[Slot]]:
        """Return the shares whose grammar, if any, has its masks ready; ask the others, which wake the engine."""
        masked = []
        for share in shares:
            slot, block = share.slot, share.block
            if slot.matcher is None or block is None:
                masked.append(share)
                continue
            if not slot.matcher.asked:
                slot.masks_by = now + MASKS_WITHIN_S
                slot.matcher.ask(token_ids(block), self._wake)
            try:
                allowed = slot.matcher.allowed(token_ids(block))
            except Exception as error:  # a parser may raise anything for a stranger's grammar
                known = error if isinstance(error, OutriderError) else Internal(f"the grammar failed: {error!r}")
                self._slots.fail(slot, known)
                continue
            if allowed is not None:
                masked.append(replace(share, block=block[: len(allowed.block)]))
        return masked

    def _step_or_find_culprit(self, batch: Batch[Slot]) -> None:
        """Make a step; where it fails, make one for each session alone, so that only the one at fault ends."""
        try:
            self._step(batch)
            return
        except Exception:  # torch may raise anything, lack of memory included
            log.exception("a step of %d sessions failed; trying each alone", len(batch.shares))
        for slot in [share.slot for share in batch.shares if share.slot.session.finish is None]:
            slot.forget_drafts()
            try:
                alone = self._batching.share_of(slot, self._batching.prefill_chunk, self._slots.num_running)
                if shares := self._with_masks([alone], time.monotonic()):
                    self._step(Batch(shares))
            except Exception as error:  # as above
                self._slots.fail(slot, Internal(f"the step failed: {type(error).__name__}"))

    def _step(self, batch: Batch[Slot]) -> None:
        """Run the batch and commit the target's tokens."""
        result = self._runner.run(batch.shares)
        self._meter.record(batch, result.times)
        self._batching.measure(batch, result.times.verify_s, self._slots.num_running)
        for slot, verified in result.verified:
            self._commit(slot, verified)

    def _commit(self, slot: Slot, verified: Verified) -> None:
        now = time.monotonic()
        slot.session.credit = self._admission.credit
        commit = slot.session.on_verified(verified, now)
        if slot.matcher is not None:
            slot.matcher.advance(token_ids(commit.tokens))
        slot.forget_drafts()
        slot.ready_since = now
        self._send(slot, commit)

    def _send(self, slot: Slot, commit: Commit) -> None:
        self.metrics.commit(commit)
        slot.outbox.put(commit)
        if commit.finish is not None:
            self._slots.park(slot, time.monotonic())

    # --- events ---

    def _admit(self, key: int, frame: Open, outbox: Outbox, matcher: GrammarMatcher | None) -> None:
        try:
            slot = self._admission.admit(key, frame, outbox, matcher, time.monotonic())
        except OutriderError as error:
            outbox.put(error)
            return
        self.metrics.admitted.inc()
        log.info("a session is admitted", extra=about(frame.session, self.rules.name))
        outbox.put(slot.session.opened())

    def _take_frame(
        self, key: int, frame: EdgeFrame, arrived: float, taken: Callable[[], None], matcher: GrammarMatcher | None
    ) -> None:
        taken()
        slot = self._slots.get(key)
        if slot is None or (slot.session.finish is not None and not isinstance(frame, Continue | Report)):
            return
        try:
            match frame:
                case Continue():
                    self._admission.resume(slot, frame, matcher, arrived)
                case Draft():
                    slot.session.on_draft(frame, arrived)
                case Report():
                    slot.session.on_report(frame)
                case Cancel():
                    self._send(slot, slot.session.on_cancel())
                case Open():
                    raise InvalidArgument("comes twice in one stream; open another stream", field="frame.open")
        except OutriderError as error:
            self._slots.fail(slot, error)

    def _close(self, key: int) -> None:
        slot = self._slots.get(key)
        if slot is not None:
            self._slots.release(slot)

    def _half_close(self, key: int) -> None:
        slot = self._slots.get(key)
        if slot is None:
            return
        slot.session.on_report(Report(drafting=False))
        if self._slots.is_parked(slot):
            self._slots.evict(slot, "its edge has closed the stream")

    def _stop(self) -> None:
        self._stopping = True
        for slot in self._slots:
            slot.outbox.put(Unavailable("the verifier has stopped; resume elsewhere", retry_after_s=0.1))


def _masks_by(slots: Sequence[Slot]) -> float:
    """Return until when a step waits for the masks of grammars, seconds; 0: it waits for none."""
    return max((slot.masks_by for slot in slots if slot.busy), default=0.0)
