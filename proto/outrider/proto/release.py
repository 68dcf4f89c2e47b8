"""Which release of Outrider this is, for the other side and for people. What decides is the protocol version."""

from __future__ import annotations

import functools
from importlib import metadata

UNKNOWN = "unknown"


@functools.cache
def release() -> str:
    """The installed version, such as `0.1.0`; `unknown` where the package runs without being installed."""
    try:
        return metadata.version("outrider")
    except metadata.PackageNotFoundError:
        return UNKNOWN
