"""The model's word on tokens by its own distribution: before temperature, cuts, penalties, bias and grammar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from outrider.proto.types.checks import require

MAX_TOP_LOGPROBS = 20

TopLogprobs = tuple[tuple[int, float], ...]  # the likeliest tokens of one position with log p, likeliest first


class TokenFacts(NamedTuple):
    """The model's word on a token of prompt or text, given those before it.

    Attributes:
        logprob: natural log of its probability: what OpenAI's API and vLLM call logprob.
        rank: 1 and the number of likelier tokens; 0: a verifier of an older release did not say.
        top: likeliest tokens of the position as (id, natural log of p), likeliest first and the lower id first among
            equals; empty: not requested.
        entropy: entropy of the position's distribution, in nats; None: a verifier of an older release did not say.
    """

    logprob: float
    rank: int
    top: TopLogprobs = ()
    entropy: float | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The model's word on the prompt's tokens from position `start` on; nothing comes before its first token."""

    start: int
    tokens: tuple[TokenFacts, ...]
    epoch: int = 0

    def __post_init__(self) -> None:
        require(self.start >= 1, "prompt_logprobs.start", "must be 1 or more")
        require(bool(self.tokens), "prompt_logprobs.logprobs", "is empty")
