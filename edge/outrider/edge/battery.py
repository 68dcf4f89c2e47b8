"""Share of this machine's battery that is left: branches take energy, too."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

POWER_SUPPLY = Path("/sys/class/power_supply")  # of Linux: Documentation/ABI/testing/sysfs-class-power
_FRESH_S = 60.0


@dataclass(slots=True)
class Battery:
    """Charge of the battery, read once a minute at most.

    Attributes:
        fixed: share that is left by configuration; None: read from this machine.
        folder: power supplies of this machine, one folder each.
        clock: monotonic time in seconds.
    """

    fixed: float | None = None
    folder: Path = POWER_SUPPLY
    clock: Callable[[], float] = time.monotonic
    _seen: tuple[float, float] | None = field(default=None, init=False)

    @property
    def share(self) -> float:
        """Share that is left, 0 to 1; 1 on mains, without a battery, and where it is not known."""
        if self.fixed is not None:
            return self.fixed
        now = self.clock()
        if self._seen is None or now - self._seen[0] >= _FRESH_S:
            self._seen = now, _share_left(self.folder)
        return self._seen[1]


def _share_left(folder: Path) -> float:
    """Return the mean share of the batteries that this machine runs on."""
    try:
        supplies = sorted(folder.iterdir())
    except OSError:
        return 1.0
    shares = [share for supply in supplies if (share := _share_of(supply)) is not None]
    return sum(shares) / len(shares) if shares else 1.0


def _share_of(supply: Path) -> float | None:
    """Return the share; None: no battery, one of a mouse or the like, or one that is not being run down."""
    if _read(supply / "type") != "Battery" or _read(supply / "scope") == "Device":
        return None
    capacity = _read(supply / "capacity")
    if _read(supply / "status") != "Discharging" or not capacity.isdecimal():
        return None
    return min(1.0, int(capacity) / 100)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
