"""The link: streams to verifiers, which count bytes and translate foreign errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import grpc

from outrider.edge.link.security import Security
from outrider.proto import codec
from outrider.proto.channel import (
    CONNECTION_WINDOW_BYTES,
    DECODING_OPTIONS,
    DECODING_WINDOW_BYTES,
    HEALTH_METHOD,
    HEALTHY,
    LEASE_METADATA,
    REPORT_METHOD,
)
from outrider.proto.errors import InvalidArgument, OutriderError, Unavailable
from outrider.proto.plumbing.tls import ClientCredentials, explain, open_channel
from outrider.proto.rpc_errors import DETAIL_KEY, from_rpc_error
from outrider.proto.session import EdgeStatistics
from outrider.proto.session.quiet_wire import ANSWER_S, CellReader, CellWriter, opening_bytes
from outrider.proto.streams import ENDED, GRPC_PREFIX_BYTES, send_bytes
from outrider.proto.types import Cancel, CloudFrame, EdgeFrame, Lease, Open, Opened, QuietWire

LAST_WORDS_S = 0.2
SILENT_S = 5.0  # without a cell, after which a quiet stream whose text has ended is left
# gRPC reports a lost connection with one of these; a verifier's own error carries a detail.
BROKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED)
_NO_MORE = b""  # no frame is empty


class Stream:
    """Open decoding stream. `send` never waits: a task of its own sends the frames in order.

    Attributes:
        statistics: counts the bytes; a conversation's next turn has its own.
        refused: whether the other side has ended it with an error of its own, over a connection that works.
    """

    def __init__(self, call: Any, statistics: EdgeStatistics, connection: Connection) -> None:
        self._call = call
        self.connection = connection
        self.statistics = statistics
        self.refused = False
        self._outgoing: asyncio.Queue[bytes] = asyncio.Queue()
        self._writer = asyncio.create_task(self._write())

    def send(self, frame: EdgeFrame) -> None:
        """Put `frame` after those already on their way."""
        self._outgoing.put_nowait(codec.encode_edge_frame(frame))

    async def frames(self) -> AsyncIterator[CloudFrame]:
        """Yield the frames that the verifier sends.

        Raises:
            OutriderError: the stream's status, translated; Unavailable where it just ends. A connection that
                dies silently is found by keepalive; a verifier that is busy with a long prompt says nothing either.
        """
        async for data in self._messages():
            yield codec.decode_cloud_frame(data)

    async def _messages(self) -> AsyncIterator[bytes]:
        try:
            while True:
                data = await self._call.read()
                if data is grpc.aio.EOF:
                    raise await self._ending()
                self.statistics.downlink_bytes += len(data) + GRPC_PREFIX_BYTES
                self.connection.receive(len(data) + GRPC_PREFIX_BYTES)
                yield data
        except grpc.aio.AioRpcError as error:  # from the read alone; the stream's own status says more
            raise await self._ending() from error
        except asyncio.InvalidStateError as error:
            raise Unavailable("the stream is gone") from error

    async def _ending(self) -> OutriderError:
        code = await self._call.code()
        if code == grpc.StatusCode.OK:
            return Unavailable("the verifier ended the stream before the text")
        metadata = await self._call.trailing_metadata() or grpc.aio.Metadata()
        details = await self._call.details()
        self.refused = DETAIL_KEY in metadata or code not in BROKEN
        if not self.refused:
            return Unavailable(f"the stream broke: {explain(details or '') or details or code.name}")
        return from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details))

    async def _write(self) -> None:
        while data := await self._outgoing.get():
            self.statistics.uplink_bytes += len(data) + GRPC_PREFIX_BYTES
            try:
                await send_bytes(self._call, data)
            except ENDED:
                return  # the reading side meets the same end and says why

    async def close(self) -> None:
        """Send what is still waiting, for a moment at most, and end the stream."""
        self._outgoing.put_nowait(_NO_MORE)
        try:
            await asyncio.wait([self._writer], timeout=LAST_WORDS_S)
        finally:
            self._writer.cancel()
            self._call.cancel()


class QuietStream(Stream):
    """Open decoding stream with cells in place of frames (`session.quiet_wire`): it answers each of the verifier's.

    The verifier ends it, some time after the text; `close` waits for that.
    """

    def __init__(self, call: Any, statistics: EdgeStatistics, connection: Connection, quiet: QuietWire) -> None:
        super().__init__(call, statistics, connection)
        self._cells, self._reader = CellWriter(quiet.up_bytes), CellReader(quiet.down_bytes)
        self._heard: asyncio.Queue[CloudFrame | OutriderError] = asyncio.Queue()
        self._num_cells = 0
        self._listener = asyncio.create_task(self._listen())

    def send(self, frame: EdgeFrame) -> None:
        """Put an Open on the way, which is padded, or any other frame into the next answers."""
        data = codec.encode_edge_frame(frame)
        if isinstance(frame, Open):
            self._outgoing.put_nowait(codec.padded_edge_frame(data, opening_bytes(len(data))))
        else:
            self._cells.put(data)

    async def frames(self) -> AsyncIterator[CloudFrame]:
        """Yield the frames in the verifier's cells, and raise what ends the stream; leaving early leaves it open."""
        while not isinstance(item := await self._heard.get(), OutriderError):
            yield item
        raise item

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async for message in self._messages():
                self._num_cells += 1
                loop.call_later(ANSWER_S, self._answer)
                for data in self._reader.take(_cell_in(message)):
                    self._heard.put_nowait(codec.decode_cloud_frame(data))
        except OutriderError as error:
            self._heard.put_nowait(error)

    def _answer(self) -> None:
        if not self._listener.done():
            self._outgoing.put_nowait(codec.encode_edge_cell(self._cells.cell()))

    async def close(self) -> None:
        """Cancel what still runs, go on until the verifier ends the stream or is silent, and end it here too."""
        self.send(Cancel("left"))
        try:
            known = -1
            while not self._listener.done() and known != (known := self._num_cells):
                await asyncio.wait([self._listener], timeout=SILENT_S)
        finally:
            self._listener.cancel()
            await super().close()


