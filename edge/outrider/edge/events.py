"""What a generation yields."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.proto.session import EdgeStatistics
from outrider.proto.types import FinishReason, Provenance


@dataclass(frozen=True, slots=True)
class Tokens:
    """Committed tokens, for ever part of the text.

    Attributes:
        position: absolute, of tokens[0].
        tokens: [n] ids.
        provenance: [n] whether each was an accepted draft or the target's own.
        logp: [n] natural log of the target's processed probability of each.
        pieces: [n] text that each adds for certain; lags behind while a character or a stop string is incomplete.
    """

    position: int
    tokens: tuple[int, ...]
    provenance: tuple[Provenance, ...]
    logp: tuple[float, ...]
    pieces: tuple[str, ...]

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
    """A whole text at once."""

    prompt_tokens: int
    tokens: tuple[int, ...]
    provenance: tuple[Provenance, ...]
    text: str
    finish_reason: FinishReason
    statistics: EdgeStatistics
    seconds: float
    first_token_s: float
