"""A verifier's projections, and the steering vectors that they make of the newest valid hidden states of a step."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from outrider.cloud.target.backend import Backend, TargetFacts
from outrider.cloud.target.projection import PROJECTION_FILE, FoldedProjection, Projection, projection_id
from outrider.proto.errors import InvalidArgument, ModelRefused
from outrider.proto.steering_vector import encode
from outrider.proto.types import Steering, SteeringPrecision, SteeringRequest

_EMBEDDED = Path(__file__).parents[1] / "drafters"

log = logging.getLogger(__name__)


def load_projections(
    paths: Sequence[str], target: TargetFacts, *, name: str, model: str, embedded: Path = _EMBEDDED
) -> dict[str, Projection]:
    """Load the projections by id, of drafters that Outrider carries (in `embedded`) and of `paths`.

    Paths are files, or folders that hold a `projection.safetensors`, as `outrider train steer` writes them. The target
    was loaded by `name`, and edges ask for it as `model`.

    Raises:
        NotFound: a file is missing.
        ModelRefused: a file is no projection, or is for a target of another shape.
    """
    found: dict[str, Projection] = {}
    for path in sorted(embedded.glob(f"*/{PROJECTION_FILE}")):
        projection = Projection.load(path)
        if projection.target == name:
            found[_checked(projection, path, target)] = projection
    for given in (Path(path).expanduser() for path in paths):
        path = given / PROJECTION_FILE if given.is_dir() else given
        projection = Projection.load(path)
        found[_checked(projection, path, target)] = projection
        if projection.target not in ("", name, model):
            log.warning(
                "%s was trained with %r but steers drafters of %r: expect little gain", path, projection.target, model
            )
    return found


def _checked(projection: Projection, path: Path, target: TargetFacts) -> str:
    """Return its id, if the target has the layers that it taps."""
    if projection.hidden != target.hidden_size:
        raise ModelRefused(
            f"{path} is for a residual stream of {projection.hidden}, the target's has {target.hidden_size}; "
            "train one for this target",
            field="steering",
        )
    missing = [layer for layer in projection.layers if not 0 <= layer < target.num_layers]
    if missing or not projection.layers:
        raise ModelRefused(
            f"{path} taps layers {', '.join(map(str, projection.layers))}; "
            f"the target has layers 0 to {target.num_layers - 1}",
            field="steering",
        )
    identity = projection_id(path)
    log.info("steering: projection %s from %s", identity, path)
    return identity


def tapped_layers(projections: Mapping[str, Projection]) -> list[int]:
    """Return the layers that `projections` read, ascending."""
    return sorted({layer for each in projections.values() for layer in each.layers})


def fold(projections: Mapping[str, Projection], device: torch.device | None) -> dict[str, FoldedProjection]:
    """Fold the projections, by id, for taps on `device`."""
    return {name: FoldedProjection(each, device) for name, each in projections.items()}


class SteeringVectors:
    """Makes the vectors that commits carry: one batch and one copy to the host for each requested projection."""

    def __init__(self, backend: Backend, projections: Mapping[str, Projection]) -> None:
        """Tap `backend` for `projections`, by id."""
        self._layers = tapped_layers(projections)
        if projections:
            backend.tap(self._layers)
        self._projections = fold(projections, backend.facts.device)

    def of(self, requests: Sequence[SteeringRequest | None], taps: torch.Tensor | None) -> list[Steering | None]:
        """Return each session's vector; None where none is asked for.

        Args:
            requests: [n] what each session asks for.
            taps: [those that ask, taps * hidden] float32, from their newest valid positions; None: nothing was tapped.
        """
        vectors: list[Steering | None] = [None] * len(requests)
        asking: defaultdict[str, list[tuple[int, int, SteeringPrecision]]] = defaultdict(list)
        tapped = 0
        for i, request in enumerate(requests):
            if request is not None:
                asking[request.projection].append((i, tapped, request.precision))
                tapped += 1
        if taps is None:
            return vectors
        for name, sessions in asking.items():
            project = self._projections[name]
            try:
                made = project(self._entering(project.layers, taps, [row for _, row, _ in sessions]))
            except RuntimeError as error:  # torch raises it for want of memory too, and no text ends for a vector
                log.warning("no steering vectors in this step: %s", str(error).split("\n")[0])
                continue
            for (i, _, precision), numbers in zip(sessions, made, strict=True):
                vectors[i] = _encoded(numbers, precision)
        return vectors

    def _entering(self, layers: Sequence[int], taps: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """Return [rows, layers * hidden] of the taps."""
        of_rows = taps if len(rows) == len(taps) else taps[rows]
        if len(layers) == len(self._layers):
            return of_rows
        indices = [self._layers.index(layer) for layer in layers]
        chosen: torch.Tensor = of_rows.unflatten(1, (len(self._layers), -1))[:, indices]
        return chosen.flatten(1)


def _encoded(vector: np.ndarray, precision: SteeringPrecision) -> Steering | None:
    """Return the vector for the wire; None where a number is not finite, which an overflow in the target causes."""
    try:
        return encode(vector, precision)
    except InvalidArgument as error:
        log.warning("a steering vector is not sent: %s", error)
        return None
