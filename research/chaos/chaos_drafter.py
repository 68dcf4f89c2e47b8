"""The drafter of one edge: it proposes the target's tokens now and then, late and sometimes not at all."""

from __future__ import annotations

import random
from collections.abc import Callable

from outrider.proto.errors import Internal
from outrider.proto.session import CatchUpJob, CaughtUp, Drafted, DrafterFailed, DraftJob, TeacherForced
from outrider.proto.types import DraftToken
from research.chaos.chaos_target import VOCAB
from research.chaos.world import Violation


class ToyDrafter:
    """Keeps the prefix that it was given, and fails where a job does not follow it.

    Attributes:
        fails: whether it is broken from the next job on.
    """

    def __init__(self, choose: Callable[[tuple[int, ...]], int], right: float, rng: random.Random) -> None:
        """Propose the token that `choose` gives after a prefix, with chance `right`."""
        self.fails = False
        self._choose = choose
        self._right = right
        self._rng = rng
        self._prefix: tuple[int, ...] = ()

    def do(self, job: DraftJob | CatchUpJob) -> tuple[Drafted | CaughtUp | DrafterFailed, float]:
        """Return the result of a job, and the seconds until it is there."""
        if job.truncate_to > len(self._prefix):
            raise Violation(f"a job truncates the drafter's {len(self._prefix)} tokens to {job.truncate_to}")
        seconds = self._rng.uniform(0.0005, 0.006)
        if self.fails:
            return DrafterFailed(Internal("the drafter has died"), job.drafter), seconds
        if isinstance(job, CatchUpJob):
            self._prefix = self._prefix[: job.truncate_to] + job.tokens
            return CaughtUp(job, TeacherForced(()), seconds), seconds
        forced_from = job.truncate_to + job.skip
        prefix = self._prefix[: job.truncate_to] + job.extend_with
        forced = [DraftToken(self._propose(prefix[:at])) for at in range(forced_from, forced_from + job.teacher_forced)]
        drafts: list[DraftToken] = []
        for _ in range(job.count if self._rng.random() < 0.9 else self._rng.randrange(job.count + 1)):
            token = self._propose(prefix)
            others = tuple({self._rng.randrange(VOCAB) for _ in range(2)} - {token})
            drafts.append(DraftToken(token, runners_up=others))
            prefix += (token,)
        self._prefix = prefix
        return Drafted(job, tuple(drafts), seconds, TeacherForced(tuple(forced))), seconds

    def _propose(self, prefix: tuple[int, ...]) -> int:
        return self._choose(prefix) if self._rng.random() < self._right else self._rng.randrange(VOCAB)
