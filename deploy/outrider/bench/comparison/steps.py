"""Cost of steering vectors to a verifier: its steps with and without them, in turn."""

from __future__ import annotations

import time

import numpy as np

from outrider.bench.comparison.record import SteeringCost
from outrider.cloud.backend import Backend, StepRow
from outrider.cloud.distribution import VerificationInput
from outrider.cloud.steering_vectors import SteeringVectors
from outrider.cloud.text_writer import WrittenText
from outrider.proto.types import DraftToken, Sampling, SteeringRequest

DRAFTS = (0, 4, 8)  # verified in a step
PAIRS = 60


def steering_costs(
    backend: Backend, vectors: SteeringVectors, projection: str, text: WrittenText
) -> list[SteeringCost]:
    """Measure steps after the prompt of `text`, with each number of `DRAFTS` that the text is long enough for.

    Args:
        backend: target, tapped by `vectors`.
        vectors: maker of steering vectors, the one of verifiers.
        projection: projection of the vectors.
        text: text whose tokens are verified.
    """
    prompt, request = text.prompt_length, SteeringRequest(projection)
    known = list(text.transcript[:prompt])
    handle = backend.open()

    def step_s(drafts: int, request: SteeringRequest | None) -> float:
        block = text.transcript[prompt : prompt + drafts]
        backend.truncate(handle, prompt - 1)
        began = time.perf_counter()
        verification = VerificationInput(Sampling(), known, prompt, tuple(map(DraftToken, block)))
        output = backend.step([StepRow(handle, (known[-1],), verification, tapped=request is not None)])
        vectors.of([request], output.taps)
        return time.perf_counter() - began

    def pair_s(drafts: int, *, vector_first: bool) -> tuple[float, float]:
        """Return seconds without a vector and with one."""
        if vector_first:
            with_vector = step_s(drafts, request)
            return step_s(drafts, None), with_vector
        return step_s(drafts, None), step_s(drafts, request)

    def cost(drafts: int) -> SteeringCost:
        pairs = [pair_s(drafts, vector_first=pair % 2 == 1) for pair in range(PAIRS)]
        plain, steered = np.array(pairs[1:]).T  # the first one warms up
        low, ratio, high = np.quantile(steered / plain, (0.25, 0.5, 0.75)).tolist()
        return SteeringCost(projection, drafts + 1, 1e3 * float(np.median(plain)), ratio, low, high)

    try:
        backend.reserve(handle, len(text.transcript))
        backend.step([StepRow(handle, text.transcript[: prompt - 1], None)])
        return [cost(drafts) for drafts in DRAFTS if drafts < len(text)]
    finally:
        backend.release(handle)
