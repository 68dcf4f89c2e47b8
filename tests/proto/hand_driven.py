"""An edge's machine driven by hand: one event at a time, and a job only where the test asks for one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

from outrider.proto.errors import OutriderError
from outrider.proto.policy import Measurements
from outrider.proto.session import (
    CatchUpJob,
    CaughtUp,
    Disconnected,
    Drafted,
    DrafterFailed,
    DraftJob,
    EdgeInstruction,
    EdgeSession,
    Send,
    StopRequested,
    StreamReady,
    TeacherForced,
    TurnBegun,
)
from outrider.proto.types import Commit, CommittedToken, DraftToken, FinishReason, Goaway, Open, Opened, Sampling


def drafts_of(tokens: Sequence[int], confidence: Sequence[float] = ()) -> tuple[DraftToken, ...]:
    """Drafts of these ids; without confidence it is not known."""
    return tuple(map(DraftToken, tokens, confidence or [math.nan] * len(tokens)))


def committed(*ids: int) -> tuple[CommittedToken, ...]:
    """Tokens of which nothing else was asked."""
    return tuple(map(CommittedToken, ids))


def frames(instructions: Sequence[EdgeInstruction], kind: type[Any]) -> list[Any]:
    """Return the frames of this kind that are sent."""
    return [each.frame for each in instructions if isinstance(each, Send) and isinstance(each.frame, kind)]


class HandDrivenEdge(EdgeSession):
    """A machine that gives out no work by itself: `next_job`, `on_idle` and `next_catch_up` ask for it."""

    def _give_work(self, now: float) -> list[EdgeInstruction]:
        return []

    def next_job(self, most: int, measurements: Measurements | None = None) -> DraftJob | None:
        """The drafting job that is due, of at most `most` tokens; None where none is."""
        if measurements is not None:
            self._meter.adopt(measurements)
        self._job_tokens = lambda _: most
        self._review()
        if self._running is not None:
            return None
        job = self._draft_job()
        self._issue(job)
        return job

    def on_idle(self, now: float) -> list[Send]:
        """Return the frames that go where there is nothing to draft."""
        return [] if self._job_runs or self.done or self._allowance() > 0 else self._flush(now)

    def next_catch_up(self) -> CatchUpJob | None:
        if self._running is not None:
            return None
        job = self._catch_up_job()
        self._issue(job)
        return job

    def allowance(self) -> int:
        return self._allowance()

    @property
    def survival(self) -> float:
        return self._tree.survival(self.drafter)

    # --- events; frames of the verifier are those of the newest stream ---

    def _of_this_stream(self, frame: Opened | Commit | Goaway) -> Opened | Commit | Goaway:
        return replace(frame, epoch=self._stream.epoch)

    def open_frame(self, lease: bytes, now: float) -> Open:
        (instruction,) = self.handle(StreamReady(lease), now)
        assert isinstance(instruction, Send)
        assert isinstance(instruction.frame, Open)
        return instruction.frame

    def opened(self, opened: Opened, now: float = 0.0, *, sent_at: float = 0.0) -> Self:
        """Open the first stream, and return the machine."""
        self.open_frame(b"", sent_at)
        self.on_opened(opened, now)
        return self

    def on_opened(self, opened: Opened, now: float) -> list[EdgeInstruction]:
        return self.handle(self._of_this_stream(opened), now)

    def on_commit(self, commit: Commit, now: float) -> list[EdgeInstruction]:
        return self.handle(self._of_this_stream(commit), now)

    def on_goaway(self, goaway: Goaway, now: float) -> list[EdgeInstruction]:
        return self.handle(self._of_this_stream(goaway), now)

    def on_disconnected(self, error: OutriderError, now: float) -> list[EdgeInstruction]:
        return self.handle(Disconnected(error), now)

    def on_cancel(self, finish: FinishReason = FinishReason.CANCELLED) -> list[EdgeInstruction]:
        return self.handle(StopRequested(finish), 0.0)

    def on_turn(
        self,
        start: int,
        prompt: tuple[int, ...],
        sampling: Sampling,
        now: float,
        measurements: Measurements | None = None,
    ) -> list[EdgeInstruction]:
        return self.handle(TurnBegun(start, prompt, sampling, measurements), now)

    def on_drafted(
        self,
        job: DraftJob | None,
        tokens: tuple[int, ...],
        q: tuple[float, ...],
        seconds: float,
        now: float,
        **forced: TeacherForced,
    ) -> list[EdgeInstruction]:
        assert job is not None
        return self.handle(Drafted(job, drafts_of(tokens, q), seconds, **forced), now)

    def on_caught_up(self, job: CatchUpJob, forced: TeacherForced, seconds: float, now: float) -> list[EdgeInstruction]:
        return self.handle(CaughtUp(job, forced, seconds), now)

    def on_drafter_failed(self, error: OutriderError) -> list[EdgeInstruction]:
        return self.handle(DrafterFailed(error, self.drafter), 0.0)
