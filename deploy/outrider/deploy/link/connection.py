"""A connection over the link: two sockets and a stream each way between them."""

from __future__ import annotations

import asyncio
import socket
import time

from outrider.deploy.link.sockets import abort, prepare
from outrider.deploy.link.way import Way


class Stream:
    """One direction of one connection."""

    def __init__(self, connection: Connection, source: socket.socket, sink: socket.socket, way: Way) -> None:
        self._connection = connection
        self.source = source
        self.finished = False
        self.over = False  # the sink has all bytes and the end
        self.reading_since = 0.0
        self._sink = sink
        self._way = way
        self._outbox = bytearray()  # bytes that are due but not taken by the sink yet
        self._reading = False
        self._ends = False  # after the outbox
        self._loop = asyncio.get_running_loop()
        way.add(self)
        self.update_reading()

    @property
    def gone(self) -> bool:
        """Whether the connection is closed."""
        return self._connection.cut

    def abort(self) -> None:
        """Reset the connection."""
        self._connection.abort()

    def update_reading(self) -> None:
        """Read while the source has more, the way has room, and the sink takes bytes."""
        wanted = not (self.finished or self._way.full or self._outbox or self.gone)
        if wanted and not self._reading:
            self.reading_since = time.monotonic()
            self._loop.add_reader(self.source, self._way.read, self)
        elif self._reading and not wanted:
            self._loop.remove_reader(self.source)
        self._reading = wanted

    def deliver(self, data: bytes) -> None:
        """Send bytes that are due; none: the end."""
        if not data:
            self._ends = True
        if self._outbox:
            self._outbox += data
            return
        self._outbox += data[self._send(data) :]
        if self._outbox:
            self._loop.add_writer(self._sink, self._flush)
            self.update_reading()
        self._end_if_all_is_sent()

    def close(self) -> None:
        """Forget the sockets."""
        self._way.discard(self)
        self._loop.remove_reader(self.source)
        self._loop.remove_writer(self._sink)

    def _flush(self) -> None:
        del self._outbox[: self._send(self._outbox)]
        if not self._outbox and not self.gone:
            self._loop.remove_writer(self._sink)
            self.update_reading()
            self._end_if_all_is_sent()

    def _send(self, data: bytes | bytearray) -> int:
        try:
            return self._sink.send(data) if data else 0
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self.abort()
            return len(data)

    def _end_if_all_is_sent(self) -> None:
        if self._ends and not self._outbox and not self.over and not self.gone:
            self.over = True
            self._connection.end(self._sink)


class Connection:
    """An edge's socket, the socket to the verifier, and a stream each way."""

    def __init__(self, edge: socket.socket, verifier: socket.socket, connections: set[Connection]) -> None:
        self.cut = False
        self._sockets = (edge, verifier)
        self._streams: tuple[Stream, ...] = ()
        self._all = connections
        connections.add(self)
        for end in self._sockets:
            prepare(end)

    def open(self, up: Way, down: Way) -> None:
        """Let the bytes flow between the connected sockets."""
        edge, verifier = self._sockets
        self._streams = (Stream(self, edge, verifier, up), Stream(self, verifier, edge, down))

    def end(self, sink: socket.socket) -> None:
        """Shut `sink` down for writing; close the connection after both directions have ended."""
        try:
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            self.abort()
            return
        if all(stream.over for stream in self._streams):
            self._forget()
            for end in self._sockets:
                end.close()

    def abort(self) -> None:
        """Reset both sockets."""
        if not self.cut:
            self._forget()
            for end in self._sockets:
                abort(end)

    def _forget(self) -> None:
        self.cut = True
        for stream in self._streams:
            stream.close()
        self._all.discard(self)
