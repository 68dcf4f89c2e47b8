"""Instructions of the edge's machine to its shell, the drafters' jobs included."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.proto.errors import OutriderError
from outrider.proto.session.steering import Steer
from outrider.proto.types import CommittedToken, DraftToken, EdgeFrame, FinishReason


@dataclass(frozen=True, slots=True)
class Send:
    """Put `frame` on the stream."""

    frame: EdgeFrame


@dataclass(frozen=True, slots=True)
class Emit:
    """Hand committed tokens to the user.

    Attributes:
        start: position of the first token.
        tokens: [n] committed tokens.
        drafted: [n] whether each was an accepted draft.
    """

    start: int
    tokens: tuple[CommittedToken, ...]
    drafted: tuple[bool, ...]


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


@dataclass(frozen=True, slots=True)
class DraftJob:
    """Let a drafter truncate its prefix, extend it and propose up to `count` tokens; a `Drafted` answers.

    Attributes:
        truncate_to: tokens of its prefix that it keeps.
        extend_with: [n] tokens after them: committed ones, then drafts of its own.
        count: most tokens to propose.
        epoch: number of the chain among those of the session.
        steer: vector to set before it extends; None: unchanged.
        drafter: index of the drafter.
        skip: tokens of `extend_with` before those that are teacher-forced.
        teacher_forced: committed tokens after these, in place of which it returns its own proposals.
    """

    truncate_to: int
    extend_with: tuple[int, ...]
    count: int
    epoch: int
    steer: Steer | None = None
    drafter: int = 0
    skip: int = 0
    teacher_forced: int = 0

    @property
    def start(self) -> int:
        """Position of the first proposed token."""
        return self.truncate_to + len(self.extend_with)


@dataclass(frozen=True, slots=True)
class CatchUpJob:
    """Let an idle drafter truncate its prefix and extend it with `tokens`; a `CaughtUp` answers.

    Attributes:
        drafter: index of the drafter.
        truncate_to: tokens of its prefix that it keeps.
        tokens: [n] committed tokens after them.
        skip: first tokens, which it only reads.
        score: prompt tokens after these, whose log probabilities it returns; the rest, of the text, is teacher-forced.
    """

    drafter: int
    truncate_to: int
    tokens: tuple[int, ...]
    skip: int
    score: int = 0

    @property
    def start(self) -> int:
        """Position of the first teacher-forced token."""
        return self.truncate_to + self.skip + self.score


@dataclass(frozen=True, slots=True)
class TeacherForced:
    """A drafter's results at tokens that are already known.

    Attributes:
        drafts: [m] proposals in place of committed tokens.
        log_q: [n] natural logs of its probabilities of prompt tokens.
    """

    drafts: tuple[DraftToken, ...] = ()
    log_q: tuple[float, ...] = ()


NOTHING_FORCED = TeacherForced()

EdgeInstruction = Send | Emit | Reopen | Done | DraftJob | CatchUpJob
