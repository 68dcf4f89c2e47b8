"""Events of an edge's machine; a frame from the verifier is an event as it is."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.proto.errors import OutriderError
from outrider.proto.policy import Measurements
from outrider.proto.session.instructions import NOTHING_FORCED, CatchUpJob, DraftJob, TeacherForced
from outrider.proto.types import CloudFrame, DraftToken, FinishReason, Sampling


@dataclass(frozen=True, slots=True)
class Started:
    """The text begins before there is a stream, and idle drafters may catch up with its prompt."""


@dataclass(frozen=True, slots=True)
class StreamReady:
    """A stream to the verifier that `lease` names is open, and waits for an Open."""

    lease: bytes


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The stream broke, or could not be opened."""

    error: OutriderError


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The user wants no more, or has seen a stop string."""

    finish: FinishReason = FinishReason.CANCELLED


@dataclass(frozen=True, slots=True)
class TurnBegun:
    """Another turn begins after the last is done: `prompt` [n] follows the first `start` tokens of the transcript.

    Attributes:
        start: tokens of the transcript that stay; the others are dropped.
        prompt: [n] new tokens.
        sampling: parameters of this turn.
        measurements: those of earlier texts with such sampling, if it is of another kind than the last turn's.
    """

    start: int
    prompt: tuple[int, ...]
    sampling: Sampling
    measurements: Measurements | None = None


@dataclass(frozen=True, slots=True)
class Drafted:
    """A drafter has done `job`.

    Attributes:
        job: job that was issued.
        drafts: [n] proposals, at most `job.count`.
        seconds: duration of the job, in seconds.
        teacher_forced: proposals in place of the job's teacher-forced tokens.
    """

    job: DraftJob
    drafts: tuple[DraftToken, ...]
    seconds: float
    teacher_forced: TeacherForced = NOTHING_FORCED


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """An idle drafter has done `job` in `seconds`."""

    job: CatchUpJob
    teacher_forced: TeacherForced
    seconds: float


@dataclass(frozen=True, slots=True)
class DrafterFailed:
    """The drafter of index `drafter` is broken."""

    error: OutriderError
    drafter: int


EdgeEvent = (
    CloudFrame | Started | StreamReady | Disconnected | Cancelled | TurnBegun | Drafted | CaughtUp | DrafterFailed
)
