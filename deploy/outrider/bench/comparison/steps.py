"""Cost of steering vectors to a verifier: its steps with and without them, in turn."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from outrider.bench.comparison.record import SteeringCost
from outrider.cloud.distribution import VerificationInput
from outrider.cloud.kv_cache import SessionCache
from outrider.cloud.sampling import Sampler
from outrider.cloud.steering_vectors import SteeringVectors
from outrider.cloud.target import Rows, Target
from outrider.cloud.text_writer import WrittenText
from outrider.proto.types import DraftToken, Sampling, SteeringRequest

DRAFTS = (0, 4, 8)  # verified in a step
PAIRS = 60


def steering_costs(target: Target, vectors: SteeringVectors, projection: str, text: WrittenText) -> list[SteeringCost]:
    """Measure steps after the prompt of `text`, with each number of `DRAFTS` that the text is long enough for.

    Args:
        target: that is tapped, as `vectors` has left it.
        vectors: makes steering vectors as a verifier does.
        projection: of the vectors.
        text: whose tokens are verified.
    """
    cache = target.pool.allocate(len(text.transcript))
    try:
        target.forward([Rows(cache, text.transcript[: text.prompt_length - 1], 1)])
        measuring = _Measuring(target, vectors, SteeringRequest(projection), text, cache)
        return [measuring.of(drafts) for drafts in DRAFTS if drafts < len(text)]
    finally:
        target.pool.release(cache)


@dataclass(frozen=True)
class _Measuring:
    target: Target
    vectors: SteeringVectors
    request: SteeringRequest
    text: WrittenText
    cache: SessionCache

    def of(self, drafts: int) -> SteeringCost:
        sampler = Sampler(self.target.device)
        seconds = np.array([self._pair(drafts, sampler, pair) for pair in range(PAIRS)])[1:]  # the first one warms up
        low, ratio, high = np.quantile(seconds[:, 1] / seconds[:, 0], (0.25, 0.5, 0.75)).tolist()
        return SteeringCost(
            self.request.projection, drafts + 1, 1e3 * float(np.median(seconds[:, 0])), ratio, low, high
        )

    def _pair(self, drafts: int, sampler: Sampler, pair: int) -> tuple[float, float]:
        """Return seconds without a vector and with one; which comes first alternates."""
        if pair % 2:
            with_vector = self._step(drafts, sampler, self.request)
            return self._step(drafts, sampler, None), with_vector
        return self._step(drafts, sampler, None), self._step(drafts, sampler, self.request)

    def _step(self, drafts: int, sampler: Sampler, request: SteeringRequest | None) -> float:
        prompt = self.text.prompt_length
        known = list(self.text.transcript[:prompt])
        block = self.text.transcript[prompt : prompt + drafts]
        self.cache.length = prompt - 1
        began = time.perf_counter()
        logits = self.target.forward([Rows(self.cache, (known[-1], *block), drafts + 1)])
        verified = [VerificationInput(Sampling(), known, prompt, tuple(map(DraftToken, block)))]
        self.vectors.of([request], verified, sampler.sample(logits, verified))
        return time.perf_counter() - began
