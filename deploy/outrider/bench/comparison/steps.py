"""What codes cost a verifier: its steps with and without them, in turn."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from outrider.bench.comparison.texts import Text
from outrider.cloud.kv_cache import SessionCache
from outrider.cloud.sampling import Sampler, VerificationInput
from outrider.cloud.steering_codes import SteeringCodes
from outrider.cloud.target import Rows, Target
from outrider.proto.types import Sampling, SteeringWish

DRAFTS = (0, 4, 8)  # that are judged in a step
PAIRS = 60


@dataclass(frozen=True, slots=True)
class StepCost:
    """One session's step of the target, as it judges some drafts; processor and memory as they are.

    Attributes:
        projection: of the codes.
        rows: that the target computes: the drafts and the token before them.
        plain_ms: median of the steps without a code.
        ratio: median, over pairs of steps one after the other, of the one with a code by the one without.
        low, high: the ratio's quartiles.
    """

    projection: str
    rows: int
    plain_ms: float
    ratio: float
    low: float
    high: float


def step_costs(target: Target, codes: SteeringCodes, projection: str, text: Text) -> list[StepCost]:
    """Of steps after the prompt of `text` with so many `DRAFTS` each, as far as the text has them.

    Args:
        target: that is tapped, as `codes` has left it.
        codes: as a verifier makes them.
        projection: of the code that is wished for.
        text: whose tokens are judged.
    """
    cache = target.pool.allocate(len(text.transcript))
    try:
        target.forward([Rows(cache, text.transcript[: text.prompt_length - 1], 1)])
        measuring = _Measuring(target, codes, SteeringWish(projection), text, cache)
        return [measuring.of(drafts) for drafts in DRAFTS if drafts < text.tokens]
    finally:
        target.pool.release(cache)


@dataclass(frozen=True)
class _Measuring:
    target: Target
    codes: SteeringCodes
    wish: SteeringWish
    text: Text
    cache: SessionCache

    def of(self, drafts: int) -> StepCost:
        sampler = Sampler(self.target.device)
        seconds = np.array([self._pair(drafts, sampler, pair) for pair in range(PAIRS)])[1:]  # the first one warms up
        low, ratio, high = np.quantile(seconds[:, 1] / seconds[:, 0], (0.25, 0.5, 0.75)).tolist()
        return StepCost(self.wish.projection, drafts + 1, 1e3 * float(np.median(seconds[:, 0])), ratio, low, high)

    def _pair(self, drafts: int, sampler: Sampler, pair: int) -> tuple[float, float]:
        """Seconds without a code and with one; which comes first alternates."""
        if pair % 2:
            with_code = self._step(drafts, sampler, self.wish)
            return self._step(drafts, sampler, None), with_code
        return self._step(drafts, sampler, None), self._step(drafts, sampler, self.wish)

    def _step(self, drafts: int, sampler: Sampler, wish: SteeringWish | None) -> float:
        prompt = self.text.prompt_length
        known = list(self.text.transcript[:prompt])
        block = self.text.transcript[prompt : prompt + drafts]
        self.cache.length = prompt - 1
        began = time.perf_counter()
        logits = self.target.forward([Rows(self.cache, (known[-1], *block), drafts + 1)])
        judged = [VerificationInput(Sampling(), known, prompt, block)]
        self.codes.of([wish], judged, sampler.sample(logits, judged))
        return time.perf_counter() - began
