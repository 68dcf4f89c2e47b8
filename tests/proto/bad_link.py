"""A bad link on a virtual clock: it delays, duplicates and reorders frames, and its streams break."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from outrider.proto import codec
from outrider.proto.errors import Unavailable
from outrider.proto.session import EdgeSession
from outrider.proto.types import Branches, CloudFrame, Commit, Draft, EdgeFrame, Goaway, Opened
from research.simulator.clock import VirtualClock
from research.simulator.simulated_verifier import SimulatedStream, SimulatedVerifier
from research.simulator.simulation import Drafters, Simulation


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Faults of a link; times in seconds, chances from 0 to 1.

    Attributes:
        jitter_s: largest delay beside that of every frame.
        duplicated: chance that `Commit`, `Opened`, `Draft` or `Branches` comes twice.
        reordered: chance that drafts or branches come after frames that were sent later.
        breaks_every_s: mean time between breaks; 0: none.
        goaway_every_s: mean time between verifiers that drain; 0: none does.
    """

    delay_s: float = 0.02
    jitter_s: float = 0.0
    duplicated: float = 0.0
    reordered: float = 0.0
    breaks_every_s: float = 0.0
    goaway_every_s: float = 0.0


class FaultyLink:
    """Carries the frames of one stream, each of them through the codec."""

    def __init__(self, faults: Faults, rng: random.Random, now: float) -> None:
        self._faults = faults
        self._rng = rng
        self._up_until = self._down_until = now

    def up(self, frame: EdgeFrame, now: float) -> Iterator[tuple[float, EdgeFrame]]:
        data = codec.encode_edge_frame(frame)
        arrival = self._up_until = max(self._up_until, now + self._delay_s())
        if isinstance(frame, Draft | Branches) and self._rng.random() < self._faults.reordered:
            arrival += self._rng.uniform(0, 3 * self._faults.delay_s)
        yield arrival, codec.decode_edge_frame(data)
        if isinstance(frame, Draft | Branches) and self._rng.random() < self._faults.duplicated:
            yield arrival + self._delay_s(), codec.decode_edge_frame(data)

    def down(self, frame: CloudFrame, now: float) -> Iterator[tuple[float, CloudFrame]]:
        data = codec.encode_cloud_frame(frame)
        arrival = self._down_until = max(self._down_until, now + self._delay_s())
        yield arrival, codec.decode_cloud_frame(data)
        if isinstance(frame, Commit | Opened) and self._rng.random() < self._faults.duplicated:
            yield arrival + self._delay_s(), codec.decode_cloud_frame(data)

    def _delay_s(self) -> float:
        return self._faults.delay_s + self._rng.uniform(0, self._faults.jitter_s)


class FaultySimulation(Simulation):
    """A text on a bad link, whose streams break and whose verifiers drain."""

    def __init__(
        self,
        clock: VirtualClock,
        edge: EdgeSession,
        verifier: SimulatedVerifier,
        drafters: Drafters,
        faults: Faults,
        rng: random.Random,
    ) -> None:
        super().__init__(clock, edge, verifier, drafters, partial(FaultyLink, faults, rng))
        self._faults = faults
        self._rng = rng

    def open_stream(self) -> SimulatedStream:
        stream, now = super().open_stream(), self.clock.now
        if self._faults.breaks_every_s:
            lasts_s = self._rng.expovariate(1 / self._faults.breaks_every_s)
            self.clock.at(now + lasts_s, lambda: self.lose_stream(stream, Unavailable("the link broke")))
        if self._faults.goaway_every_s:
            lasts_s = self._rng.expovariate(1 / self._faults.goaway_every_s)
            goaway = Goaway("drains", epoch=self.edge.next_epoch - 1)
            self.clock.at(now + lasts_s, lambda: stream.send_down(goaway))
        return stream
