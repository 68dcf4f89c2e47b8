"""Memory that this process holds, where the system says so."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_STATM = Path("/proc/self/statm")


def own_bytes() -> int | None:
    """Return bytes in memory of this process alone, without libraries; None: the system does not say."""
    try:
        _, resident, shared, *_ = (int(pages) for pages in _STATM.read_text(encoding="ascii").split())
    except OSError:
        return None
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def give_back() -> None:
    """Hand freed memory back to the system, where the C library keeps it (glibc); elsewhere do nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
