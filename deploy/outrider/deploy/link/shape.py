"""Delay, jitter, rates and queues of a link."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from outrider.proto.errors import ConfigError

MTU_BYTES = 1448  # payload of one TCP segment on Ethernet, with timestamps
BYTES_PER_MBIT = 1e6 / 8


@dataclass(frozen=True, slots=True)
class WayShape:
    """One direction of a link.

    Attributes:
        delay_s: propagation delay after a byte has left the queue, in seconds.
        jitter_s: longest delay added to it, drawn for each segment from 0..jitter_s uniformly; the order is kept.
        bytes_per_s: rate of TCP payload; `inf`: no limit; 0: nothing moves.
        queue_bytes: capacity of the queue; beyond it the sender is held back, and nothing is dropped.
    """

    delay_s: float
    jitter_s: float
    bytes_per_s: float
    queue_bytes: int


@dataclass(frozen=True, slots=True)
class LinkShape:
    """Both directions of a link. The default has no delay and no limit.

    Attributes:
        rtt_s: round-trip time of a small message without queueing, in seconds, half of it each way.
        jitter_s: longest delay added each way, uniform in 0..jitter_s; the mean round trip is rtt_s + jitter_s.
        up_bytes_per_s: rate of TCP payload from the edge; `inf`: no limit; 0: outage.
        down_bytes_per_s: rate of TCP payload to the edge.
        queue_bytes: capacity of the queue of each direction.

    Raises:
        ConfigError: a value is not possible; the field is named.
    """

    rtt_s: float = 0.0
    jitter_s: float = 0.0
    up_bytes_per_s: float = math.inf
    down_bytes_per_s: float = math.inf
    queue_bytes: int = 256 << 10

    def __post_init__(self) -> None:
        for name in ("rtt_s", "jitter_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError("must be a finite number of seconds, 0 or more", field=name)
        for name in ("up_bytes_per_s", "down_bytes_per_s"):
            if not getattr(self, name) >= 0:  # nor nan
                raise ConfigError("must be 0 (an outage) or more; inf is no limit", field=name)
        if self.queue_bytes < 2 * MTU_BYTES:
            raise ConfigError(f"must be {2 * MTU_BYTES} or more, two segments", field="queue_bytes")

    @classmethod
    def of(
        cls,
        *,
        rtt_ms: float = 0.0,
        jitter_ms: float = 0.0,
        up_mbit: float | None = None,
        down_mbit: float | None = None,
        queue_kib: float = 256.0,
    ) -> Self:
        """Return the shape from ms, Mbit/s (10^6 bit/s; None: no limit) and KiB."""
        return cls(
            rtt_s=rtt_ms / 1e3,
            jitter_s=jitter_ms / 1e3,
            up_bytes_per_s=math.inf if up_mbit is None else up_mbit * BYTES_PER_MBIT,
            down_bytes_per_s=math.inf if down_mbit is None else down_mbit * BYTES_PER_MBIT,
            queue_bytes=int(queue_kib * 1024),
        )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `MS` or `MS,UP,DOWN`, with rates in Mbit/s; raise `ValueError` for anything else."""
        form = f"{text!r} is neither MS nor MS,UP,DOWN, such as 20 or 20,10,50"
        try:
            rtt_ms, *rates = map(float, text.split(","))
        except ValueError:
            raise ValueError(form) from None
        if len(rates) not in (0, 2) or not (0 <= rtt_ms < math.inf and all(0 < rate < math.inf for rate in rates)):
            raise ValueError(form)
        return cls.of(rtt_ms=rtt_ms, **dict(zip(("up_mbit", "down_mbit"), rates, strict=False)))

    def __bool__(self) -> bool:
        """Return whether there is a link at all."""
        return self != LinkShape()

    def __str__(self) -> str:
        return ",".join(f"{number:g}" for number in self._numbers)

    @property
    def words(self) -> str:
        """Name in outputs, such as `link 20 ms, 10/50 Mbit/s`."""
        rtt_ms, *rates = self._numbers
        shown = ", {:g}/{:g} Mbit/s".format(*rates) if rates else ""
        return f"link {rtt_ms:g} ms{shown}" if self else "no link between"

    @property
    def _numbers(self) -> tuple[float, ...]:
        """Round trip in ms, and rates in Mbit/s where there are limits."""
        rates = (self.up_bytes_per_s, self.down_bytes_per_s)
        return 1e3 * self.rtt_s, *(rate / BYTES_PER_MBIT for rate in rates if rate < math.inf)

    @property
    def up(self) -> WayShape:
        """Direction from the edge."""
        return WayShape(self.rtt_s / 2, self.jitter_s, self.up_bytes_per_s, self.queue_bytes)

    @property
    def down(self) -> WayShape:
        """Direction to the edge."""
        return WayShape(self.rtt_s / 2, self.jitter_s, self.down_bytes_per_s, self.queue_bytes)
