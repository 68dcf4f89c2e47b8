"""A link of packets: real TCP connections, carried by the kernel's own TCP between two network namespaces.

    edge — relay | namespace — TUN — this process — TUN — namespace | relay — verifier

The relays at both ends only hand over bytes, on this machine. Between the namespaces every packet is delayed, queued,
lost or overtaken here, and the kernel's TCP does with that what it does on a real link: it retransmits, backs off, and
blocks the head of its line.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import time
from dataclasses import replace

from outrider.deploy.link.connection import Timer
from outrider.deploy.link.namespace import MTU, Namespace, gain_rights
from outrider.deploy.link.packets import PacketPipe
from outrider.deploy.link.radio import Radio
from outrider.deploy.link.relay import Counters, LinkRelay, TracePlayer
from outrider.deploy.link.shape import LinkShape, PacketFaults, WayShape
from outrider.deploy.link.traces import LinkTrace

_EDGE, _VERIFIER = "10.9.0.1", "10.9.0.2"
_MAX_CONNECTIONS = 200  # four sockets each, and select() ends at 1,024
_IPV4 = 4  # IPv6 only looks for routers here


class PacketWay:
    """One direction between two devices: a pipe and its timer."""

    def __init__(self, pipe: PacketPipe, timer: Timer, source: int, sink: int, radio: Radio | None) -> None:
        self.pipe = pipe
        self._timer = timer
        self._source = source
        self._sink = sink
        self._radio = radio
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None
        self._when = 0.0  # time for which `_handle` is set
        self._loop.add_reader(source, self._read)

    def close(self) -> None:
        """Read and write no longer."""
        self._loop.remove_reader(self._source)
        if self._handle is not None:
            self._handle.cancel()

    def reshape(self, shape: WayShape) -> None:
        """Change the pipe to `shape` now."""
        self.pipe.reshape(time.monotonic(), shape)
        self._set_timer()

    def stall(self, seconds: float) -> None:
        """Hold the pipe for `seconds`, beginning now."""
        self.pipe.stall(time.monotonic(), seconds)
        self._set_timer()

    def clear(self) -> None:
        """Lose everything that is under way."""
        self.pipe.clear()
        self._set_timer()

    def _read(self) -> None:
        now = time.monotonic()
        for _ in range(64):  # then the other direction has its turn
            try:
                packet = os.read(self._source, MTU)
            except BlockingIOError:
                break
            if packet and packet[0] >> 4 == _IPV4:
                waits_s = self._radio.use(now) if self._radio else 0.0
                if waits_s:
                    self.pipe.stall(now, waits_s)
                self.pipe.push(now, None, packet)
        self._set_timer()

    def _set_timer(self) -> None:
        when = self.pipe.next_time()
        if self._handle is not None:
            if when == self._when:
                return
            self._handle.cancel()
            self._handle = None
        if when < math.inf:
            self._when = when
            at = when - self._timer.early_s
            self._handle = self._loop.call_at(at, self._on_time, at > time.monotonic())

    def _on_time(self, was_ahead: bool) -> None:
        self._handle = None
        arrivals = self.pipe.due(time.monotonic() + self._timer.early_s)
        for arrival in arrivals:
            try:
                os.write(self._sink, arrival.data)
            except BlockingIOError:  # as a full queue of the receiver's card
                self.pipe.dropped += 1
        if arrivals and was_ahead:
            self._timer.was_late(time.monotonic() - self._when)
        self._set_timer()


def open_ways(
    edge: Namespace, verifier: Namespace, shape: LinkShape, faults: PacketFaults, seed: int, radio: Radio | None
) -> tuple[PacketWay, PacketWay]:
    """Return both directions between two namespaces, up before down; the arguments are those of `TunLink`."""
    timer, up, down = Timer(), PacketPipe(shape.up, faults, 2 * seed), PacketPipe(shape.down, faults, 2 * seed + 1)
    return (
        PacketWay(up, timer, edge.device, verifier.device, radio),
        PacketWay(down, timer, verifier.device, edge.device, radio),
    )


class TunLink:
    """A listener that carries every connection over a link of packets to one address.

    Args:
        to: `host:port` of the verifier.
        shape: initial shape; rates and queues count bytes of packets, with their headers.
        faults: what happens to packets.
        seed: seed of all chances.
        radio: radio of the edge; None: it never sleeps.

    Raises:
        Unavailable: TUN devices or namespaces are not allowed here; the remedy is named.
    """

    def __init__(
        self, to: str, shape: LinkShape, faults: PacketFaults, seed: int = 0, radio: Radio | None = None
    ) -> None:
        gain_rights()
        self._shape = shape
        self._faults = faults
        self._seed = seed
        self._radio = radio
        self._player = TracePlayer(self._apply)
        self._to = to
        self._namespaces: list[Namespace] = []
        self._ways: tuple[PacketWay, ...] = ()
        self._relays: tuple[LinkRelay, ...] = ()

    async def start(self, listen: str = "127.0.0.1:0") -> str:
        """Listen, and return the address as `host:port`.

        Raises:
            ConfigError: `listen` is not loopback, or an address is none.
            Unavailable: the port is taken, or namespaces are not allowed here.
        """
        try:
            return await self._start(listen)
        except BaseException:
            await self.stop()
            raise

    async def _start(self, listen: str) -> str:
        for address in (_EDGE, _VERIFIER):
            self._namespaces.append(Namespace(address))
        edge, verifier = self._namespaces
        self._ways = open_ways(edge, verifier, self._shape, self._faults, self._seed, self._radio)
        inner = verifier.new_socket(socket.AF_INET)
        inner.bind((_VERIFIER, 0))
        far = LinkRelay(self._to, LinkShape(), max_connections=_MAX_CONNECTIONS)
        near = LinkRelay(
            f"{_VERIFIER}:{inner.getsockname()[1]}",
            LinkShape(),
            max_connections=_MAX_CONNECTIONS,
            new_socket=edge.new_socket,
        )
        self._relays = (near, far)
        await far.serve(inner)
        return await near.start(listen)

    async def stop(self) -> None:
        """Cut everything, listen no longer, and give up the namespaces."""
        self._player.end()
        for relay in self._relays:
            await relay.stop()
        for way in self._ways:
            way.close()
        for namespace in self._namespaces:
            namespace.close()
        self._relays, self._ways, self._namespaces = (), (), []

    @property
    def counters(self) -> Counters:
        """Payload, connections and packets since the start."""
        near, far = (relay.counters for relay in self._relays)
        pipes = [way.pipe for way in self._ways]
        return replace(
            near,
            up_bytes=far.up_bytes,
            packets_lost=sum(pipe.lost for pipe in pipes),
            packets_dropped=sum(pipe.dropped for pipe in pipes),
        )

    def set_shape(self, shape: LinkShape) -> None:
        """Change the link to `shape` and end a trace."""
        self._player.end()
        self._apply(shape)

    def play(self, trace: LinkTrace) -> None:
        """Play round trip and rates of `trace` in a loop; jitter, queue and faults stay."""
        self._player.play(trace, self._shape)

    def stall(self, seconds: float) -> None:
        """Hold the link for `seconds`."""
        for way in self._ways:
            way.stall(seconds)

    def cut(self) -> None:
        """Abort all connections; what is under way is lost."""
        for way in self._ways:
            way.clear()
        for relay in self._relays:
            relay.cut()

    def _apply(self, shape: LinkShape) -> None:
        self._shape = shape
        for way, half in zip(self._ways, (shape.up, shape.down), strict=True):
            way.reshape(half)
