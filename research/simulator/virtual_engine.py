"""The shipped engine on a virtual clock, on which its steps take time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial

from outrider.cloud.serving.batching import Batch, Batching, Share
from outrider.cloud.serving.engine import EngineCore
from outrider.cloud.serving.local_source import NoSource
from outrider.cloud.serving.steps import StepResult
from outrider.cloud.serving.verifier_metrics import VerifierMetrics
from outrider.proto.session.acceptance import branch_taken
from outrider.proto.session.verifier import Verified, VerifierRules, VerifierSession
from outrider.proto.types import CommittedToken, DraftToken, token_ids
from research.simulator.pages import CountedPages


class TimedRunner:
    """Runs steps, whose time is known before, on a target without a model."""

    def __init__(self, pages: CountedPages, clock: Callable[[], float]) -> None:
        self._pages = pages
        self._clock = clock

    def seconds(self, batch: Batch) -> float:
        raise NotImplementedError

    def after(self, session: VerifierSession, block: tuple[DraftToken, ...]) -> tuple[CommittedToken, ...]:
        """Return the target's [k + 1] tokens after a session's transcript and after each of the drafts `block` [k]."""
        raise NotImplementedError

    def reward(self, session: VerifierSession, drafts: int) -> float | None:  # noqa: ARG002 - most know none
        """Return the mean of min(1, p / q) over so many drafts after a session's transcript; None: not known."""
        return None

    def run(self, shares: Sequence[Share]) -> StepResult:
        """Verify the drafts of a step whose time is over, along a branch where the target's tokens follow one."""
        now, verify_s, verified = self._clock(), self.seconds(Batch(shares)), []
        began = now - verify_s
        for share in shares:
            session, path = share.slot.session, share.block or ()
            if share.block is not None:
                tokens = self.after(session, path)
                if (branch := branch_taken(path, share.branches, token_ids(tokens))) is not None:
                    path = (*path[: branch.index], *branch.drafts)
                    tokens = self.after(session, path)
                reward = self.reward(session, len(path)) if any(draft.confidence > 0 for draft in path) else None
                queue_s, beside = max(0.0, began - share.slot.ready_since), share.num_drafts - len(path)
                verified.append((share.slot, Verified(path, tokens, queue_s, verify_s, reward=reward, beside=beside)))
            self._pages.compute(share.slot.handle, share.num_tokens + len(path))
        return StepResult(verified, began, now, now, now)


@cache
def shared_metrics() -> VerifierMetrics:
    """Return metrics that nobody reads, for all engines: making them takes longer than a schedule."""
    return VerifierMetrics("simulated", "simulated")


class VirtualEngine(EngineCore):
    """An engine whose thread is a virtual clock's events; it raises whatever fails in it."""

    def __init__(
        self,
        pages: CountedPages,
        runner: TimedRunner,
        rules: VerifierRules,
        max_sessions: int,
        batching: Batching,
        source: NoSource | None,
        clock: Callable[[], float],
        after: Callable[[float, Callable[[], None]], None],
        on_failure: Callable[[], None] = lambda: None,
        *,
        commit_s: float = 0.0,
        idle_s: float = math.inf,
    ) -> None:
        """Decode as `EngineCore` does.

        `after` has an event happen in seconds of `clock`. A step is over `commit_s` after its commits are made, and a
        turn comes `idle_s` after the last while there are sessions.
        """
        self._timed = runner
        self._after = after
        self._commit_s = commit_s
        self._idle_s = idle_s
        self._busy = False
        self._alarm_at = math.inf
        super().__init__(
            pages, runner, rules, max_sessions, batching, shared_metrics(), self._rung, on_failure, source, clock=clock
        )

    @property
    def stands_still(self) -> bool:
        return False

    def run(self) -> None:
        """Take the events that wait, then begin a step if one is due, as the engine's thread does."""
        if self._busy or self.stands_still:
            return
        self._busy = True
        batch = self.handle()
        while self.inbox and not batch.shares:
            batch = self.handle()
        if batch.shares:
            self._after(self._timed.seconds(batch), partial(self._end_step, batch))
            return
        self._busy = False
        idle_at = self._clock() + self._idle_s if len(self.sessions) else math.inf
        self._set_alarm(min(batch.wake_at, idle_at))

    def _rung(self) -> None:
        self.run()

    def _set_alarm(self, at: float) -> None:
        if at < self._alarm_at:
            self._alarm_at = at
            self._after(at - self._clock(), partial(self._ring, at))

    def _ring(self, at: float) -> None:
        if at == self._alarm_at:
            self._alarm_at = math.inf
            self.run()

    def _end_step(self, batch: Batch) -> None:
        self.step(batch)
        self._after(self._commit_s, self._go_on)

    def _go_on(self) -> None:
        self._busy = False
        self.run()

    def _note_defect(self, what_failed: str, error: Exception) -> None:  # noqa: ARG002 - the error says it
        raise error
