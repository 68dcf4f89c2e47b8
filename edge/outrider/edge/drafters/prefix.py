"""A prefix of tokens in a plain list, for drafters without a cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.edge.drafters.proposals import ProposalRule
from outrider.edge.drafters.protocol import DraftState, check_truncation, propose_forced_one_by_one
from outrider.proto.types import DraftToken


class TokenPrefix:
    """The tokens before the next proposal, with the verbs of `DraftState` that need no model."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    @property
    def length(self) -> int:
        """Tokens in the prefix."""
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append known tokens."""
        self.tokens.extend(int(token) for token in tokens)

    def propose_forced(self: DraftState, tokens: Sequence[int]) -> tuple[DraftToken, ...]:
        """Append `tokens` [m] and return the proposals in place of each."""
        return propose_forced_one_by_one(self, tokens)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        check_truncation(length, len(self.tokens))
        del self.tokens[length:]

    def follow(self, rule: ProposalRule) -> None:
        """Do nothing, for proposals that follow no rule."""

    def steer(self, vector: np.ndarray | None, since: int) -> None:
        """Do nothing where there is no model."""

    def close(self) -> None:
        """Give the memory back."""
        self.tokens = []
