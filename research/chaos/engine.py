"""The engine of a simulated process: the shipped rules of sessions, batches and steps that fail, without its thread."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

from outrider.cloud.serving.admission import Admission
from outrider.cloud.serving.batching import Batch, Batching
from outrider.cloud.serving.heartbeat import Heartbeat
from outrider.cloud.serving.inbox import WaitingEvents
from outrider.cloud.serving.local_source import NoSource
from outrider.cloud.serving.masks import Masks
from outrider.cloud.serving.metrics import VerifierMetrics
from outrider.cloud.serving.recovery import Probe, Recovery, VerifierFailed
from outrider.cloud.serving.session_events import SessionEvents
from outrider.cloud.serving.slots import KeyLimit, Outbox, Slot, Slots
from outrider.proto.session import Verified, VerifierRules
from outrider.proto.types import EdgeFrame, Open, common_length, token_ids
from research.chaos.pages import CountedPages, toy_facts
from research.chaos.steps import StepFault, StepTrouble, ToyRunner
from research.chaos.target import CONTEXT, EOS, VOCAB
from research.chaos.world import Event, LocalClock, Violation, World

IDLE_S = 0.5
MAX_WAITING = 400  # events of all sessions of a schedule; more would be a queue without bound
Watch = Callable[[str], None]


class Shape(NamedTuple):
    """The size of a verifier.

    Attributes:
        pages: KV pages.
        max_sessions: most sessions.
        right: chance that its own drafter proposes the target's token; None: it has none.
        threads: threads of that.
    """

    pages: int
    max_sessions: int
    right: float | None = None
    threads: int = 1


@cache
def shared_metrics() -> VerifierMetrics:
    """Return metrics that nobody reads, for all verifiers: making them takes longer than a schedule."""
    return VerifierMetrics("toy", "simulated")


class SimulatedEngine:
    """Sessions on a counted KV cache, stepped on a virtual clock.

    Attributes:
        trouble: what goes wrong in its steps.
        heart: notes of its loop.
        waiting: events that it has yet to take.
    """

    def __init__(
        self,
        world: World,
        clock: LocalClock,
        rules: VerifierRules,
        shape: Shape,
        source: NoSource,
        watch: Watch,
        awake: Callable[[], None],
        still_until: Callable[[], float],
        on_failure: Callable[[], None],
    ) -> None:
        """Decode with the pages and places of `shape`.

        Args:
            world: world of the schedule.
            clock: clock of its process.
            rules: rules that sessions are told.
            shape: size of the verifier.
            source: its own drafter, if it has one.
            watch: called with the id of a session after its commit.
            awake: called when it gets something to do.
            still_until: true time until which it stands still; infinite: for ever.
            on_failure: called when no step succeeds any more.
        """
        self.trouble = StepTrouble()
        self.heart = Heartbeat(clock.monotonic)
        self.waiting = WaitingEvents()
        self.pages = CountedPages(shape.pages, toy_facts(VOCAB, EOS, CONTEXT), world.rng)
        self.slots = Slots(self.pages, rules.name, lambda *_: None)
        self.admission = Admission(self.slots, rules, shape.max_sessions, source)
        self.events = SessionEvents(self.slots, self.admission, self.pages)
        self._world = world
        self._clock = clock
        self._rules = rules
        self._watch = watch
        self._awake = awake
        self._still_until = still_until
        self._on_failure = on_failure
        self._batching = Batching()
        self._runner = ToyRunner(world, clock, self.pages, self.trouble)
        self._recovery = Recovery(
            self.slots,
            self._batching,
            Probe(rules, self.pages, self._batching, self._runner),
            self.pages,
            self._step,
            Masks(self.slots, lambda: None),
            shared_metrics().corrupted.inc,
        )
        self._busy = False
        self._alarm_at = math.inf
        self._source = source
        source.serve(self.slots, self._batching, self.post, shared_metrics())

    @property
    def stands_still(self) -> bool:
        """Whether it does nothing now."""
        return self._world.now < self._still_until()

    def post(self, event: Event, key: int | None = None, frame: EdgeFrame | None = None) -> None:
        """Take an event, after a step that runs."""
        self.waiting.add(event, key, frame)
        if len(self.waiting) > MAX_WAITING:
            raise Violation(f"{len(self.waiting)} events wait for the engine of {self._rules.name}")
        self._awake()
        self.run()

    def admit(self, key: int, frame: Open, outbox: Outbox, limit: KeyLimit | None) -> bool:
        """Admit a session, as an event; return whether there is a slot for it."""
        slot = self.events.admit(key, frame, outbox, None, "", self._clock.monotonic(), limit)
        if slot is not None:
            outbox.put(slot.session.opened())
        return slot is not None

    def take_frame(self, key: int, frame: EdgeFrame, arrived: float) -> None:
        """Take a later frame of stream `key`, as an event."""
        slot = self.events.expects(key, frame)
        if slot is not None:
            self.events.take(slot, frame, None, arrived, self._clock.monotonic())

    @property
    def is_idle(self) -> bool:
        """Whether it turns, and has nothing to do."""
        return not (self._busy or self.stands_still or len(self.slots) or self.waiting)

    def turn(self) -> None:
        """Turn the loop once, as the engine's thread does now and then when nothing happens."""
        if not (self._busy or self.stands_still):
            self.heart.beat()

    def run(self) -> None:
        """Take the events that wait, then begin a step if one is due, as the engine's thread does."""
        if self._busy or self.stands_still:
            return
        self.heart.beat()
        while self.waiting:
            for event in self.waiting.take():
                event()
        if self.admission.failed:
            return
        now = self._clock.monotonic()
        self.slots.expire(now)
        self.slots.grow()
        self.slots.start_waiting()
        self._source.drive(now)
        batch = self._batching.plan([slot for slot in self.slots.running() if not slot.backlogged], now)
        if batch.shares:
            self._busy = True
            self._source.begin(batch.shares, now)
            self.heart.begin(batch.num_rows, reads=not batch.only_decodes)
            self._clock.after(self._runner.seconds(batch), partial(self._end_step, batch))
        elif len(self.slots):
            self._set_alarm(min(batch.wake_at, now + IDLE_S))

    def _set_alarm(self, at: float) -> None:
        if at < self._alarm_at:
            self._alarm_at = at
            self._clock.after(at - self._clock.monotonic(), partial(self._ring, at))

    def _ring(self, at: float) -> None:
        if at == self._alarm_at:
            self._alarm_at = math.inf
            self.run()

    def _end_step(self, batch: Batch[Slot]) -> None:
        until = self._still_until()
        if self._world.now < until:
            if until < math.inf:
                self._world.clock.at(until, partial(self._end_step, batch))
            return
        self._busy = False
        try:
            self._step_or_recover(batch)
        except VerifierFailed:
            self.events.give_up()
            self._on_failure()
        self.run()

    def _step_or_recover(self, batch: Batch[Slot]) -> None:
        try:
            self._finish(batch)
        except (StepFault, MemoryError, FloatingPointError):
            self.heart.fail()
            self._recovery.after_step(batch)

    def _step(self, batch: Batch[Slot]) -> None:
        """Make a step of a recovery, which takes no time here."""
        self.heart.begin(batch.num_rows, reads=not batch.only_decodes)
        self._finish(batch)

    def _finish(self, batch: Batch[Slot]) -> None:
        """Commit the target's tokens of a step whose time is over."""
        result = self._runner.run(batch.shares)
        self.heart.end()
        self._batching.measure(batch, result.times.verify_s, self.slots.num_running)
        for event in self.waiting.take_drafts():
            event()
        for slot, verified in result.verified:
            if self.slots.get(slot.key) is slot:
                self._commit(slot, verified)

    def _commit(self, slot: Slot, verified: Verified) -> None:
        """Commit; fail where that is anything but an append, or drafts stay that do not follow or exceed the credit."""
        session = slot.session
        received = session._next.received
        chain, drafts = received.chain, token_ids(received.tokens)
        commit = self.events.commit(slot, verified, self._clock.monotonic())
        self._recovery.note_commit()
        if commit.start + len(commit.tokens) != len(session.transcript):
            raise Violation(f"{session.id}: a commit of {len(commit.tokens)} tokens ends no transcript")
        said = token_ids(commit.tokens)
        left = drafts[len(said) :] if common_length(drafts, said) == min(len(drafts), len(said)) else ()
        if received.chain == chain and token_ids(received.tokens) != left:
            raise Violation(f"{session.id}: drafts of a chain that has missed are kept")
        if len(received) > session._rules.max_credit:
            raise Violation(f"{session.id}: more unverified drafts than any credit")
        self._watch(session.id)