def _cell_in(message: bytes) -> bytes:
    """Return the cell of a quiet stream; raise `InvalidArgument` where the verifier answers in frames."""
    try:
        return codec.decode_cloud_cell(message)
    except InvalidArgument as error:
        line = "is not known to this verifier; update it, or leave --quiet-wire out"
        raise InvalidArgument(line, field="open.quiet") from error


@dataclass(eq=False, slots=True)
class Connection:
    """Channel to a verifier, and how much has come through it.

    Attributes:
        renew: makes another connection to the same verifier, which begins its handshake at once.
        successor: connection that takes this one's place as soon as it stands; None: this one is still good.
        opened: newest answer to an Open that came over it; None: none yet.
    """

    channel: grpc.aio.Channel
    renew: Callable[[], Connection]
    received_bytes: int = 0
    streams: int = 0
    retired: bool = False
    successor: Connection | None = None
    opened: Opened | None = None

    @property
    def stands(self) -> bool:
        """Whether a stream needs no handshake; one that has failed is tried again."""
        return self.channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY

    @property
    def has_failed(self) -> bool:
        """Whether the last handshake has failed, and the next waits for gRPC's backoff."""
        return self.channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE

    def receive(self, num_bytes: int) -> None:
        """Count bytes that have come, and renew the connection before it has used up the window it began with."""
        self.received_bytes += num_bytes
        used_up = self.received_bytes > CONNECTION_WINDOW_BYTES - 2 * DECODING_WINDOW_BYTES
        if used_up and self.successor is None and not self.retired:
            self.successor = self.renew()


