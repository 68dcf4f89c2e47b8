"""Delays of commits over a lossy link, by transport: `python -m outrider.bench.transports 10/2 60/2 60/2:100`.

Messages as small as commits go down a link of packets every 30 ms, and as small as drafts up, by several transports
at once: over one TCP connection, as now; with the drafts on a connection of their own; with each commit on two
connections, the first of which counts, since commits are idempotent; and as datagrams, each of which stands for all
before it, as the ideal.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import socket
import struct
import time
from collections.abc import Callable

from outrider.deploy.link.namespace import Namespace, gain_rights
from outrider.deploy.link.relay import run_on_time
from outrider.deploy.link.shape import LinkShape, PacketFaults
from outrider.deploy.link.tun import open_ways
from outrider.deploy.loss import PacketLoss

EVERY_S = 0.030
DRAFT = bytes(25)
SETTLE_S = 3.0  # after the last message; a datagram that is lost never comes
LONGEST_S = 60.0  # for the retransmissions of TCP
HEADINGS = f"{'transport':14}{'count':>6}" + "".join(
    f"{name:>10}" for name in ("gap p50", "gap p99", "gap max", "age p50", "age p99", "age max")
)
_COMMIT = struct.Struct("!Id48x")  # number and time of sending
_UP, _DOWN = 20.0, 100.0  # Mbit/s


class Receiver:
    """One transport's arrivals, in the order of the messages."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0  # messages known, all from the first on
        self._arrived: list[float] = []
        self._ages: list[float] = []

    def receive(self, message: bytes) -> None:
        """Note a message, which also stands for those before it; one known already counts for nothing."""
        number, sent = _COMMIT.unpack(message)
        if number >= self.count:
            now = time.monotonic()
            self.count = number + 1
            self._arrived.append(now)
            self._ages.append(now - sent)

    @property
    def row(self) -> str:
        """Name, quantiles of the gaps between arrivals, and of their ages, in ms, below `HEADINGS`."""
        gaps = sorted(later - earlier for earlier, later in itertools.pairwise(self._arrived))
        ages = sorted(self._ages)
        shown = [(gaps, 0.5), (gaps, 0.99), (gaps, 1.0), (ages, 0.5), (ages, 0.99), (ages, 1.0)]
        cells = "".join(f"{1e3 * values[round(q * (len(values) - 1))]:10.1f}" for values, q in shown)
        return f"{self.name:14}{self.count:6}{cells}"


class Transports:
    """All transports over one link: their sockets, and what they have received."""

    def __init__(self, edge: Namespace, verifier: Namespace) -> None:
        self.receivers: list[Receiver] = []
        self._edge = edge
        self._verifier = verifier
        self._commits: list[socket.socket] = []  # at the verifier
        self._drafts: list[socket.socket] = []  # at the edge
        self._reading: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Connect them all."""
        for name, connections, own_drafts in (("one TCP", 1, 0), ("drafts apart", 1, 1), ("two TCP", 2, 0)):
            receiver = self._receiver(name)
            pairs = [await self._connected() for _ in range(connections + own_drafts)]
            for edge, verifier in pairs[:connections]:
                self._read(edge, receiver.receive)
                self._commits.append(verifier)
            for _, verifier in pairs:
                self._read(verifier, lambda _: None)
            self._drafts.append(pairs[-1 if own_drafts else 0][0])
        edge, verifier = (end.new_socket(socket.AF_INET, socket.SOCK_DGRAM) for end in (self._edge, self._verifier))
        for own, end in ((edge, self._edge), (verifier, self._verifier)):
            own.bind((end.address, 0))
        verifier.connect(edge.getsockname())
        self._read(edge, self._receiver("datagrams").receive)
        self._commits.append(verifier)

    def send(self, number: int) -> None:
        """Send a commit down and a draft up, by every transport."""
        message = _COMMIT.pack(number, time.monotonic())
        for end in self._commits:
            end.send(message)
        for end in self._drafts:
            end.send(DRAFT)

    async def close(self) -> None:
        """Read no more, and close all sockets."""
        for task in self._reading:
            task.cancel()
        await asyncio.wait(self._reading)
        for end in (*self._commits, *self._drafts):
            end.close()

    def _receiver(self, name: str) -> Receiver:
        self.receivers.append(Receiver(name))
        return self.receivers[-1]

    def _read(self, end: socket.socket, receive: Callable[[bytes], object]) -> None:
        self._reading.append(asyncio.create_task(_messages(end, receive)))

    async def _connected(self) -> tuple[socket.socket, socket.socket]:
        """Return a connection's sockets at the edge and at the verifier."""
        loop = asyncio.get_running_loop()
        edge = self._edge.new_socket(socket.AF_INET)
        with self._verifier.new_socket(socket.AF_INET) as listener:
            listener.bind((self._verifier.address, 0))
            listener.listen(1)
            accepting = asyncio.create_task(loop.sock_accept(listener))
            await loop.sock_connect(edge, listener.getsockname())
            verifier, _ = await accepting
        verifier.setblocking(False)
        for end in (edge, verifier):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return edge, verifier


async def _messages(end: socket.socket, receive: Callable[[bytes], object]) -> None:
    kept = b""
    while data := await asyncio.get_running_loop().sock_recv(end, 1 << 16):
        kept += data
        while len(kept) >= _COMMIT.size:
            receive(kept[: _COMMIT.size])
            kept = kept[_COMMIT.size :]


async def measure(rtt_ms: float, loss: PacketLoss, seconds: float, seed: int) -> list[Receiver]:
    """Return what every transport received in `seconds` over a link with this loss each way."""
    shape = LinkShape.of(rtt_ms=rtt_ms, up_mbit=_UP, down_mbit=_DOWN)
    edge, verifier = Namespace("10.9.0.1"), Namespace("10.9.0.2")
    ways = open_ways(edge, verifier, shape, PacketFaults(loss), seed, None)
    transports = Transports(edge, verifier)
    await transports.open()
    began = time.monotonic()
    total = round(seconds / EVERY_S)
    for number in range(total):
        await asyncio.sleep(began + number * EVERY_S - time.monotonic())
        transports.send(number)
    ended = time.monotonic()
    while (passed := time.monotonic() - ended) < LONGEST_S:
        missing = [receiver.name for receiver in transports.receivers if receiver.count < total]
        if not missing or (missing == ["datagrams"] and passed > SETTLE_S):
            break
        await asyncio.sleep(0.1)
    await transports.close()
    for way in ways:
        way.close()
    for end in (edge, verifier):
        end.close()
    return transports.receivers


async def _main() -> int:
    parser = argparse.ArgumentParser(description="Compare transports of small messages over lossy links.")
    parser.add_argument("links", nargs="+", metavar="RTT/LOSS", help="ms, and percent or PERCENT:MS in bursts")
    parser.add_argument("--seconds", type=float, default=40.0, help="time on each link")
    parser.add_argument("--seed", type=int, default=1, help="seed of the losses")
    given = parser.parse_args()
    print(f"gap: between arrivals in order; age: since sending; both ms\n{HEADINGS}")
    for link in given.links:
        rtt_ms, _, loss = link.partition("/")
        print(f"{rtt_ms} ms, {loss or 0} % lost")
        for receiver in await measure(float(rtt_ms), PacketLoss.parse(loss or "0"), given.seconds, given.seed):
            print(receiver.row, flush=True)
    return 0


if __name__ == "__main__":
    gain_rights()
    raise SystemExit(run_on_time(_main()))
