"""A decoding stream between an edge and one process of a verifier, whose ends learn of trouble each in its own time."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from outrider.proto import codec
from outrider.proto.errors import OutriderError, Unavailable
from outrider.proto.types import Branches, CloudFrame, Commit, Draft, EdgeFrame, Opened
from research.chaos.world import KEEPALIVE_S, OneWay, Path, World


class CallingEnd(Protocol):
    """The edge's end of a call."""

    def received(self, call: SimulatedCall, frame: CloudFrame) -> None:
        """Take a frame."""

    def broken(self, call: SimulatedCall, error: OutriderError) -> None:
        """Note that the call has ended."""


class ServingEnd(Protocol):
    """The verifier's end of a call."""

    def received(self, frame: EdgeFrame) -> None:
        """Take a frame."""

    def cancelled(self) -> None:
        """Note that the edge has left, or that its connection is gone."""

    def end_lease(self) -> None:
        """Let the lease run out now."""

    @property
    def has_ended(self) -> bool:
        """Whether the text has ended at the verifier."""


class Server(Protocol):
    """A listener at an address, which accepts calls."""

    def accept(self, call: SimulatedCall) -> ServingEnd | None:
        """Begin to serve a call; None: nobody listens there."""


class SimulatedCall:
    """One call: frames arrive in order; an end that leaves is known to the other when the path lets it know.

    Attributes:
        edge_open: whether the edge's end is open.
        served: the verifier's end; None: it is not or no longer there.
        silent: whether the connection drops everything without a word (half-open).
        copies: frames in each direction that will still come twice.
        strays: whether frames still come to an edge that has left.
    """

    def __init__(self, world: World, path: Path, caller: CallingEnd, server: Server, *, encoded: bool) -> None:
        """Call the server; `encoded` lets every frame pass through the codec."""
        self.edge_open = True
        self.served: ServingEnd | None = None
        self.silent = False
        self.copies = 0
        self.strays = False
        self._world = world
        self._caller = caller
        self._up, self._down = OneWay(world, path), OneWay(world, path)
        self._encoded = encoded
        self._up.send(partial(self._connect, server))

    @property
    def num_under_way(self) -> int:
        """Frames on their way in both directions."""
        return len(self._up) + len(self._down)

    # --- the edge's end ---

    def send_up(self, frame: EdgeFrame) -> None:
        """Send a frame to the verifier."""
        data = codec.encode_edge_frame(frame) if self._encoded else b""
        self._up.send(partial(self._serve, codec.decode_edge_frame(data) if self._encoded else frame))
        if self.copies and isinstance(frame, Draft | Branches):
            self.copies -= 1
            again = partial(self._up.send, partial(self._serve, frame))
            self._world.after(self._world.rng.uniform(0, 0.1), again)

    def leave(self) -> None:
        """Close the edge's end; what is on its way to it is lost."""
        if self.edge_open:
            self.edge_open = False
            self._up.send(self._cancel)

    def break_edge(self, error: OutriderError) -> None:
        """Let the edge's end find that the connection is gone."""
        if self.edge_open:
            self.leave()
            self._caller.broken(self, error)

    # --- the verifier's end ---

    def send_down(self, frame: CloudFrame) -> None:
        """Send a frame to the edge."""
        data = codec.encode_cloud_frame(frame) if self._encoded else b""
        self._down.send(partial(self._deliver, codec.decode_cloud_frame(data) if self._encoded else frame))
        if self.copies and isinstance(frame, Commit | Opened):
            self.copies -= 1
            again = partial(self._down.send, partial(self._deliver, frame))
            self._world.after(self._world.rng.uniform(0, 0.1), again)

    def end(self, error: OutriderError | None) -> None:
        """Close the verifier's end with a status, after the frames before; None: all is well."""
        self.served = None
        error = error or Unavailable("the verifier ended the stream before the text")
        self._down.send(partial(self._end_edge, error))

    def break_served(self) -> None:
        """Let the verifier's end find that the connection is gone."""
        served, self.served = self.served, None
        if served is not None:
            served.cancelled()

    # --- trouble ---

    def fall_silent(self) -> None:
        """Let the connection drop everything from now on; each end gives up after its keepalive."""
        self.silent = True
        rng = self._world.rng
        self._world.after(rng.uniform(*KEEPALIVE_S), partial(self.break_edge, Unavailable("the stream broke: silent")))
        self._world.after(rng.uniform(*KEEPALIVE_S), self.break_served)

    def reset(self) -> None:
        """Break the connection; both ends learn of it, each in its own time."""
        self._up.send(self.break_served)
        self._down.send(partial(self.break_edge, Unavailable("the stream broke: reset")))

    def lose_server(self) -> None:
        """Let the edge learn that the process at the other end is gone."""
        self._down.send(partial(self.break_edge, Unavailable("the stream broke: connection reset")))

    def lose_edge(self) -> None:
        """Break the edge's end at once, while the other goes on until its keepalive and what it sends comes astray."""
        self.edge_open, silence_s = False, self._world.rng.uniform(*KEEPALIVE_S)
        self.strays = True
        self._world.after(silence_s, self.break_served)
        self._caller.broken(self, Unavailable("the stream broke: no route"))

    # --- arrivals ---

    def _connect(self, server: Server) -> None:
        if self.silent:
            return
        self.served = server.accept(self)
        if self.served is None:
            self._down.send(partial(self._end_edge, Unavailable("the stream broke: nobody listens")))

    def _serve(self, frame: EdgeFrame) -> None:
        if not self.silent and self.served is not None:
            self.served.received(frame)

    def _cancel(self) -> None:
        if not self.silent:
            self.break_served()

    def _deliver(self, frame: CloudFrame) -> None:
        if not self.silent and (self.edge_open or self.strays):
            self._caller.received(self, frame)

    def _end_edge(self, error: OutriderError) -> None:
        if not self.silent and self.edge_open:
            self.edge_open = False
            self._caller.broken(self, error)
