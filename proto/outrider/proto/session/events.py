"""Events and instructions of an edge's machine; a frame from the verifier is an event as it is."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.proto.errors import OutriderError
from outrider.proto.policy import Measurements
from outrider.proto.session.jobs import NOTHING_FORCED, CatchUpJob, DraftJob, TeacherForced
from outrider.proto.session.selection import Selection
from outrider.proto.types import (
    CloudFrame,
    CommittedToken,
    DraftToken,
    EdgeFrame,
    FinishReason,
    Opened,
    Sampling,
    TokenFacts,
)

# --- instructions ---


@dataclass(frozen=True, slots=True)
class Send:
    """Put `frame` on the stream."""

    frame: EdgeFrame


@dataclass(frozen=True, slots=True)
class Emit:
    """Hand committed tokens [n] to the user, from position `start` on; `drafted` [n] marks the accepted drafts.

    The first of a text also has what the model says of the `prompt`'s tokens after their first, where that was wanted.
    """

    start: int
    tokens: tuple[CommittedToken, ...]
    drafted: tuple[bool, ...]
    prompt: tuple[TokenFacts, ...] = ()


@dataclass(frozen=True, slots=True)
class Reopen:
    """Leave the stream; get a lease and open another after `after_s` seconds."""

    after_s: float
    reason: OutriderError


@dataclass(frozen=True, slots=True)
class Done:
    """End the text: it is whole (`finish`) or can never be (`error`)."""

    finish: FinishReason | None = None
    error: OutriderError | None = None


EdgeInstruction = Send | Emit | Reopen | Done | DraftJob | CatchUpJob

# --- events ---


@dataclass(frozen=True, slots=True)
class Started:
    """The text begins before there is a stream; drafters wait until the first Open has left."""


@dataclass(frozen=True, slots=True)
class StreamReady:
    """A stream to the verifier that `lease` names is open, and waits for an Open.

    Within the terms of `expected`, its newest answer to an earlier Open, drafts may follow this one before it is
    answered; None: it gave none.
    """

    lease: bytes
    expected: Opened | None = None


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The stream broke, or could not be opened."""

    error: OutriderError


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The user wants no more, or has seen a stop string."""

    finish: FinishReason = FinishReason.CANCELLED


@dataclass(frozen=True, slots=True)
class TurnBegun:
    """Another turn begins after the last is done: `prompt` [n] follows the first `start` tokens of the transcript.

    Attributes:
        measurements: those of earlier texts with such sampling, if it is of another kind than the last turn's.
        selection: drafters that take the place of those so far; None: these go on.
    """

    start: int
    prompt: tuple[int, ...]
    sampling: Sampling
    measurements: Measurements | None = None
    selection: Selection | None = None


@dataclass(frozen=True, slots=True)
class Drafted:
    """A drafter has done `job`: `drafts` [n], at most `job.count`, and proposals in place of forced tokens."""

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
    CloudFrame | Started | StreamReady | Disconnected | StopRequested | TurnBegun | Drafted | CaughtUp | DrafterFailed
)
