"""A batch on its way through the target: forward, sample, steer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from outrider.cloud.serving.batching import Share
from outrider.cloud.serving.steps import StepResult, verification_of
from outrider.cloud.target.backend import Backend, StepRow, VerificationBranch
from outrider.cloud.target.projection import Projection
from outrider.cloud.target.steering_vectors import SteeringVectors
from outrider.proto.session.verifier import Verified, tokens_before_scores, unscored_tokens
from outrider.proto.types import PromptLogprobs


class ModelRunner:
    """The runner of batches on a target.

    Attributes:
        min_step_s: minimum time of a step, which stands for a larger target, in seconds.
    """

    def __init__(
        self,
        backend: Backend,
        projections: Mapping[str, Projection],
        *,
        min_step_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Run batches on `backend`; `projections`, by id, make steering vectors of what is tapped there from now on."""
        self._backend = backend
        self._vectors = SteeringVectors(backend, projections)
        self.min_step_s = min_step_s
        self._clock = clock

    def run(self, shares: Sequence[Share]) -> StepResult:
        """Compute every share's rows and verify its drafts, along a branch where the target's tokens follow one.

        Raises:
            FloatingPointError: logits are no numbers, from which there is no text to make.
            Exception: whatever the target raises.
        """
        rows = [self._row(share) for share in shares]
        scoring = [
            (share.slot, share.slot.handle.length + 1) for share, row in zip(shares, rows, strict=True) if row.scored
        ]
        began = self._clock()
        output = self._backend.step(rows)
        done = [
            (share, row.path(output.followed.get(number)), sampled)
            for number, (share, row, sampled) in enumerate(zip(shares, rows, output.sampled, strict=True))
            if sampled is not None
        ]
        vectors = self._vectors.of([share.slot.session.wanted_vector for share, _, _ in done], output.taps)
        sampled_at = self._clock()
        if (left_s := began + self.min_step_s - sampled_at) > 0:
            time.sleep(left_s)
        ended = self._clock()
        verified = [
            (
                share.slot,
                Verified(
                    path[: len(sampled.tokens) - 1],
                    sampled.tokens,
                    max(0.0, began - share.slot.ready_since),
                    ended - began,
                    sampled.reward,
                    vector,
                    max(0, share.num_drafts - len(path)),
                ),
            )
            for (share, path, sampled), vector in zip(done, vectors, strict=True)
        ]
        scored = [
            (slot, PromptLogprobs(start, scores, slot.session.epoch))
            for (slot, start), scores in zip(scoring, output.scores, strict=True)
        ]
        return StepResult(verified, began, output.forwarded, sampled_at, ended, output.logits, scored)

    def _row(self, share: Share) -> StepRow:
        """Return a row of the next uncomputed tokens, and of the drafts where these are the last."""
        slot, start = share.slot, share.slot.handle.length
        session = slot.session
        tokens = tuple(session.transcript[start : start + share.num_tokens])
        uncomputed = slot.num_uncomputed_tokens
        before = tokens_before_scores(session, uncomputed)
        unscored = 0 if before else min(share.num_tokens, unscored_tokens(session, uncomputed))
        scored = tuple(session.transcript[start + 1 : start + 1 + unscored])
        top = session.prompt_logprobs or 0
        block = share.block
        if block is None:
            return StepRow(slot.handle, tokens, None, scored=scored, top_logprobs=top)
        verification, masks = verification_of(share, block)
        tapped = session.wanted_vector is not None
        beside = [VerificationBranch.of(verification, *each) for each in zip(share.branches, masks, strict=True)]
        return StepRow(slot.handle, tokens, verification, tapped, scored, top, tuple(beside))
