"""What happens to an edge's machine; a frame that comes from the verifier is an event as it is."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.proto.errors import OutriderError
from outrider.proto.policy import Measurements
from outrider.proto.session.instructions import NOTHING_FORCED, CatchUpJob, DraftJob, TeacherForced
from outrider.proto.types import CloudFrame, DraftToken, FinishReason, Sampling


@dataclass(frozen=True, slots=True)
class Started:
    """The text begins, before there is a stream; idle drafters may catch up with its prompt."""


@dataclass(frozen=True, slots=True)
class StreamReady:
    """A stream to the verifier that `lease` names is there, and an Open is to be the first to go over it."""

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
        start: 0 to the transcript's length; what follows is dropped.
        prompt: [n] the tokens that are new.
        sampling: parameters of this turn.
        measurements: from earlier texts of such sampling, if it is of another kind than the last turn's.
    """

    start: int
    prompt: tuple[int, ...]
    sampling: Sampling
    measurements: Measurements | None = None


@dataclass(frozen=True, slots=True)
class Drafted:
    """A drafter has done `job`.

    Attributes:
        job: as it was issued.
        drafts: [n] proposals, at most `job.count`.
        seconds: duration of the job.
        teacher_forced: its proposals in place of the job's teacher-forced tokens.
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
