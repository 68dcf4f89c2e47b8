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


def stop_spinning() -> None:
    """Let OpenMP's idle threads sleep, in a process that has not imported torch; spinning takes others' cores."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
