"""The engine of a simulated process: the shipped one without its thread, its steps, and the drafter beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from outrider.cloud.serving.batching import Batch, Batching, Share
from outrider.cloud.serving.local_source import LocalSource, NoSource
from outrider.cloud.serving.own_drafter import DraftTask, OwnDrafter, next_task
from outrider.cloud.serving.slots import Slot
from outrider.cloud.serving.steps import StepResult
from outrider.drafters import ProposalRule
from outrider.drafters.protocol import TokenPrefix
from outrider.proto.errors import Internal
from outrider.proto.session import Drafted
from outrider.proto.session.verifier import Verified, VerifierRules, VerifierSession
from outrider.proto.types import Commit, CommittedToken, DraftToken, common_length, token_ids
from research.chaos.world import CONTEXT, EOS, TOKENIZER, VOCAB, Event, LocalClock, Violation, World
from research.simulator.pages import CountedPages, toy_facts
from research.simulator.virtual_engine import TimedRunner, VirtualEngine

SLOW_STEP_S = 1.6  # above the least time of a slow step, and far above ten times the usual one
IDLE_S = 0.5  # between turns of the engine's thread in which nothing happens
MAX_WAITING = 400  # events of all sessions of a schedule; more would be a queue without bound
Watch = Callable[[str], None]


class StepFault(Exception):
    """A step that fails, as a target's may."""


class ToyRunner(TimedRunner):
    """Runs batches on the toy target, or lets them fail.

    Attributes:
        failures: next steps that fail; infinite: all do, from now on.
        max_rows: most rows for which there is memory.
        slow: whether steps take `SLOW_STEP_S`.
    """

    def __init__(self, world: World, clock: LocalClock, pages: CountedPages) -> None:
        super().__init__(pages, clock.monotonic)
        self.failures = 0.0
        self.max_rows = math.inf
        self.slow = False
        self._world = world

    def seconds(self, batch: Batch) -> float:
        return SLOW_STEP_S if self.slow else 0.004 + 0.001 * batch.num_rows

    def after(self, session: VerifierSession, block: tuple[DraftToken, ...]) -> tuple[CommittedToken, ...]:
        return self._world.target_of(session.sampling).after(session.transcript, block)

    def run(self, shares: Sequence[Share]) -> StepResult:
        if self.failures:
            self.failures -= 1
            raise StepFault("a step fails")
        if sum(share.num_rows for share in shares) > self.max_rows:
            raise MemoryError
        if any(share.slot.session.id in self._world.poisoned for share in shares):
            raise FloatingPointError("the logits of a text are no numbers")
        return super().run(shares)


class ToyOwnDrafter:
    """A drafter that proposes the target's tokens with chance `right`.

    Attributes:
        fails: whether every proposal fails.
        num_open: prefixes that are open.
        worked_s: virtual time of its work since somebody has last reset that, in seconds.
    """

    name, version, steering = "own", "1", None

    def __init__(self, world: World, right: float) -> None:
        self.right = right
        self.fails = False
        self.num_open = 0
        self.worked_s = 0.0
        self.world = world

    def open(self, rule: ProposalRule) -> ToyOwnPrefix:
        self.num_open += 1
        return ToyOwnPrefix(self, rule)


class ToyOwnPrefix(TokenPrefix):
    """One text's prefix."""

    def __init__(self, drafter: ToyOwnDrafter, rule: ProposalRule) -> None:
        super().__init__()
        self._drafter = drafter
        self._rule = rule

    def follow(self, rule: ProposalRule) -> None:
        self._rule = rule

    def propose(self, n: int) -> tuple[DraftToken, ...]:
        drafter, rng, drafts = self._drafter, self._drafter.world.rng, list[DraftToken]()
        for _ in range(n):
            drafter.worked_s += rng.uniform(0.0002, 0.003)
            if drafter.fails:
                raise Internal("the verifier's own drafter has died")
            token = rng.randrange(VOCAB)
            if rng.random() < drafter.right:
                token = drafter.world.target_of(self._rule.sampling).token(tuple(self.tokens)).id
            drafts.append(DraftToken(token, rng.random()))
            self.tokens.append(token)
        return tuple(drafts)

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        """Refuse: a verifier scores nothing."""
        raise NotImplementedError

    def close(self) -> None:
        super().close()
        self._drafter.num_open -= 1


