"""A verifier's projections, and the steering vectors that they make of the newest valid hidden states of a step."""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from outrider.cloud.distribution import VerificationInput
from outrider.cloud.sampling import Sampled
from outrider.cloud.steering import PROJECTION_FILE, FoldedProjection, Projection, projection_id
from outrider.cloud.target import Target
from outrider.proto.errors import InvalidArgument, ModelRefused
from outrider.proto.steering import encode
from outrider.proto.types import CommittedToken, DraftToken, Steering, SteeringPrecision, SteeringRequest

_EMBEDDED = Path(__file__).parent / "drafters"

log = logging.getLogger(__name__)


def load_projections(
    paths: Sequence[str], target: Target, *, name: str, model: str, embedded: Path = _EMBEDDED
) -> dict[str, Projection]:
    """Load the projections by id.

    Args:
        paths: files, or folders that hold a `projection.safetensors`, as `outrider train steer` writes them.
        target: the model to tap.
        name: embedded name, folder, or hub name that it was loaded by.
        model: the id that edges ask for.
        embedded: folder of the drafters that Outrider carries.

    Raises:
        NotFound: a file is missing.
        ModelRefused: a file is no projection, or is for a target of another shape.
    """
    found: dict[str, Projection] = {}
    for path in sorted(embedded.glob(f"*/{PROJECTION_FILE}")):
        projection = Projection.load(path)
        if projection.target == name:
            found[_checked(projection, path, target)] = projection
    for path in map(_file, paths):
        projection = Projection.load(path)
        found[_checked(projection, path, target)] = projection
        if projection.target not in ("", name, model):
            log.warning(
                "%s was trained with %r but steers drafters of %r: expect little gain",
                path,
                projection.target,
                model,
            )
    return found


def _file(path: str) -> Path:
    given = Path(path).expanduser()
    return given / PROJECTION_FILE if given.is_dir() else given


def _checked(projection: Projection, path: Path, target: Target) -> str:
    """Return its id, if the target has the layers that it taps."""
    shape = target.model.config.get_text_config()
    if projection.hidden != shape.hidden_size:
        raise ModelRefused(
            f"{path} is for a residual stream of {projection.hidden}, the target's has {shape.hidden_size}; "
            "train one for this target",
            field="steering",
        )
    missing = [layer for layer in projection.layers if not 0 <= layer < shape.num_hidden_layers]
    if missing or not projection.layers:
        raise ModelRefused(
            f"{path} taps layers {', '.join(map(str, projection.layers))}; "
            f"the target has layers 0 to {shape.num_hidden_layers - 1}",
            field="steering",
        )
    identity = projection_id(path)
    log.info("steering: projection %s from %s", identity, path)
    return identity


def fold(projections: Mapping[str, Projection], target: Target) -> dict[str, FoldedProjection]:
    """Fold the projections, by id, and tap the layers of `target` that they read, if there are any."""
    if projections:
        target.tap(sorted({layer for each in projections.values() for layer in each.layers}))
    return {name: FoldedProjection(each, target.device) for name, each in projections.items()}


class SteeringVectors:
    """Makes the vectors that commits carry: one batch and one copy to the host for each requested projection."""

    def __init__(self, target: Target, projections: Mapping[str, Projection]) -> None:
        self._target = target
        self._projections = fold(projections, target)

    def of(
        self,
        requests: Sequence[SteeringRequest | None],
        inputs: Sequence[VerificationInput],
        sampled: Sequence[Sampled],
    ) -> list[Steering | None]:
        """Return each session's vector from its newest valid state after a step; None where none is asked for.

        All lists are [n], with what the step verified in the order of its logits.
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
