"""The facts of a session that the distribution of its rows depends on, without the library that computes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.proto.token_counts import TokenCounts
from outrider.proto.types import DraftToken, Sampling, token_ids


@dataclass(frozen=True, slots=True)
class VerificationInput:
    """The facts that the distribution of one session's rows depends on.

    Attributes:
        sampling: sampling settings of the session.
        transcript: prompt and text before the step; where nothing is penalised, only their number matters.
        prompt_length: tokens of the prompt in it.
        block: [k] drafts to verify; row j of k + 1 follows transcript + block[:j].
        allowed: [k + 1, vocab] bool, the tokens that the grammar allows in each row; None: there is none.
        logprobs: whether the model's own log probabilities are wanted.
        top_logprobs: number of likeliest tokens wanted for each position.
        counts: those of the transcript, where the session has kept them; None: they are counted where needed.
        eos_tokens: ids that end a text of the target; needed with `Sampling.min_tokens` alone.
    """

    sampling: Sampling
    transcript: Sequence[int]
    prompt_length: int
    block: tuple[DraftToken, ...]
    allowed: np.ndarray | None = field(default=None, compare=False)
    logprobs: bool = False
    top_logprobs: int = 0
    counts: TokenCounts | None = field(default=None, compare=False)
    eos_tokens: frozenset[int] | None = None

    def __post_init__(self) -> None:
        if self.sampling.min_tokens and self.eos_tokens is None:
            raise ValueError("min_tokens need the target's eos_tokens")
        if self.allowed is not None and len(self.allowed) != self.rows:
            raise ValueError(f"allowed has {len(self.allowed)} rows, the block {self.rows}")

    @property
    def rows(self) -> int:
        """Number of its rows of logits."""
        return len(self.block) + 1

    @property
    def adjusts(self) -> bool:
        """Whether `adjusted_logits` differ from the target's."""
        sampling = self.sampling
        edits = sampling.allowed_tokens or sampling.logit_bias or sampling.penalises
        return bool(self.allowed is not None or edits or self.rows_before_end)

    @property
    def rows_before_end(self) -> int:
        """Number of its first rows at which the text, with the drafts before each, is shorter than `min_tokens`."""
        if not self.sampling.min_tokens:
            return 0
        return max(0, min(self.rows, self.prompt_length + self.sampling.min_tokens - len(self.transcript)))

    def row(self, j: int) -> VerificationInput:
        """Return row `j` alone, with the drafts before it as transcript."""
        before = [*self.transcript, *token_ids(self.block[:j])]
        allowed = self.allowed[j : j + 1] if self.allowed is not None else None
        return VerificationInput(self.sampling, before, self.prompt_length, (), allowed, eos_tokens=self.eos_tokens)
