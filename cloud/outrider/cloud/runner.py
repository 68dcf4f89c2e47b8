"""A batch on its way through the target: forward, sample, steer."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from outrider.cloud.batching import Share
from outrider.cloud.distribution import VerificationInput
from outrider.cloud.sampling import Sampled, Sampler
from outrider.cloud.slots import Slot
from outrider.cloud.steering import Projection
from outrider.cloud.steering_vectors import SteeringVectors
from outrider.cloud.step_timing import StepTimes
from outrider.cloud.target import SessionRows, Target
from outrider.proto.session import Verified
from outrider.proto.types import DraftToken, Steering, token_ids


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a step.

    Attributes:
        verified: result of each session that has read its prompt to the end.
        times: moments of the step.
    """

    verified: Sequence[tuple[Slot, Verified]]
    times: StepTimes


class ModelRunner:
    """The runner of batches on a target."""

    def __init__(self, target: Target, projections: Mapping[str, Projection], *, min_step_s: float = 0.0) -> None:
        """Run batches on `target`.

        Args:
            target: model with the KV cache of all sessions.
            projections: projections that make steering vectors, by id.
            min_step_s: least time of a step, which stands for a larger target; seconds.
        """
        self._target = target
        self._sampler = Sampler(target.device)
        self._vectors = SteeringVectors(target, projections)
        self._min_step_s = min_step_s

    def run(self, shares: Sequence[Share[Slot]]) -> StepResult:
        """Compute every share's rows and verify its drafts.

        Raises:
            FloatingPointError: logits are no numbers, from which there is no text to make.
            Exception: whatever the target raises.
        """
        slots = [share.slot for share in shares if share.block is not None]
        inputs = [_verification_input(share.slot, share.block) for share in shares if share.block is not None]
        rows = [_rows(share) for share in shares]
        began = time.monotonic()
        logits = self._target.forward(rows)
        forwarded = time.monotonic()
        sampled = self._sampler.sample(logits, inputs) if inputs else []
        _check_numbers(logits, sampled)
        vectors = self._vectors.of([slot.session.wanted_vector for slot in slots], inputs, sampled)
        sampled_at = time.monotonic()
        self._wait_until(began + self._min_step_s)
        times = StepTimes(began, forwarded, sampled_at, time.monotonic())
        verified = [
            (slot, _verified(slot, of_slot, result, vector, times))
            for slot, of_slot, result, vector in zip(slots, inputs, sampled, vectors, strict=True)
        ]
        return StepResult(verified, times)

    @staticmethod
    def _wait_until(end: float) -> None:
        left_s = end - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)


def _rows(share: Share[Slot]) -> SessionRows:
    """Return rows of the next uncomputed tokens, then of the drafts, with logits of the last token and each draft."""
    slot, start = share.slot, share.slot.cache.length
    tokens = slot.session.transcript[start : start + share.num_tokens]
    if share.block is None:
        return SessionRows(slot.cache, tuple(tokens), 0)
    return SessionRows(slot.cache, (*tokens, *token_ids(share.block)), len(share.block) + 1)


def _verification_input(slot: Slot, block: tuple[DraftToken, ...]) -> VerificationInput:
    session = slot.session
    allowed = slot.matcher.allowed(token_ids(block)) if slot.matcher is not None else None
    return VerificationInput(
        session.sampling,
        session.transcript,
        session.prompt_length,
        block,
        allowed.tokens if allowed is not None else None,
        session.logprobs,
        session.top_logprobs,
        slot.count_tokens() if session.sampling.penalises else None,
    )


def _check_numbers(logits: torch.Tensor, sampled: Sequence[Sampled]) -> None:
    """Refuse logits that are not numbers; whole rows are looked at only where a log probability is none, either.

    Log probabilities can overflow for extreme penalties alone, which is the session's own affair.
    """
    doubtful = any(token.logp is not None and math.isnan(token.logp) for each in sampled for token in each.tokens)
    if doubtful and not bool((logits < math.inf).all()):  # false for what is no number
        raise FloatingPointError("the target's logits are not numbers")


def _verified(
    slot: Slot, verification: VerificationInput, result: Sampled, vector: Steering | None, times: StepTimes
) -> Verified:
    return Verified(
        verification.block,
        result.tokens,
        max(0.0, times.began - slot.ready_since),
        times.verify_s,
        result.reward,
        vector,
    )
