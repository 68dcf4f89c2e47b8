"""The steering vectors of a whole step, each made from the newest valid hidden state of its session."""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from outrider.cloud.sampling import Sampled, VerificationInput
from outrider.cloud.steering import FoldedProjection, Projection
from outrider.cloud.target import Target
from outrider.proto.errors import InvalidArgument
from outrider.proto.steering import encode
from outrider.proto.types import CommittedToken, DraftToken, Steering, SteeringPrecision, SteeringRequest

log = logging.getLogger(__name__)


class SteeringVectors:
    """Makes the vectors that commits carry: one batch and one copy to the host for each projection that is asked for.

    Args:
        target: the model to tap, if there is a projection.
        projections: the projections by id.
    """

    def __init__(self, target: Target, projections: Mapping[str, Projection]) -> None:
        self._target = target
        self._projections = {name: FoldedProjection(each, target.device) for name, each in projections.items()}
        if projections:
            target.tap(sorted({layer for each in projections.values() for layer in each.layers}))

    def of(
        self,
        requests: Sequence[SteeringRequest | None],
        inputs: Sequence[VerificationInput],
        sampled: Sequence[Sampled],
    ) -> list[Steering | None]:
        """Return [n] each session's vector from its newest valid state after a step; None where none is asked for.

        Args:
            requests: [n] what each session asks for.
            inputs: [n] what the step verified, in the order of its logits.
            sampled: [n] the step's results.
        """
        vectors: list[Steering | None] = [None] * len(requests)
        asking: defaultdict[str, list[tuple[int, SteeringPrecision]]] = defaultdict(list)
        for i, request in enumerate(requests):
            if request is not None:
                asking[request.projection].append((i, request.precision))
        if not asking:
            return vectors
        rows = newest_rows(inputs, sampled)
        for name, sessions in asking.items():
            project = self._projections[name]
            try:
                made = project(self._target.tapped(project.layers, [rows[i] for i, _ in sessions]))
            except RuntimeError as error:  # torch raises it for want of memory too, and no text ends for a vector
                log.warning("no steering vectors in this step: %s", str(error).split("\n")[0])
                continue
            for (i, precision), numbers in zip(sessions, made, strict=True):
                vectors[i] = _encoded(numbers, precision)
        return vectors


def newest_rows(inputs: Sequence[VerificationInput], sampled: Sequence[Sampled]) -> list[int]:
    """Return [n] each session's row, among the step's logits, of the newest position that is valid after the step.

    A session's first row is its last committed token, at position p; row j after it is its draft at p + j. Where a
    drafts agree, a + 1 tokens are committed, the last of which has not been processed: the newest that has is p + a.
    """
    firsts = itertools.accumulate((each.rows for each in inputs), initial=0)
    agreed = (_agreed(each.block, result.tokens) for each, result in zip(inputs, sampled, strict=True))
    return [first + hits for first, hits in zip(firsts, agreed, strict=False)]


def _agreed(block: tuple[DraftToken, ...], tokens_by_target: tuple[CommittedToken, ...]) -> int:
    """Return how many drafts of `block` [k] the target accepts."""
    return next((j for j, draft in enumerate(block) if draft.id != tokens_by_target[j].id), len(block))


def _encoded(vector: np.ndarray, precision: SteeringPrecision) -> Steering | None:
    """Return the vector for the wire; None where a number is not finite, which an overflow in the target causes."""
    try:
        return encode(vector, precision)
    except InvalidArgument as error:
        log.warning("a steering vector is not sent: %s", error)
        return None
