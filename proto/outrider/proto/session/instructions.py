"""What the edge's machine tells its shell to do, and the drafters' jobs among it."""

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
        start: position of the first.
        tokens: [n] the tokens.
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
        steer: what to steer it by before it extends; None: as before.
        drafter: index of the drafter.
        skip: tokens of `extend_with` before those that are teacher-forced.
        teacher_forced: tokens after these, all of them committed, in place of which it is to say its own proposals.
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
        skip: tokens that it only reads, the first ones.
        score: tokens after these, all of the prompt, of which it says its log probabilities; the rest, of the text, is
            teacher-forced.
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
    """What a drafter says in place of tokens that are there.

    Attributes:
        drafts: [m] its proposals in place of committed tokens.
        log_q: [n] natural logs of its probabilities of tokens of the prompt.
    """

    drafts: tuple[DraftToken, ...] = ()
    log_q: tuple[float, ...] = ()


NOTHING_FORCED = TeacherForced()

EdgeInstruction = Send | Emit | Reopen | Done | DraftJob | CatchUpJob
