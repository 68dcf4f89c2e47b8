"""The engine of a simulated process: the shipped one, without its thread."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from outrider.cloud.serving.batching import Batch, Batching
from outrider.cloud.serving.local_source import NoSource
from outrider.cloud.serving.slots import Slot
from outrider.proto.session import Verified, VerifierRules
from outrider.proto.types import Commit, common_length, token_ids
from research.chaos.chaos_target import CONTEXT, EOS, TOKENIZER, VOCAB
from research.chaos.scripted_steps import StepFault, StepTrouble, ToyRunner
from research.chaos.world import LocalClock, Violation, World
from research.simulator.pages import CountedPages, toy_facts
from research.simulator.virtual_engine import VirtualEngine

IDLE_S = 0.5  # between turns of the engine's thread in which nothing happens
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


class SimulatedEngine(VirtualEngine):
    """The shipped engine on a counted KV cache, which may stand still, and whose steps may fail.

    Attributes:
        trouble: what goes wrong in its steps.
        pages: its KV cache.
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
        self.pages = CountedPages(shape.pages, toy_facts(TOKENIZER, VOCAB, CONTEXT, frozenset({EOS})), world.rng)
        super().__init__(
            self.pages,
            ToyRunner(world, clock, self.pages, self.trouble),
            rules,
            shape.max_sessions,
            Batching(),
            source,
            clock.monotonic,
            clock.after,
            on_failure,
            idle_s=IDLE_S,
        )
        self._world = world
        self._watch = watch
        self._awake = awake
        self._still_until = still_until

    @property
    def stands_still(self) -> bool:
        """Whether it does nothing now."""
        return self._world.now < self._still_until()

    @property
    def is_idle(self) -> bool:
        """Whether it turns, and has nothing to do."""
        return not (self._busy or self.stands_still or len(self.slots) or self.inbox)

    def idle(self) -> None:
        """Turn once, as the engine's thread does now and then when nothing happens."""
        if not (self._busy or self.stands_still):
            self.heart.beat()

    def _rung(self) -> None:
        if len(self.inbox) > MAX_WAITING:
            raise Violation(f"{len(self.inbox)} events wait for the engine of {self.rules.name}")
        self._awake()
        self.run()

    def _end_step(self, batch: Batch[Slot]) -> None:
        until = self._still_until()
        if self._world.now < until:
            if until < math.inf:
                self._world.clock.at(until, partial(self._end_step, batch))
            return
        self.step(batch)
        self._go_on()

    def _note_defect(self, what_failed: str, error: Exception) -> None:
        if not isinstance(error, StepFault | MemoryError | FloatingPointError):
            raise Violation(f"{what_failed}: {error!r}") from error

    def _commit(self, slot: Slot, verified: Verified) -> Commit:
        """Commit; fail where that is anything but an append, or drafts stay that do not follow or exceed the credit."""
        session = slot.session
        received = session.received
        chain, drafts = received.chain, token_ids(received.tokens)
        commit = super()._commit(slot, verified)
        if commit.start + len(commit.tokens) != len(session.transcript):
            raise Violation(f"{session.id}: a commit of {len(commit.tokens)} tokens ends no transcript")
        said = token_ids(commit.tokens)
        left = drafts[len(said) :] if common_length(drafts, said) == min(len(drafts), len(said)) else ()
        if received.chain == chain and token_ids(received.tokens) != left:
            raise Violation(f"{session.id}: drafts of a chain that has missed are kept")
        if len(received) > session._rules.max_credit:
            raise Violation(f"{session.id}: more unverified drafts than any credit")
        self._watch(session.id)
        return commit
