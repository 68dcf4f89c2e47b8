"""A step of the engine as those see it who run none: its times, its results, and who runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from outrider.cloud.serving.batching import Share
from outrider.cloud.serving.slots import Slot
from outrider.cloud.target.verification import VerificationInput
from outrider.proto.session.verifier import Verified
from outrider.proto.types import DraftToken, PromptLogprobs, token_ids

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class StepTiming:
    """The time of one step by stage, seconds.

    Attributes:
        sessions: number that took part.
        rows: rows of the forward pass.
        forward_s: the model's pass.
        sample_s: from logits to tokens and steering vectors.
        overhead_s: all else since the step before it, but for waiting: events, planning, commits, other threads.
    """

    sessions: int
    rows: int
    forward_s: float
    sample_s: float
    overhead_s: float


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a step.

    Attributes:
        verified: result of each session that has read its prompt to the end.
        began, forwarded, sampled, ended: moments of the step on the engine's clock, in seconds.
        logits: [rows, vocab] raw ones of the verified rows, in the same order, until the next step; None: not at hand.
        scored: log probabilities of prompts that sessions wanted, which come before their first commits.
    """

    verified: Sequence[tuple[Slot, Verified]]
    began: float
    forwarded: float
    sampled: float
    ended: float
    logits: torch.Tensor | None = None
    scored: Sequence[tuple[Slot, PromptLogprobs]] = ()

    @property
    def verify_s(self) -> float:
        """Time of the step in seconds, with the wait where steps have a minimum."""
        return self.ended - self.began


class Runner(Protocol):
    """Whatever runs a batch on the target."""

    def run(self, shares: Sequence[Share]) -> StepResult:
        """Compute every share's rows and verify its drafts; raise whatever the target raises."""
        ...


def verification_of(
    share: Share, block: tuple[DraftToken, ...]
) -> tuple[VerificationInput, Sequence[np.ndarray | None]]:
    """Return what the rows of a share's block depend on, and the masks of its branches, if a grammar has any."""
    slot, session = share.slot, share.slot.session
    mask: np.ndarray | None = None
    masks: Sequence[np.ndarray | None] = [None] * len(share.branches)
    if slot.matcher is not None:
        allowed = slot.matcher.allowed(token_ids(block), share.tokens_beside)
        if allowed is None:
            raise RuntimeError("the grammar has not answered for this step")
        mask, masks = allowed.tokens, [allowed.branches[beside] for beside in share.tokens_beside]
    verification = VerificationInput(
        session.sampling,
        session.transcript,
        session.prompt_length,
        block,
        mask,
        session.logprobs,
        session.top_logprobs,
        slot.count_tokens() if session.sampling.has_penalties else None,
        session.eos_tokens,
    )
    return verification, masks
