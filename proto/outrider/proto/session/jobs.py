"""Jobs that an edge's machine gives to drafters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from outrider.proto.session.session_steering import Steer
from outrider.proto.types import DraftToken

CATCH_UP = 8  # a job that first has to read more tokens than this says nothing about drafting speed


@dataclass(frozen=True, slots=True)
class DraftJob:
    """Let a drafter truncate its prefix, extend it and propose up to `count` tokens; a `Drafted` answers.

    Attributes:
        truncate_to: tokens of its prefix that it keeps.
        extend_with: [n] tokens after them: committed ones, then drafts of its own.
        count: most tokens to propose; 0: it only reads, and shows what it would propose itself.
        epoch: number of the chain among those of the session.
        steer: vector to set before it extends; None: unchanged.
        skip: tokens of `extend_with` before those that are teacher-forced.
        teacher_forced: tokens after these, in place of which it returns its own proposals: committed ones, and drafts
            of the chain where an idle drafter reads it.
        branch: draft of the chain, by its position, in whose place the job follows another token; -1: it follows all.
    """

    truncate_to: int
    extend_with: tuple[int, ...]
    count: int
    epoch: int
    steer: Steer | None = None
    drafter: int = 0
    skip: int = 0
    teacher_forced: int = 0
    branch: int = -1

    @property
    def start(self) -> int:
        """Position of the first proposed token."""
        return self.truncate_to + len(self.extend_with)


class CatchUpJob(NamedTuple):
    """Let an idle drafter truncate its prefix and extend it with `tokens`; a `CaughtUp` answers.

    Attributes:
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
