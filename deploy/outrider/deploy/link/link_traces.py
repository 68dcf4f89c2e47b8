"""Changes of a link over time.

The built-in traces are SYNTHETIC, not recordings: small random processes whose levels, spreads and events resemble what
is usually published for such links (`experiments-1: outrider.deploy.link.synthetic` made them). A recording of your own
is a CSV file of the same form:

    time_s,rtt_ms,up_mbit,down_mbit
    0.0,42.5,8.1,31.0
    0.1,44.0,7.9,30.2

Lines that begin with # are comments. Rates are in 10^6 bit/s; 0 is an outage, `inf` no limit.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from outrider.deploy.link.shape import LinkShape
from outrider.proto.errors import ConfigError
from outrider.proto.plumbing.files import read_text

HEADER = "time_s,rtt_ms,up_mbit,down_mbit"
_FIELDS = HEADER.split(",")
_FOLDER = Path(__file__).parent / "traces"


@dataclass(frozen=True, slots=True)
class TracePoint:
    """State of the link from `time_s` on, until the next point."""

    time_s: float
    rtt_ms: float
    up_mbit: float
    down_mbit: float

    @property
    def shape(self) -> LinkShape:
        """Shape without jitter, with the default queue."""
        return LinkShape.of(rtt_ms=self.rtt_ms, up_mbit=self.up_mbit, down_mbit=self.down_mbit)


@dataclass(frozen=True, slots=True)
class LinkTrace:
    """A link over time, which repeats.

    Attributes:
        name: name in outputs.
        points: points whose times rise from 0; at least one.
    """

    name: str
    points: tuple[TracePoint, ...]

    @property
    def duration_s(self) -> float:
        """Length of one repetition: the last point lasts as long as the one before; a single point, one second."""
        if len(self.points) == 1:
            return 1.0
        last = self.points[-1].time_s
        return round(2 * last - self.points[-2].time_s, 9)

    def at(self, time_s: float) -> LinkShape:
        """Return the shape of the link `time_s` after the start."""
        return self.points[self._index(time_s % self.duration_s)].shape

    def next_time(self, time_s: float) -> float:
        """Return when the first point after `time_s` begins."""
        rounds, within = divmod(time_s, self.duration_s)
        index = self._index(within) + 1
        upcoming = self.points[index].time_s if index < len(self.points) else self.duration_s
        return rounds * self.duration_s + upcoming

    def _index(self, within: float) -> int:
        return max(0, bisect.bisect_right(self.points, within, key=lambda point: point.time_s) - 1)


def built_in_traces() -> tuple[str, ...]:
    """Return the names that `find_trace` knows."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.csv")))


def find_trace(name: str) -> LinkTrace:
    """Return a built-in trace by its name, or else read a file."""
    if name in built_in_traces():
        return read_trace(_FOLDER / f"{name}.csv")
    if not Path(name).exists():
        raise ConfigError(
            f"there is no file {name}, nor a built-in trace of that name; there are {', '.join(built_in_traces())}",
            field="trace",
        )
    return read_trace(Path(name))


def read_trace(path: Path) -> LinkTrace:
    """Read a CSV file.

    Raises:
        ConfigError: with the line's number and the field at fault.
    """
    lines = _content(read_text(path, "trace"))
    number, header = next(lines, (1, ""))
    if header != HEADER:
        raise ConfigError(f"{path} line {number}: the header must be {HEADER}", field="trace")
    points: list[TracePoint] = []
    for number, line in lines:
        point = _point(line, f"{path} line {number}")
        if point.time_s != 0 if not points else point.time_s <= points[-1].time_s:
            raise ConfigError(f"{path} line {number}: time_s: must rise from 0, line by line", field="trace")
        points.append(point)
    if not points:
        raise ConfigError(f"{path} has no points", field="trace")
    return LinkTrace(path.stem, tuple(points))


def _content(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.startswith("#"):
            yield number, line.strip()


def _point(line: str, where: str) -> TracePoint:
    cells = line.split(",")
    if len(cells) != len(_FIELDS):
        raise ConfigError(f"{where}: has {len(cells)} fields, not {len(_FIELDS)} ({HEADER})", field="trace")
    values = []
    for field, cell in zip(_FIELDS, cells, strict=True):
        try:
            value = float(cell)
        except ValueError:
            raise ConfigError(f"{where}: {field}: {cell.strip()!r} is not a number", field="trace") from None
        # Only a rate may be without limit. The comparison is false for nan too.
        if not 0 <= value <= (math.inf if field.endswith("mbit") else 1e9):
            raise ConfigError(f"{where}: {field}: {cell.strip()} is not possible; it must be 0 or more", field="trace")
        values.append(value)
    return TracePoint(*values)
