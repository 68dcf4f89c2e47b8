"""Loss of packets, as options name it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from outrider.proto.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PacketLoss:
    """Loss of packets in each direction.

    Attributes:
        share: share of the packets, or with bursts of the time, that is lost, from 0 to below 1.
        burst_s: mean length of a burst, in which every packet is lost, in seconds; 0: each packet has its own chance.

    Bursts follow a Gilbert-Elliott chain in time rather than in packets: a retransmission that comes after the burst
    gets through, however few packets there were.
    """

    share: float = 0.0
    burst_s: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.share < 1 and 0 <= self.burst_s < math.inf):
            raise ConfigError("must be from 0 to below 100 percent, its bursts 0 ms or longer", field="loss")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the loss that `PERCENT` or `PERCENT:MS` names."""
        percent, colon, burst_ms = text.partition(":")
        try:
            return cls(float(percent) / 100, float(burst_ms) / 1e3 if colon else 0.0)
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{text!r} is neither PERCENT nor PERCENT:MS, such as 2:100", field="loss") from error

    def __str__(self) -> str:
        return f"{100 * self.share:g}" + (f":{1e3 * self.burst_s:g}" if self.burst_s else "")