class Channels:
    """One connection to each verifier, kept between texts and renewed in time: a new text waits for no handshake."""

    def __init__(self, security: Security | None = None) -> None:
        self._security = security or Security()
        self._files = ClientCredentials(self._security.tls) if self._security.tls else None
        self._by_address: dict[str, Connection] = {}
        self._retired: list[Connection] = []
        self._closing: set[asyncio.Task[None]] = set()  # of quiet streams, which go on for a while

    def connect(self, lease: Lease) -> Connection:
        """Return the connection to a lease's verifier; a new one begins its handshake, before a text needs it.

        Raises:
            ConfigError: it speaks TLS and the edge does not, or the other way round beyond this machine.
        """
        connection = self._by_address.get(lease.address)
        if connection is not None and not connection.streams and connection.has_failed:
            self.retire(lease.address, connection)
        if lease.address not in self._by_address:
            self._by_address[lease.address] = self._new(lease)
        return self._by_address[lease.address]

    def open_stream(
        self,
        lease: Lease,
        statistics: EdgeStatistics,
        metadata: tuple[tuple[str, str | bytes], ...] = (),
        quiet: QuietWire | None = None,
    ) -> Stream:
        """Begin a stream to a lease's verifier, which connects in the background; `statistics` count its bytes.

        It is a quiet one where `quiet` is given, as its Open then says.

        Raises:
            ConfigError: as for `connect`.
        """
        connection = self.connect(lease)
        if connection.successor is not None and connection.successor.stands:
            successor, connection.successor = connection.successor, None
            successor.opened = connection.opened
            self.retire(lease.address, connection)
            connection = self._by_address[lease.address] = successor
        if lease.token:  # for whoever answers before the first frame
            metadata = (*metadata, (LEASE_METADATA, lease.token))
        connection.streams += 1
        method = connection.channel.stream_stream(codec.DECODE_METHOD)  # bytes: the codec checks them
        if quiet is not None:
            return QuietStream(method(metadata=metadata), statistics, connection, quiet)
        return Stream(method(metadata=metadata), statistics, connection)

    async def wake(self, lease: Lease, within_s: float) -> None:
        """Exchange a few bytes with the lease's verifier, for `within_s` seconds at most.

        They take no place there. What goes wrong is left for the next text to meet.
        """
        check = self.connect(lease).channel.unary_unary(HEALTH_METHOD)
        with suppress(grpc.aio.AioRpcError):
            await check(b"", timeout=within_s)  # an empty request asks for the health of all

    async def described(self, lease: Lease, within_s: float) -> Lease:
        """Return the lease with the context length of its verifier, where that says it within `within_s` seconds.

        A verifier that asks for no leases reports to anybody.
        """
        report: Any = self.connect(lease).channel.unary_unary(REPORT_METHOD)
        try:
            said = json.loads(await report(b"{}", timeout=within_s))
            return replace(lease, context_length=int(said["context_length"]))
        except (grpc.aio.AioRpcError, ValueError, RecursionError, TypeError, KeyError):
            return lease

    async def close_stream(self, stream: Stream) -> None:
        """Close a stream, a quiet one in the background, and the connections that nobody uses any more."""
        if not isinstance(stream, QuietStream):
            await self._close_stream(stream)
            return
        closing = asyncio.create_task(self._close_stream(stream))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _close_stream(self, stream: Stream) -> None:
        try:
            await stream.close()
        finally:  # the caller may be cancelled
            stream.connection.streams -= 1
            for connection in [connection for connection in self._retired if not connection.streams]:
                self._retired.remove(connection)
                await connection.channel.close()

    def retire(self, address: str, connection: Connection) -> None:
        """Use a connection no more, such as a lost stream's: the next connects at once, without gRPC's backoff."""
        if connection.retired:
            return
        connection.retired = True
        self._retired.append(connection)
        if connection.successor is not None:  # it was made over the same link, at the same time
            self.retire(address, connection.successor)
        if self._by_address.get(address) is connection:
            del self._by_address[address]

    def doubt(self) -> None:
        """Open no stream any more over the connections that there are: one like them has died unsaid."""
        for address, connection in [*self._by_address.items()]:
            self.retire(address, connection)

    async def renew(self, lease: Lease) -> None:
        """Connect to a verifier once more, have it answer that it serves, and use that connection from now on.

        Raises:
            Unavailable: it does not answer, or serves nobody now.
            ConfigError: as for `connect`.
        """
        connection, address, answer = self._new(lease), lease.address, b""
        try:
            method: Any = connection.channel.unary_unary(HEALTH_METHOD)
            answer = await method(b"")
        except grpc.aio.AioRpcError as error:
            why = explain(error.details() or "") or error.code().name
            raise Unavailable(f"{address} does not answer: {why}", code="OUT-102") from error
        finally:
            if answer != HEALTHY:
                await connection.channel.close()
        if answer != HEALTHY:
            raise Unavailable(f"{address} serves nobody now")
        if address in self._by_address:
            self.retire(address, self._by_address[address])
        self._by_address[address] = connection

    async def close(self) -> None:
        """Close all connections, once quiet streams have ended, for which a moment is waited after the last cell."""
        while self._closing:
            await asyncio.wait([*self._closing])
        connections = [*self._by_address.values(), *self._retired]
        connections += [connection.successor for connection in connections if connection.successor is not None]
        self._by_address, self._retired = {}, []
        for connection in connections:
            await connection.channel.close()

    def _new(self, lease: Lease) -> Connection:
        """Return a connection that begins its handshake now."""
        tls_name = lease.tls_name if lease.tls else None
        self._security.check_verifier(lease.address, tls_name)
        credentials = self._files.current() if self._files is not None and lease.tls else None
        channel = open_channel(lease.address, DECODING_OPTIONS, credentials, tls_name or "")
        channel.get_state(try_to_connect=True)
        return Connection(channel, partial(self._new, lease))
