"""Events that a generation yields."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.proto.session import EdgeStatistics
from outrider.proto.types import CommittedToken, FinishReason, Provenance, token_ids


@dataclass(frozen=True, slots=True)
class Tokens:
    """Committed tokens, for ever part of the text.

    Attributes:
        position: absolute, of tokens[0].
        tokens: [n] each with its id and the log probabilities that were asked for.
        provenance: [n] whether each was an accepted draft or the target's own.
        pieces: [n] text that each adds for certain; lags behind while a character or a stop string is incomplete.
    """

    position: int
    tokens: tuple[CommittedToken, ...]
    provenance: tuple[Provenance, ...]
    pieces: tuple[str, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids of the tokens, [n]."""
        return token_ids(self.tokens)

    @property
    def text(self) -> str:
        """All pieces."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Finished:
    """The text is whole. `text` here is only what was still held back; `seconds` runs from `generate` to now."""

    reason: FinishReason
    text: str
    statistics: EdgeStatistics
    seconds: float
    first_token_s: float


Event = Tokens | Finished


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole text at once; `tokens` [n] and `provenance` [n] as in `Tokens`."""

    prompt_tokens: int
    tokens: tuple[CommittedToken, ...]
    provenance: tuple[Provenance, ...]
    text: str
    finish_reason: FinishReason
    statistics: EdgeStatistics
    seconds: float
    first_token_s: float

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids of the tokens, [n]."""
        return token_ids(self.tokens)
