"""What a generation yields."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.proto.session import EdgeStatistics
from outrider.proto.types import FinishReason, Provenance, TopLogprobs


@dataclass(frozen=True, slots=True)
class Tokens:
    """Committed tokens, for ever part of the text.

    Attributes:
        position: absolute, of tokens[0].
        tokens: [n] ids.
        provenance: [n] whether each was an accepted draft or the target's own.
        logp: [n] natural log of the target's processed probability of each, as it was drawn; empty: not asked.
        pieces: [n] text that each adds for certain; lags behind while a character or a stop string is incomplete.
        logprobs: [n] natural log of the model's own probability of each, before temperature, cuts, penalties, bias,
            allowed tokens and grammar: what OpenAI's API and vLLM call logprobs; empty: not asked.
        top_logprobs: [n] the likeliest tokens of each position as (id, natural log of p), of the same distribution as
            `logprobs`, likeliest first and the lower id first among equals; empty: not asked.
    """

    position: int
    tokens: tuple[int, ...]
    provenance: tuple[Provenance, ...]
    logp: tuple[float, ...]
    pieces: tuple[str, ...]
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()

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
    """A whole text at once; `logprobs` and `top_logprobs` as in `Tokens`."""

    prompt_tokens: int
    tokens: tuple[int, ...]
    provenance: tuple[Provenance, ...]
    text: str
    finish_reason: FinishReason
    statistics: EdgeStatistics
    seconds: float
    first_token_s: float
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()
