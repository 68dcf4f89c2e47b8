"""The versions of drafters, as an edge can tell of them."""

from __future__ import annotations

import logging

from outrider.edge.link.control_client import CoordinatorClient
from outrider.edge.pool.preparation import Ready
from outrider.proto.drafter_format import ON_TRIAL, published_name
from outrider.proto.errors import OutriderError
from outrider.proto.types import VersionStatus

log = logging.getLogger(__name__)


async def versions_of(coordinator: CoordinatorClient | None, ready: Ready | None) -> tuple[VersionStatus, ...]:
    """Return the versions of the coordinator's drafters, or those of this edge where it cannot say, or may not.

    Of its own versions an edge knows no more than which of them were current before.
    """
    if coordinator is not None:
        try:
            return (await coordinator.status()).versions
        except OutriderError as error:
            log.debug("the coordinator does not say the versions of its drafters: %s", error)
    pool = ready.drafters if ready is not None else None
    if pool is None:
        return ()
    return tuple(
        VersionStatus(published_name(name), version, "former" if ON_TRIAL in name else "current")
        for name, version in zip(pool.names, pool.versions, strict=True)
    )
