"""The steering codes of one session as its edge keeps them: asked for, come, and what the drafter is steered by."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from outrider.proto import steering
from outrider.proto.policy import SteeringPolicy
from outrider.proto.types import Steering, SteeringRequest


@dataclass(frozen=True, slots=True, eq=False)
class Steer:
    """Compute positions from `since` on with `code` [rank] float32, None: with none; those before it with none."""

    code: np.ndarray | None
    since: int


@dataclass(frozen=True, slots=True)
class Codes:
    """What a drafter can be steered by.

    Attributes:
        rank: numbers in a code.
        policy: which to ask for.
    """

    rank: int
    policy: SteeringPolicy


class CodeKeeper:
    """Keeps the newest code, and what verifier and drafter were told last."""

    def __init__(self, request: SteeringRequest, codes: Codes) -> None:
        """`request` names the projection; the policy says the rest."""
        self.policy = codes.policy
        self._rank = codes.rank
        self._told_verifier = request
        self._told_drafter: np.ndarray | None = None
        self._code: np.ndarray | None = None
        self._position = 0  # of the code

    def ask(self, drafting: bool) -> SteeringRequest:
        """What to tell the verifier now; nothing is of use where there is no drafting."""
        rate = self.policy.rate
        every = rate.every if drafting else 0
        self._told_verifier = replace(self._told_verifier, precision=rate.precision, every=every)
        return self._told_verifier

    def ask_anew(self, drafting: bool) -> SteeringRequest | None:
        """The same; None where the verifier was told so before."""
        before = self._told_verifier
        return None if self.ask(drafting) == before else self._told_verifier

    def take(self, code: Steering, position: int) -> None:
        """A code of that position has come.

        Raises:
            InvalidArgument: it cannot be read; the one before it stays.
        """
        self._code, self._position = steering.decode(code, self._rank), position

    def forget(self) -> None:
        """Steer by nothing until a code comes."""
        self._code = None

    def age(self, position: int) -> int | None:
        """Positions from the code's to `position`, which the next draft follows; None: there is none young enough."""
        if self._code is None or position - self._position > self.policy.oldest:
            self._code = None
            return None
        return position - self._position

    def steer(self, since: int) -> Steer | None:
        """What the drafter is to be told before its next job; None: nothing new. `since`: the prompt's length."""
        if self._code is self._told_drafter:
            return None
        self._told_drafter = self._code
        return Steer(self._code, since)
