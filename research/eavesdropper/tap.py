"""A tap on a TLS connection, in a process of its own: it passes bytes on and notes each record, never its content."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from outrider.deploy.link.link_relay import run_on_time
from outrider.deploy.process.child import Child, answer_requests
from outrider.proto.address import split_address

HEADER_BYTES = 5  # of a TLS record: type, version, length of the rest
READ_BYTES = 65536
SILENT_S = 0.2  # without a record, a text's frames have all passed; a beat is shorter

Note = tuple[float, int]  # time in seconds, and bytes of a record: above 0 to the verifier, below 0 from it


class TapProcess(Child):
    """Taps before one server, as an async context manager; `addresses` has that of each."""

    def __init__(self, to: str, count: int) -> None:
        super().__init__(__name__, "the tap")
        self.addresses: Sequence[str] = ()
        self._opening = {"to": to, "count": count}

    async def prepare(self) -> None:
        self.addresses = await self.ask(self._opening)

    async def trace(self, tap: int) -> list[Note]:
        """Return what passed a tap since the last call, once it has been silent for a moment."""
        while True:
            quiet_s = await self.ask({"silent": tap})
            if quiet_s >= SILENT_S:
                return [(at, size) for at, size in await self.ask({"take": tap})]
            await asyncio.sleep(SILENT_S - quiet_s)


class Records:
    """Sizes of the TLS records in one direction of a connection."""

    def __init__(self) -> None:
        self._rest = b""
        self._skip = 0

    def take(self, data: bytes) -> list[int]:
        """Return the bytes of each record whose header is complete with `data`."""
        sizes = list[int]()
        while data:
            skipped = min(self._skip, len(data))
            self._skip, data = self._skip - skipped, data[skipped:]
            if not data:
                break
            missing = HEADER_BYTES - len(self._rest)
            self._rest, data = self._rest + data[:missing], data[missing:]
            if len(self._rest) == HEADER_BYTES:
                self._skip = int.from_bytes(self._rest[3:5], "big")
                sizes.append(HEADER_BYTES + self._skip)
                self._rest = b""
        return sizes


class Tap:
    """One listener, whose connections go to one server."""

    def __init__(self, to: str) -> None:
        self.notes: list[Note] = []
        self._to = split_address(to, "to")
        self._passing = set[asyncio.Task[None]]()

    async def start(self) -> str:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        return f"{host}:{port}"

    async def stop(self) -> None:
        for task in self._passing:
            task.cancel()
        await asyncio.gather(*self._passing, return_exceptions=True)

    async def _connected(self, near_in: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        far_in, far_out = await asyncio.open_connection(*self._to)
        for way in (self._pass(near_in, far_out, 1), self._pass(far_in, near_out, -1)):
            self._passing.add(asyncio.create_task(way))

    async def _pass(self, source: asyncio.StreamReader, to: asyncio.StreamWriter, sign: int) -> None:
        records = Records()
        with contextlib.suppress(ConnectionError):
            while data := await source.read(READ_BYTES):
                at = time.monotonic()
                self.notes += [(at, sign * size) for size in records.take(data)]
                to.write(data)
        to.close()


async def _obey() -> int:
    taps = list[Tap]()

    async def answer(request: dict[str, Any]) -> Any:
        if not taps:
            taps.extend(Tap(request["to"]) for _ in range(request["count"]))
            return [await tap.start() for tap in taps]
        if "silent" in request:
            notes = taps[request["silent"]].notes
            return time.monotonic() - notes[-1][0] if notes else SILENT_S
        tap = taps[request["take"]]
        notes, tap.notes = tap.notes, []
        return notes

    await answer_requests(answer)
    for tap in taps:
        await tap.stop()
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, and its end is ours
    sys.exit(run_on_time(_obey()))
