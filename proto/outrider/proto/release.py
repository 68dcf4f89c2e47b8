"""Which release of Outrider this is, for people; compatibility is decided by the protocol version alone."""

from __future__ import annotations

import functools
from importlib import metadata

UNKNOWN = "unknown"


@functools.cache
def release() -> str:
    """Return the installed version, such as `0.1.0`; `unknown` if the package is not installed."""
    try:
        return metadata.version("outrider")
    except metadata.PackageNotFoundError:
        return UNKNOWN
