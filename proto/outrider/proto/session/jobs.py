"""Jobs that an edge's machine gives to drafters, and the steering vectors that go with them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from outrider.proto import steering_vector
from outrider.proto.types import DraftToken, Steering, SteeringRequest

if TYPE_CHECKING:
    from outrider.proto.policy.steering_rate import SteeringPolicy

CATCH_UP = 8  # a job that first has to read more tokens than this says nothing about drafting speed


@dataclass(frozen=True, slots=True, eq=False)
class Steer:
    """A vector [rank] float32 for a drafter's positions from `since` on; None: all are computed unsteered."""

    vector: np.ndarray | None
    since: int


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
    """A drafter's proposals in place of known tokens [m], and natural logs of its q of prompt tokens [n]."""

    drafts: tuple[DraftToken, ...] = ()
    log_q: tuple[float, ...] = ()


NOTHING_FORCED = TeacherForced()


# --- steering vectors ---


@dataclass(frozen=True, slots=True)
class DrafterSteering:
    """Steering of a drafter by vectors of `rank` numbers, which `policy` requests."""

    rank: int
    policy: SteeringPolicy


class VectorKeeper:
    """Keeps the newest vector, the request that the verifier has and the vector that the drafter has.

    It begins without a vector; the request names the projection, and the policy sets its rate.
    """

    def __init__(self, request: SteeringRequest, drafter: DrafterSteering) -> None:
        self.policy = drafter.policy
        self._rank = drafter.rank
        self._requested = request
        self._drafter_has: np.ndarray | None = None
        self._vector: np.ndarray | None = None
        self._position = 0  # position of the vector

    def request(self, *, drafting: bool) -> SteeringRequest:
        """Return the request for now: no vectors where nothing is drafted."""
        rate = self.policy.rate
        every = rate.every if drafting else 0
        self._requested = replace(self._requested, precision=rate.precision, every=every)
        return self._requested

    def changed_request(self, *, drafting: bool) -> SteeringRequest | None:
        """Return the request for now; None: the verifier has it."""
        before = self._requested
        return None if self.request(drafting=drafting) == before else self._requested

    def take(self, vector: Steering, position: int) -> None:
        """Take the vector of a position.

        Raises:
            InvalidArgument: it cannot be read; the one before it stays.
        """
        self._vector, self._position = steering_vector.decode(vector, self._rank), position

    def forget(self) -> None:
        """Steer by nothing until a vector comes."""
        self._vector = None

    def age(self, position: int) -> int | None:
        """Return the positions from the vector's own to `position`, which a draft follows; None: none is young."""
        if self._vector is None or position - self._position > self.policy.max_age:
            self._vector = None
            return None
        return position - self._position

    def steer(self, prompt_length: int) -> Steer | None:
        """Return the vector for the drafter's next job; None: the drafter has it."""
        if self._vector is self._drafter_has:
            return None
        self._drafter_has = self._vector
        return Steer(self._vector, since=prompt_length)
