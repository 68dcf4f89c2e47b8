"""The steering vectors of one session on its edge: requested, received, and set in the drafter."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from outrider.proto import steering_vector
from outrider.proto.policy import SteeringPolicy
from outrider.proto.types import Steering, SteeringRequest


@dataclass(frozen=True, slots=True, eq=False)
class Steer:
    """A vector for a drafter's positions.

    Attributes:
        vector: [rank] float32, for positions from `since` on; None: they are computed unsteered.
        since: first steered position; those before it are computed unsteered.
    """

    vector: np.ndarray | None
    since: int


@dataclass(frozen=True, slots=True)
class DrafterSteering:
    """Steering of a drafter by vectors of `rank` numbers, which `policy` requests."""

    rank: int
    policy: SteeringPolicy


class VectorKeeper:
    """Keeps the newest vector, the request that the verifier has and the vector that the drafter has."""

    def __init__(self, request: SteeringRequest, drafter: DrafterSteering) -> None:
        """Begin without a vector; `request` names the projection, and the policy sets its rate."""
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
        """Return the positions from the vector's own to `position`, which the next draft follows.

        None means that no vector is young enough, and the drafter computes unsteered.
        """
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
