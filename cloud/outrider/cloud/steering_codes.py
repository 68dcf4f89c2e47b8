"""Which hidden state a commit's steering code is of, and the codes of a whole step at once."""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from outrider.cloud.folded_projection import FoldedProjection
from outrider.cloud.sampling import Sampled, VerificationInput
from outrider.cloud.steering import Projection
from outrider.cloud.target import Target
from outrider.proto.errors import InvalidArgument
from outrider.proto.steering import encode
from outrider.proto.types import CommittedToken, Steering, SteeringPrecision, SteeringRequest

log = logging.getLogger(__name__)


class SteeringCodes:
    """Makes the codes that commits carry: one batch a projection, one copy to the host, nothing where none is wanted.

    Args:
        target: is tapped from now on, if there is a projection.
        projections: by id.
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
        """[n] after a step, each session's code of its newest state that holds; None where none is asked for.

        Args:
            requests: [n] by session.
            inputs: [n] what the step verified, in the order of its logits.
            sampled: [n] what came of it.
        """
        codes: list[Steering | None] = [None] * len(requests)
        asking: defaultdict[str, list[tuple[int, SteeringPrecision]]] = defaultdict(list)
        for i, request in enumerate(requests):
            if request is not None:
                asking[request.projection].append((i, request.precision))
        if not asking:
            return codes
        rows = newest_rows(inputs, sampled)
        for name, sessions in asking.items():
            project = self._projections[name]
            try:
                made = project(self._target.tapped(project.layers, [rows[i] for i, _ in sessions]))
            except RuntimeError as error:  # what torch raises, as for want of memory: no text ends for want of a code
                log.warning("no steering codes in this step: %s", str(error).split("\n")[0])
                continue
            for (i, precision), numbers in zip(sessions, made, strict=True):
                codes[i] = _encoded(numbers, precision)
        return codes


def newest_rows(inputs: Sequence[VerificationInput], sampled: Sequence[Sampled]) -> list[int]:
    """[n] each session's row, among the step's logits, of the newest position that is still right after the step.

    A session's first row is its last committed token, at position p; row j after it is its draft at p + j. Where a
    drafts agree, a + 1 tokens are committed, the last of which has not been processed: the newest that has is p + a.
    """
    firsts = itertools.accumulate((each.rows for each in inputs), initial=0)
    agreed = (_agreed(each.block, result.tokens) for each, result in zip(inputs, sampled, strict=True))
    return [first + hits for first, hits in zip(firsts, agreed, strict=False)]


def _agreed(block: tuple[int, ...], tokens_by_target: tuple[CommittedToken, ...]) -> int:
    """How many of the drafts `block` [k] the target says too, before the first that it does not."""
    return next((j for j, draft in enumerate(block) if draft != tokens_by_target[j].id), len(block))


def _encoded(code: np.ndarray, precision: SteeringPrecision) -> Steering | None:
    """None where a number is not finite, as after an overflow in the target's own."""
    try:
        return encode(code, precision)
    except InvalidArgument as error:
        log.warning("a steering code is not sent: %s", error)
        return None
