"""The target that a command serves, on this machine before anything else starts."""

from __future__ import annotations

import logging
from dataclasses import replace

from outrider.cloud.models.family_index import find_target
from outrider.cloud.verifier_config import AUTO, VerifierConfig
from outrider.proto.errors import OutriderError

FIRST, FALLBACK = "smollm2", "reference"

log = logging.getLogger(__name__)


def with_target(config: VerifierConfig) -> VerifierConfig:
    """Return the settings with a target that is on this machine, fetched or converted if need be.

    For `auto` that is `FIRST`, or `FALLBACK` where the first cannot be had, which the log then explains.

    Raises:
        OutriderError: the target that the settings name cannot be had; see `find_target`.
    """
    if config.target != AUTO:
        find_target(config.target)
        return config
    try:
        find_target(FIRST)
    except OutriderError as error:
        log.warning("going on with the embedded target %s: %s", FALLBACK, error.message)
        return replace(config, target=FALLBACK)
    return replace(config, target=FIRST)
