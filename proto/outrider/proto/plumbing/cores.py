"""The cores that a process may use."""

from __future__ import annotations

import os
from pathlib import Path

_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def available_cores(cpu_max: Path = _CPU_MAX) -> int:
    """Return how many cores this process may use, at least 1: those it may run on, or its container's share if less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = cpu_max.read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no container, or "max"
        return cores


def computing_cores(processes: int = 1) -> int:
    """Return how many threads each of `processes` should compute with: one core is for drafts, streams and the rest."""
    return max(1, (available_cores() - 1) // processes)


def limit_spinning() -> None:
    """Let GNU OpenMP's idle threads spin from one product to the next and no longer, where torch is not imported yet.

    Threads that sleep at once double the time of a step, since each product wakes them; by default they spin ten times
    as long as here, on cores that others need. What the environment says of either stays.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "30000")
