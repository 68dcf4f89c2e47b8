"""The built-in traces.

They are SYNTHETIC, not recordings: each is a small random process whose level, spread and events resemble what is
usually published for such a link (rounded; no single source). `python -m outrider.deploy.link.synthetic` writes them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from outrider.deploy.link.link_traces import LinkTrace, TracePoint, write_trace
from outrider.proto.errors import ConfigError

STEP_S = 0.1
COMMENT = "SYNTHETIC: made by outrider.deploy.link.synthetic, shaped after typical published values; not a recording."

_Values = Iterator[tuple[float, float, float]]  # rtt_ms, up_mbit, down_mbit, every STEP_S


def make_trace(name: str, seed: int = 0) -> LinkTrace:
    """Return a trace, the same on every machine for the same seed; the built-in traces have seed 0."""
    if name not in MAKERS:
        raise ConfigError(f"there is no maker of {name!r}; there are {', '.join(MAKERS)}", field="trace")
    rng = random.Random(f"{name} {seed}")
    points = (
        TracePoint(round(i * STEP_S, 1), round(rtt_ms, 2), round(up_mbit, 3), round(down_mbit, 3))
        for i, (rtt_ms, up_mbit, down_mbit) in enumerate(MAKERS[name](rng))
    )
    return LinkTrace(name, tuple(points))


def _fibre(rng: random.Random) -> _Values:
    """30 s. Steady: 8 ms, 40 up and 100 down, a spike of some ms now and then."""
    wander = _wander(rng, keep=0.9, spread=0.3)
    for _ in range(300):
        spike = rng.uniform(2, 8) if rng.random() < 0.01 else 0.0
        yield 8 + abs(next(wander)) + spike, rng.uniform(38, 40), rng.uniform(95, 100)


def _wifi(rng: random.Random) -> _Values:
    """30 s. Home network on cable: 12 ms, contention with spikes to 100 ms, rates that halve and double."""
    level = _wander(rng, keep=0.95, spread=0.25)
    spike = 0.0
    for _ in range(300):
        if rng.random() < 0.03:
            spike = rng.uniform(20, 90)
        rate = math.exp(next(level))
        yield 12 + rng.uniform(0, 4) + spike, _within(15 * rate, 2, 30), _within(45 * rate, 5, 90)
        spike *= 0.5


def _handover(rng: random.Random) -> _Values:
    """40 s. 5G, 20 ms; about every 8 s a handover: 0.2 s of nothing, then 90 ms and a tenth of the rate, recovering."""
    level = _wander(rng, keep=0.95, spread=0.12)
    since = 20
    for _ in range(400):
        if since > 60 and rng.random() < 0.05:
            since = 0
        rate = math.exp(next(level))
        hurt = 0.9 * math.exp(-max(since - 2, 0) / 6)
        outage = 0.0 if since < 2 else 1.0
        part = rate * (1 - hurt) * outage
        yield 20 + rng.uniform(0, 5) + 75 * hurt, _within(30 * part, 0, 60), _within(80 * part, 0, 100)
        since += 1


def _lte(rng: random.Random) -> _Values:
    """60 s. LTE in a moving vehicle: 50 to 150 ms, rates over two decades, fades, and outages of up to 0.5 s."""
    level = _wander(rng, keep=0.97, spread=0.3)
    delay = _wander(rng, keep=0.9, spread=8.0)
    outage = 0
    for _ in range(600):
        if outage == 0 and rng.random() < 0.006:
            outage = rng.randint(2, 5)
        rate = math.exp(next(level)) if outage == 0 else 0.0
        rtt_ms = 50 + abs(next(delay)) + (25 / rate if 0 < rate < 1 else 0)
        up_mbit = _within(6 * rate, 0.2, 20) if rate else 0.0
        yield _within(rtt_ms, 45, 150), up_mbit, _within(20 * rate, 0.5, 60) if rate else 0.0
        outage = max(outage - 1, 0)


def _satellite(rng: random.Random) -> _Values:
    """60 s. Low orbit: 30 to 60 ms; every 15 s another satellite, with 0.2 s of nothing and another delay."""
    level = _wander(rng, keep=0.9, spread=0.15)
    base = 40.0
    for i in range(600):
        since = (i + 75) % 150
        if since == 0:
            base = rng.uniform(30, 50)
        rate = math.exp(next(level)) if since > 1 else 0.0
        yield base + rng.uniform(0, 10), _within(10 * rate, 0, 20), _within(80 * rate, 0, 100)


def _step(_: random.Random) -> _Values:
    """40 s. Alternating 10 ms and 200 ms, 5 s each, 50 Mbit/s both ways."""
    for i in range(400):
        yield 200.0 if i // 50 % 2 else 10.0, 50.0, 50.0


def _uplink_cut(_: random.Random) -> _Values:
    """40 s. 30 ms; the uplink alternates between 20 and 0.2 Mbit/s, 10 s each, the downlink 50."""
    for i in range(400):
        yield 30.0, 0.2 if i // 100 % 2 else 20.0, 50.0


MAKERS: dict[str, Callable[[random.Random], _Values]] = {
    "fibre": _fibre,
    "wifi": _wifi,
    "5g-handover": _handover,
    "lte-motion": _lte,
    "satellite": _satellite,
    "step": _step,
    "uplink-cut": _uplink_cut,
}


def _wander(rng: random.Random, keep: float, spread: float) -> Iterator[float]:
    """Yield an autoregressive process of order one around 0."""
    value = 0.0
    while True:
        value = keep * value + rng.gauss(0.0, spread)
        yield value


def _within(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def write_built_in(folder: Path) -> None:
    """Write the traces that are shipped."""
    for name in MAKERS:
        write_trace(make_trace(name), folder / f"{name}.csv", COMMENT)


if __name__ == "__main__":
    write_built_in(Path(__file__).parent / "traces")
