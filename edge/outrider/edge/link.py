"""The link: one stream to one verifier. Bytes are counted here, foreign errors translated here, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from outrider.proto import codec
from outrider.proto.channel import CLIENT_OPTIONS
from outrider.proto.errors import DETAIL_KEY, OutriderError, Unavailable, from_rpc_error
from outrider.proto.session import EdgeStatistics
from outrider.proto.types import CloudFrame, EdgeFrame

GRPC_PREFIX_BYTES = 5  # flag and length before every message
LAST_WORDS_S = 0.2
# With these gRPC reports a connection lost in its various moments; a verifier's own word carries a detail.
BROKEN = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.CANCELLED,
)
_NO_MORE = b""  # no frame is empty


class Stream:
    """One open decoding stream. `send` never waits: frames go out in order by a task of their own."""

    def __init__(self, channel: grpc.aio.Channel, call: Any, statistics: EdgeStatistics) -> None:
        self._channel = channel
        self._call = call
        self._statistics = statistics
        self._outgoing: asyncio.Queue[bytes] = asyncio.Queue()
        self._writer = asyncio.create_task(self._write())

    def send(self, frame: EdgeFrame) -> None:
        """Put `frame` behind those already on their way."""
        self._outgoing.put_nowait(codec.encode_edge_frame(frame))

    async def frames(self) -> AsyncIterator[CloudFrame]:
        """What the verifier sends.

        Raises:
            OutriderError: the stream's status, translated; Unavailable where it just ends. A connection that
                dies silently is found by keepalive; a verifier that is busy with a long prompt says nothing either.
        """
        try:
            while True:
                data = await self._call.read()
                if data is grpc.aio.EOF:
                    raise await self._ending()
                self._statistics.downlink_bytes += len(data) + GRPC_PREFIX_BYTES
                yield codec.decode_cloud_frame(data)
        except grpc.aio.AioRpcError as error:  # of the read alone; the stream's own status tells more
            raise await self._ending() from error
        except asyncio.InvalidStateError as error:
            raise Unavailable("the stream is gone") from error

    async def _ending(self) -> OutriderError:
        code = await self._call.code()
        if code == grpc.StatusCode.OK:
            return Unavailable("the verifier ended the stream before the text")
        metadata = await self._call.trailing_metadata() or grpc.aio.Metadata()
        details = await self._call.details()
        if DETAIL_KEY not in metadata and code in BROKEN:
            return Unavailable(f"the stream broke: {details or code.name}")
        return from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details))

    async def _write(self) -> None:
        while data := await self._outgoing.get():
            self._statistics.uplink_bytes += len(data) + GRPC_PREFIX_BYTES
            try:
                await self._call.write(data)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the reading side meets the same end and tells why

    async def close(self) -> None:
        """Send what is still waiting, for a moment at most, and end the stream."""
        self._outgoing.put_nowait(_NO_MORE)
        await asyncio.wait([self._writer], timeout=LAST_WORDS_S)
        self._writer.cancel()
        self._call.cancel()
        await self._channel.close()


def open_stream(address: str, statistics: EdgeStatistics) -> Stream:
    """Begin a stream to the verifier at `address`; connecting happens in the background."""
    channel = grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
    method = channel.stream_stream(codec.DECODE_METHOD)  # bytes: the codec counts and checks them
    return Stream(channel, method(), statistics)
