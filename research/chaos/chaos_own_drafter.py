"""A verifier's own drafter: the shipped source of drafts, with a drafter and threads on the virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from outrider.cloud.drafting.draft_threads import DraftResult, DraftTask, next_task
from outrider.cloud.drafting.drafted_text import OwnDrafter
from outrider.cloud.serving.local_source import LocalSource
from outrider.drafters import ProposalRule
from outrider.drafters.protocol import TokenPrefix
from outrider.proto.errors import Internal
from outrider.proto.types import DraftToken
from research.chaos.chaos_target import VOCAB
from research.chaos.world import Event, LocalClock, Violation, World


class ToyOwnDrafter:
    """A drafter that proposes the target's tokens now and then.

    Attributes:
        right: chance of that.
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
        """Begin an empty prefix."""
        self.num_open += 1
        return ToyOwnPrefix(self, rule)


class ToyOwnPrefix(TokenPrefix):
    """One text's prefix."""

    def __init__(self, drafter: ToyOwnDrafter, rule: ProposalRule) -> None:
        super().__init__()
        self._drafter = drafter
        self._rule = rule

    def follow(self, rule: ProposalRule) -> None:
        """Propose by `rule` from now on."""
        self._rule = rule

    def propose(self, n: int) -> tuple[DraftToken, ...]:
        """Append up to n tokens, and return them."""
        drafter, rng, drafts = self._drafter, self._drafter.world.rng, list[DraftToken]()
        for _ in range(n):
            drafter.worked_s += rng.uniform(0.0002, 0.003)
            if drafter.fails:
                raise Internal("the verifier's own drafter has died")
            token = rng.randrange(VOCAB)
            if rng.random() < drafter.right:
                token = drafter.world.targets.of(self._rule.sampling).token(tuple(self.tokens)).id
            drafts.append(DraftToken(token, rng.random()))
            self.tokens.append(token)
        return tuple(drafts)

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        """Refuse: a verifier scores nothing."""
        raise NotImplementedError

    def close(self) -> None:
        """Give the memory back."""
        super().close()
        self._drafter.num_open -= 1


class SimulatedThreads:
    """The threads of a source, each of which works for one task at a time.

    Attributes:
        stuck_until: true time until which no thread comes back from its work.
    """

    def __init__(self, world: World, threads: int, drafting: OwnDrafting) -> None:
        self.num_threads = threads
        self.stuck_until = 0.0
        self._world = world
        self._drafting = drafting
        self._idle = threads
        self._waiting: list[DraftTask] = []

    @property
    def num_waiting(self) -> int:
        """Number of tasks that wait for a thread."""
        return len(self._waiting)

    def submit(self, task: DraftTask) -> None:
        """Do a task as soon as a thread is free."""
        task.queued_at = self._drafting.clock.monotonic()
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
        """End all threads."""
        return True

    def _begin(self) -> None:
        """Let idle threads take tasks; what a commit overtakes they have drafted before it, or have yet to draft."""
        while self._idle and self._waiting:
            now = self._drafting.clock.monotonic()
            task = next_task(self._waiting, now)
            self._waiting.remove(task)
            self._idle -= 1
            if self._world.rng.random() < 0.5:
                result, seconds = self._drafting.work(task)
                self._drafting.later(seconds, partial(self._end, task, result))
            else:
                task.began_at = now
                self._drafting.later(self._world.rng.uniform(0.0, 0.01), partial(self._work, task))

    def _work(self, task: DraftTask) -> None:
        self._end(task, self._drafting.work(task)[0])

    def _end(self, task: DraftTask, result: DraftResult | BaseException | None) -> None:
        if self._world.now < self.stuck_until:
            self._world.clock.at(self.stuck_until, partial(self._drafting.later, 0.0, partial(self._end, task, result)))
            return
        self._idle += 1
        if result is None:
            self.submit(task)
            return
        task.answer(task, result)
        self._begin()


class OwnDrafting:
    """The own drafter of one process.

    Attributes:
        clock: clock of the process.
        later: has the process do something after seconds of its clock.
        threads: those that draft.
        drafter: the drafter.
        source: source that the engine drives.
    """

    def __init__(
        self, world: World, clock: LocalClock, later: Callable[[float, Event], None], right: float, threads: int
    ) -> None:
        self.clock = clock
        self.later = later
        self.threads = SimulatedThreads(world, threads, self)
        self.drafter = ToyOwnDrafter(world, right)
        price = world.rng.choice((None, 0.0, 1.0))
        self.source = LocalSource(OwnDrafter(self.drafter, VOCAB), self.threads, price, self._reads)
        self._world = world

    def _reads(self) -> float:
        return self.clock.monotonic() + self.drafter.worked_s

    def work(self, task: DraftTask) -> tuple[DraftResult | BaseException | None, float]:
        """Return the result of a task's next piece, and the virtual seconds that it takes."""
        self.drafter.worked_s = 0.0
        result: DraftResult | BaseException | None
        try:
            result = task.work()
        except Internal as error:
            result = error
        else:
            self._check_prefix(task)
        seconds, self.drafter.worked_s = self.drafter.worked_s, 0.0
        self._world.counts["own drafts"] += 0 if isinstance(result, Internal | None) else len(result.done.drafts)
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
