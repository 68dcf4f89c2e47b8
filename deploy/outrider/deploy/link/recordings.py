"""Recordings of links by others, and the traces made of them.

Two forms are read. In *mahimahi*'s, each line is the millisecond at which a packet of 1,500 bytes could leave; a
millisecond may stand several times, and the recording repeats after its last one. In *NYU-METS*'s, each line is the
rate of one second, as iPerf prints it: `13.9,Mbits/sec`. Neither has a round trip.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

from outrider.deploy.arguments import read_text
from outrider.deploy.link.traces import LinkTrace, TracePoint
from outrider.proto.errors import ConfigError

PACKET_BYTES = 1500
_UNITS = {"bits/sec": 1e-6, "kbits/sec": 1e-3, "mbits/sec": 1.0, "gbits/sec": 1e3}  # Mbit/s


def trace_of(down: Path, up: Path | None, *, rtt_ms: float, step_ms: int) -> LinkTrace:
    """Return a trace of recorded rates; where one recording is shorter, it repeats.

    Args:
        down: recording of the link to the edge.
        up: recording of the link from the edge; None: it has the rates of `down`.
        rtt_ms: round trip at all times.
        step_ms: length of a point; rates are means over it.

    Raises:
        ConfigError: with the line's number where a recording is wrong.
    """
    down_mbit = _rates(down, "down", step_ms)
    up_mbit = down_mbit if up is None else _rates(up, "up", step_ms)
    points = itertools.islice(
        zip(itertools.cycle(up_mbit), itertools.cycle(down_mbit), strict=False), max(len(up_mbit), len(down_mbit))
    )
    return LinkTrace(down.stem, tuple(TracePoint(i * step_ms / 1e3, rtt_ms, *rates) for i, rates in enumerate(points)))


def _rates(path: Path, field: str, step_ms: int) -> list[float]:
    """Return the mean rate of each step, in Mbit/s."""
    lines = [(number, line.strip()) for number, line in enumerate(read_text(path, field).splitlines(), start=1)]
    lines = [(number, line) for number, line in lines if line]
    if not lines:
        raise ConfigError(f"{path} has no lines", field=field)
    if "," in lines[0][1]:
        seconds = list(_seconds(path, lines, field))
        return [seconds[i * step_ms // 1000] for i in range(len(seconds) * 1000 // step_ms)]
    return _opportunities(path, lines, field, step_ms)


def _opportunities(path: Path, lines: list[tuple[int, str]], field: str, step_ms: int) -> list[float]:
    counts = list[int]()
    last = 0
    for number, line in lines:
        if not line.isdecimal() or int(line) < last:
            raise ConfigError(
                f"{path} line {number}: {line!r} is no millisecond, or is earlier than the one before", field=field
            )
        last = int(line)
        step = max(last - 1, 0) // step_ms  # the first step ends with its last millisecond
        counts += [0] * (step + 1 - len(counts))
        counts[step] += 1
    if last == 0:
        raise ConfigError(f"{path} ends at 0 ms", field=field)
    lengths_ms = [step_ms] * (len(counts) - 1) + [last - (len(counts) - 1) * step_ms]
    return [count * PACKET_BYTES * 8 / 1e3 / length for count, length in zip(counts, lengths_ms, strict=True)]


def _seconds(path: Path, lines: list[tuple[int, str]], field: str) -> Iterator[float]:
    for number, line in lines:
        rate, _, unit = line.partition(",")
        try:
            mbit = float(rate) * _UNITS[unit.strip().lower()]
        except (ValueError, KeyError):
            mbit = -1.0
        if not 0 <= mbit < math.inf:
            raise ConfigError(f"{path} line {number}: {line!r} is not RATE,UNIT such as 13.9,Mbits/sec", field=field)
        yield mbit
