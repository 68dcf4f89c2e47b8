"""Links of a measurement: their options, emulation and record."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic.dataclasses import dataclass as record_dataclass

from outrider.bench.bench_settings import LinkListSettings
from outrider.bench.record import RECORD, Metric
from outrider.deploy.link.link_traces import LinkTrace, find_trace
from outrider.deploy.link.shape import LinkShape
from outrider.proto.errors import ConfigError


@record_dataclass(frozen=True, slots=True, config=RECORD)
class LinkRecord:
    """The emulated link between edge and verifier.

    Attributes:
        rtt_ms: round-trip time without queueing.
        up_mbit, down_mbit: bandwidth from and to the edge, Mbit/s; None: unlimited.
        jitter_ms: longest random delay added each way.
        trace: name of the recorded link that was played; None: none.
    """

    rtt_ms: Metric
    up_mbit: Metric | None = None
    down_mbit: Metric | None = None
    jitter_ms: Metric = 0.0
    trace: str | None = None


@dataclass(frozen=True, slots=True)
class BenchLink:
    """One link: its emulation and its record.

    Attributes:
        shape: shape of the link; `rtt_s` of a traced one is the mean.
        trace: changes of the link over time.
        record: record of the link.
    """

    shape: LinkShape
    trace: LinkTrace | None
    record: LinkRecord

    @property
    def label(self) -> str:
        return f"trace {self.trace.name}" if self.trace else f"{self.record.rtt_ms:g} ms"

    def shape_at(self, time_s: float) -> LinkShape:
        if self.trace is None:
            return self.shape
        return replace(self.trace.at(time_s), jitter_s=self.shape.jitter_s)

    @property
    def is_none(self) -> bool:
        """Whether there is nothing to emulate: the edge connects directly."""
        return self.trace is None and self.shape == LinkShape()


def links_of(settings: LinkListSettings) -> list[BenchLink]:
    """Return fixed links by --rtt, --up, --down and --jitter, then traced ones; raises `ConfigError`."""
    columns = (_spread(getattr(settings, name), len(settings.rtt), name) for name in ("up", "down", "jitter"))
    fixed = [_fixed(*values) for values in zip(settings.rtt, *columns, strict=True)]
    return fixed + [_traced(name, settings.jitter[0]) for name in settings.trace]


def link_name(link: LinkRecord) -> str:
    """Return a name such as `30 ms` or `30±5 ms 10/50 Mbit/s lte`, up before down."""
    return " ".join(link_parts(link))


def link_parts(link: LinkRecord) -> list[str]:
    """Return the parts of the link's name: round trip, bandwidth, trace; a table breaks its line between them alone."""
    jitter = f"±{link.jitter_ms:g}" if link.jitter_ms else ""
    unlimited = link.up_mbit is None and link.down_mbit is None
    up, down = ("-" if rate is None else f"{rate:g}" for rate in (link.up_mbit, link.down_mbit))
    parts = (f"{link.rtt_ms:g}{jitter} ms", "" if unlimited else f"{up}/{down} Mbit/s", link.trace)
    return [part for part in parts if part]


def _spread(values: Sequence[float], count: int, name: str) -> list[float]:
    if len(values) not in (1, count):
        raise ConfigError(f"has {len(values)} entries where --rtt has {count}; give one, or one for each", field=name)
    return [*values] * (count if len(values) == 1 else 1)


def _fixed(rtt_ms: float, up_mbit: float, down_mbit: float, jitter_ms: float) -> BenchLink:
    if rtt_ms == 0:  # no link at all: rates would be the emulator's own work
        return BenchLink(LinkShape(), None, LinkRecord(0.0))
    shape = LinkShape.of(rtt_ms=rtt_ms, jitter_ms=jitter_ms, up_mbit=_rate(up_mbit), down_mbit=_rate(down_mbit))
    return BenchLink(shape, None, LinkRecord(rtt_ms, _rate(up_mbit), _rate(down_mbit), jitter_ms))


def _traced(name: str, jitter_ms: float) -> BenchLink:
    trace = find_trace(name)
    mean_ms = sum(point.rtt_ms for point in trace.points) / len(trace.points)
    record = LinkRecord(round(mean_ms, 1), jitter_ms=jitter_ms, trace=trace.name)
    return BenchLink(LinkShape.of(rtt_ms=mean_ms, jitter_ms=jitter_ms), trace, record)


def _rate(mbit: float) -> float | None:
    return None if math.isinf(mbit) or mbit == 0 else mbit
