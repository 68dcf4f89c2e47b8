"""The links that a benchmark goes over, from its options."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace

from outrider.bench.benchmark.record import LinkRecord
from outrider.deploy.link.shape import LinkShape
from outrider.deploy.link.traces import LinkTrace, find_trace
from outrider.proto.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BenchLink:
    """One link: its emulation, and how it is written down. `shape.rtt_s` of a traced one is its mean."""

    shape: LinkShape
    trace: LinkTrace | None
    record: LinkRecord

    @property
    def label(self) -> str:
        """For progress lines."""
        return f"trace {self.trace.name}" if self.trace else f"{self.record.rtt_ms:g} ms"

    def shape_at(self, time_s: float) -> LinkShape:
        """What it is like so long after a text began."""
        if self.trace is None:
            return self.shape
        return replace(self.trace.at(time_s), jitter_s=self.shape.jitter_s)

    @property
    def is_none(self) -> bool:
        """Whether there is nothing to emulate: the edge connects directly."""
        return self.trace is None and self.shape == LinkShape()


def links_of(options: argparse.Namespace) -> list[BenchLink]:
    """Fixed links by --rtt, --up, --down and --jitter, then traced ones.

    Raises:
        ConfigError: lists of different lengths; each may have one entry, which then holds for all round trips.
    """
    rtts = options.rtt
    columns = {name: _spread(getattr(options, name), len(rtts), name) for name in ("up", "down", "jitter")}
    fixed = [_fixed(*values) for values in zip(rtts, columns["up"], columns["down"], columns["jitter"], strict=True)]
    return fixed + [_traced(name, options.jitter[0]) for name in options.trace]


def _spread(values: list[float], count: int, name: str) -> list[float]:
    if len(values) not in (1, count):
        raise ConfigError(f"has {len(values)} entries where --rtt has {count}; give one, or as many", field=name)
    return values * count if len(values) == 1 else values


def _fixed(rtt_ms: float, up_mbit: float, down_mbit: float, jitter_ms: float) -> BenchLink:
    if rtt_ms == 0:  # no link at all: rates would be the emulator's own work
        return BenchLink(LinkShape(), None, LinkRecord(0.0))
    shape = LinkShape.of(rtt_ms=rtt_ms, jitter_ms=jitter_ms, up_mbit=_rate(up_mbit), down_mbit=_rate(down_mbit))
    return BenchLink(shape, None, LinkRecord(rtt_ms, _rate(up_mbit), _rate(down_mbit), jitter_ms))


def _traced(name: str, jitter_ms: float) -> BenchLink:
    trace = find_trace(name)
    mean_ms = sum(point.rtt_ms for point in trace.points) / len(trace.points)
    return BenchLink(
        LinkShape.of(rtt_ms=mean_ms, jitter_ms=jitter_ms),
        trace,
        LinkRecord(round(mean_ms, 1), jitter_ms=jitter_ms, trace=trace.name),
    )


def _rate(mbit: float) -> float | None:
    return None if math.isinf(mbit) or mbit == 0 else mbit
