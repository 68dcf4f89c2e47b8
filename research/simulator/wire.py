"""A link of given rates and delays on a virtual clock: when what is sent arrives, and how many bytes it was."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from outrider.deploy.link.shape import LinkShape, WayShape
from outrider.proto import codec
from outrider.proto.errors import ConfigError
from outrider.proto.session import EdgeStatistics
from outrider.proto.streams import GRPC_PREFIX_BYTES
from outrider.proto.types import CloudFrame, EdgeFrame
from research.simulator.clock import Costs, VirtualClock

FRAME_BYTES = GRPC_PREFIX_BYTES + 9  # with HTTP/2's frame header
_LOOKS_PER_S = 100  # at the link, while a message leaves
_LONGEST_OUTAGE_S = 600.0

ShapeAt = Callable[[float], LinkShape]  # the link at a time, such as `LinkTrace.at`


@dataclass(frozen=True, slots=True)
class Framing:
    """Bytes of HTTP/2 on a stream in one direction, beside `FRAME_BYTES` a message.

    Attributes:
        headers: bytes before the first message, on a connection that has carried a stream before.
        window_update: bytes with a message, where something has been received since the last.
        end: bytes after the last message.
    """

    headers: int
    window_update: int
    end: int


# Seen on the wire with the options of `outrider.proto.channel`. The server tops up the connection's window too.
UP = Framing(headers=17, window_update=13, end=13)
DOWN = Framing(headers=12, window_update=26, end=25 + 13)


class Wire:
    """Messages that leave one after the other at the link's rate, and arrive in order after its delay.

    The emulator (`link/pipe.py`) does the same with segments of real bytes. Rate and delay are those of the moment at
    which a message leaves; they are looked at every 10 ms, on the full 10 ms.
    """

    def __init__(self, way_at: Callable[[float], WayShape], framing: Framing, rng: random.Random) -> None:
        self.bytes = 0
        self._way_at = way_at
        self._framing = framing
        self._rng = rng
        self._busy_until = 0.0
        self._arrived_until = 0.0
        self._heard = False

    def hear(self) -> None:
        """Note that something has come the other way: the next message carries a window update."""
        self._heard = True

    def send(self, now: float, message_bytes: int) -> float:
        """Return when a message of so many bytes without framing arrives that is sent now, after all before it.

        Raises `ConfigError` where the link stands still for ten minutes.
        """
        size = message_bytes + FRAME_BYTES + self._framing.window_update * self._heard
        if not self.bytes:
            size += self._framing.headers
        self._heard = False
        self.bytes += size
        self._busy_until, way = self._leave(max(now, self._busy_until), size)
        delay_s = way.delay_s + (self._rng.uniform(0.0, way.jitter_s) if way.jitter_s else 0.0)
        self._arrived_until = max(self._arrived_until, self._busy_until + delay_s)
        return self._arrived_until

    def end(self) -> None:
        self.bytes += self._framing.end

    def _leave(self, begins: float, size: int) -> tuple[float, WayShape]:
        """Return when the last byte leaves, and what the link is like then."""
        at, left, look = begins, float(size), int(begins * _LOOKS_PER_S) + 1
        way = self._way_at(at)
        while left > (room := way.bytes_per_s * max(0.0, look / _LOOKS_PER_S - at)):
            left -= room
            at = look / _LOOKS_PER_S
            look += 1
            if at - begins > _LONGEST_OUTAGE_S:
                raise ConfigError(f"lets nothing through from {begins:.1f} s on", field="link")
            way = self._way_at(at)
        return at + left / way.bytes_per_s if left else at, way


class WireLink:
    """Carries the frames of one stream over two wires, counts their bytes in the edge's statistics, and loses none."""

    def __init__(
        self, clock: VirtualClock, shape_at: ShapeAt, costs: Costs, statistics: EdgeStatistics, rng: random.Random
    ) -> None:
        self.wire_up = Wire(lambda time: shape_at(time).up, UP, rng)
        self.wire_down = Wire(lambda time: shape_at(time).down, DOWN, rng)
        self._clock = clock
        self._costs = costs
        self._statistics = statistics

    def up(self, frame: EdgeFrame, now: float) -> Iterator[tuple[float, EdgeFrame]]:
        size = len(codec.encode_edge_frame(frame))
        self._statistics.uplink_bytes += size + GRPC_PREFIX_BYTES
        arrival = self.wire_up.send(now, size) + self._costs.cloud_event_s
        self._clock.at(arrival, self.wire_down.hear)
        yield arrival, frame

    def down(self, frame: CloudFrame, now: float) -> Iterator[tuple[float, CloudFrame]]:
        size = len(codec.encode_cloud_frame(frame))
        self._statistics.downlink_bytes += size + GRPC_PREFIX_BYTES
        arrival = self.wire_down.send(now, size) + self._costs.edge_event_s
        self._clock.at(arrival, self.wire_up.hear)
        yield arrival, frame

    def end(self) -> None:
        self.wire_up.end()
        self.wire_down.end()
