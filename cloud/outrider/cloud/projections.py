"""The projections of a verifier: those in its settings, and those of embedded drafters made for its target."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from outrider.cloud.steering import PROJECTION_FILE, Projection, projection_id
from outrider.cloud.target import Target
from outrider.proto.errors import ModelRefused

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