class OwnDrafting:
    """The own drafter of one process, and the threads of its source, each of which works for one task at a time.

    Attributes:
        source: source that the engine drives.
        stuck_until: true time until which no thread comes back from its work.
    """

    def __init__(
        self, world: World, clock: LocalClock, later: Callable[[float, Event], None], right: float, threads: int
    ) -> None:
        """Draft in so many threads; `later` has the process do something after seconds of its clock."""
        self.num_threads = self._idle = threads
        self.stuck_until = 0.0
        self.drafter = ToyOwnDrafter(world, right)
        price = world.rng.choice((None, 0.0, 1.0))
        self.source = LocalSource(OwnDrafter(self.drafter, VOCAB), self, price, self._reads)
        self._world = world
        self._clock = clock
        self._later = later
        self._waiting: list[DraftTask] = []

    # --- the threads ---

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, task: DraftTask) -> None:
        task.queued_at = self._clock.monotonic()
        task.due_since = task.due_since or task.queued_at
        task.began_at = 0.0
        self._waiting.append(task)
        self._begin()

    def drop(self, task: DraftTask) -> bool:
        """Take back a task that has not begun, and return whether that was in time."""
        if task not in self._waiting:
            return False
        self._waiting.remove(task)
        return True

    def stop(self) -> bool:
        return True

    def _begin(self) -> None:
        """Let idle threads take tasks; what a commit overtakes they have drafted before it, or have yet to draft."""
        while self._idle and self._waiting:
            now = self._clock.monotonic()
            task = next_task(self._waiting, now)
            self._waiting.remove(task)
            self._idle -= 1
            if self._world.rng.random() < 0.5:
                result, seconds = self._work(task)
                self._later(seconds, partial(self._end, task, result))
            else:
                task.began_at = now
                self._later(self._world.rng.uniform(0.0, 0.01), partial(self._work_and_end, task))

    def _work_and_end(self, task: DraftTask) -> None:
        self._end(task, self._work(task)[0])

    def _end(self, task: DraftTask, result: Drafted | BaseException | None) -> None:
        if self._world.now < self.stuck_until:
            self._world.clock.at(self.stuck_until, partial(self._later, 0.0, partial(self._end, task, result)))
            return
        self._idle += 1
        if result is None:
            self.submit(task)
            return
        task.answer(task, result)
        self._begin()

    # --- the work ---

    def _reads(self) -> float:
        return self._clock.monotonic() + self.drafter.worked_s

    def _work(self, task: DraftTask) -> tuple[Drafted | BaseException | None, float]:
        """Return the result of a task's next piece, and the virtual seconds that it takes."""
        self.drafter.worked_s = 0.0
        result: Drafted | BaseException | None
        try:
            result = task.work()
        except Internal as error:
            result = error
        else:
            self._check_prefix(task)
        seconds, self.drafter.worked_s = self.drafter.worked_s, 0.0
        self._world.counts["own drafts"] += 0 if isinstance(result, Internal | None) else len(result.drafts)
        return result, seconds

    def _check_prefix(self, task: DraftTask) -> None:
        """Fail where a job that goes on is for another text than its session's."""
        followed = next((each for each in self.source._texts.values() if each.task is task), None)
        state = task.text._state
        if followed is None or not isinstance(state, ToyOwnPrefix) or not task.goes_on(task.job):
            return
        transcript = followed.slot.session.transcript
        prefix = state.tokens[: task.job.job.start]
        if prefix[: len(transcript)] != transcript[: len(prefix)]:
            raise Violation(f"{followed.slot.session.id}: the verifier's own drafter follows another text")

    def check_rest(self, who: str) -> None:
        """Fail where a text is left in the drafter."""
        if self.drafter.num_open or self.source._texts:
            raise Violation(
                f"{who} still drafts for {len(self.source._texts)} texts, with {self.drafter.num_open} open"
            )


class Shape(NamedTuple):
    """The size of a verifier; `right` is the chance of its own drafter, None: it has none."""

    pages: int
    max_sessions: int
    right: float | None = None
    threads: int = 1


class SimulatedEngine(VirtualEngine):
    """The shipped engine on a counted KV cache, which may stand still, and whose steps may fail."""

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
        """Decode with the pages and slots of `shape`.

        `watch` is called with the id of a session after its commit, `awake` when there is something to do, and
        `on_failure` when no step succeeds any more; until the true time `still_until` it stands still.
        """
        self.pages = CountedPages(shape.pages, toy_facts(TOKENIZER, VOCAB, CONTEXT, frozenset({EOS})), world.rng)
        self.steps = ToyRunner(world, clock, self.pages)
        super().__init__(
            self.pages,
            self.steps,
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
        return self._world.now < self._still_until()

    @property
    def is_idle(self) -> bool:
        """Whether it turns, and has nothing to do."""
        return not (self._busy or self.stands_still or len(self.sessions) or self.inbox)

    def idle(self) -> None:
        """Turn once, as the engine's thread does now and then when nothing happens."""
        if not (self._busy or self.stands_still):
            self.heart.beat()

    def _rung(self) -> None:
        if len(self.inbox) > MAX_WAITING:
            raise Violation(f"{len(self.inbox)} events wait for the engine of {self.rules.name}")
        self._awake()
        self.run()

    def _end_step(self, batch: Batch) -> None:
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
