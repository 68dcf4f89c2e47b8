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

    @property
    def up(self) -> WayShape:
        """Direction from the edge."""
        return WayShape(self.rtt_s / 2, self.jitter_s, self.up_bytes_per_s, self.queue_bytes)

    @property
    def down(self) -> WayShape:
        """Direction to the edge."""
        return WayShape(self.rtt_s / 2, self.jitter_s, self.down_bytes_per_s, self.queue_bytes)
