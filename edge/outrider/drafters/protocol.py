"""Interfaces of a drafter, which is all that sessions know of it, and what drafters share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from outrider.drafters.proposals import NO_PROPOSAL, ProposalRule
from outrider.proto.drafter_format import SteeringShape
from outrider.proto.errors import InvalidArgument
from outrider.proto.types import DraftToken


class DraftState(Protocol):
    """One session's prefix in one drafter. Used by one thread at a time; different states may run in parallel."""

    @property
    def length(self) -> int:
        """Tokens in the prefix (prompt, text and the state's own proposals): the position of the next token."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Append known tokens; cheap, since the next `propose` or `score` computes them."""

    def propose(self, n: int) -> tuple[DraftToken, ...]:
        """Append up to n tokens to the prefix and return them; fewer, or none, where the drafter has no more."""

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        """Append `tokens` [m] and return log q of each given all before it: [m] float32, plain log-softmax, no noise.

        Needs a prefix of at least one token. Where a drafter can know nothing the distribution is uniform.
        """

    def propose_forced(self, tokens: Sequence[int]) -> tuple[DraftToken, ...]:
        """Append `tokens` [m] and return teacher-forced proposals in place of each, given all before it: [m].

        Equals `propose(1)`, `truncate` and `extend` for each of them, but is faster. The id is -1 where nothing
        would have been proposed. Needs a prefix of at least one token.
        """

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, 0 <= length <= self.length, without a trace of the others."""

    def follow(self, rule: ProposalRule) -> None:
        """Propose by `rule` from now on; the prefix stays. A conversation's turns differ in sampling and prompt."""

    def steer(self, vector: np.ndarray | None, since: int) -> None:
        """Compute positions from `since` on with steering `vector` [rank] float32 or none; those before it with none.

        What is computed already stays as it is. Cheap like `extend`. Called for the states of a steered drafter only.
        """

    def close(self) -> None:
        """Give the memory back; the state is not used afterwards."""


class Drafter(Protocol):
    """A drafter, loaded once a process and shared by its sessions; name and version are those in its manifest."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def steering(self) -> SteeringShape | None:
        """Shape of the vectors that steer its states; None: it cannot be steered."""

    def open(self, rule: ProposalRule) -> DraftState:
        """Begin an empty prefix whose proposals follow `rule`."""


def steering_of(drafter: Drafter) -> SteeringShape | None:
    """Return the shape of a drafter's steering vectors; None for one that does not know of them."""
    return getattr(drafter, "steering", None)


def check_truncation(length: int, current: int) -> None:
    """Refuse a truncation that would grow the prefix or go below 0."""
    if not 0 <= length <= current:
        raise InvalidArgument(f"cannot truncate a prefix of {current} tokens to {length}", field="length")


def check_scorable(length: int) -> None:
    """Refuse to score the first token, which no causal model predicts."""
    if length == 0:
        raise InvalidArgument("nothing can be scored after an empty prefix; extend it with the prompt", field="tokens")


class TokenPrefix:
    """Prefix in a plain list, with the methods of `DraftState` that need no model."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    @property
    def length(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        self.tokens.extend(int(token) for token in tokens)

    def propose_forced(self: DraftState, tokens: Sequence[int]) -> tuple[DraftToken, ...]:
        """Carry `DraftState.propose_forced` out by its definition."""
        check_scorable(self.length)
        choices: list[DraftToken] = []
        for token in tokens:
            length = self.length
            choices += self.propose(1) or (NO_PROPOSAL,)
            self.truncate(length)
            self.extend((token,))
        return tuple(choices)

    def truncate(self, length: int) -> None:
        check_truncation(length, len(self.tokens))
        del self.tokens[length:]

    def follow(self, rule: ProposalRule) -> None:
        """Do nothing, for proposals that follow no rule."""

    def steer(self, vector: np.ndarray | None, since: int) -> None:
        """Do nothing where there is no model."""

    def close(self) -> None:
        self.tokens = []
