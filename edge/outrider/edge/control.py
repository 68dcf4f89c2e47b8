"""The coordinator as the edge sees it: leases, drafters, files, reports."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

import grpc

from outrider.proto import codec
from outrider.proto.channel import CLIENT_OPTIONS
from outrider.proto.errors import DeadlineExceeded, Unavailable, from_rpc_error
from outrider.proto.types import (
    ClusterStatus,
    DrafterManifest,
    Lease,
    LeaseRequest,
    RemoteFile,
    SessionReport,
)

T = TypeVar("T")
_PREFIX = f"/{codec.CONTROL_SERVICE}/"


class CoordinatorClient:
    """One channel to a coordinator. Every call has a deadline and raises errors of the tree."""

    def __init__(self, address: str, timeout_s: float = 10.0) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._channel = grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)

    async def open_lease(self, request: LeaseRequest) -> Lease:
        """Ask where to decode."""
        return await self._call("OpenLease", codec.encode_lease_request(request), codec.decode_lease)

    async def list_drafters(self, tokenizer_sha256: str = "") -> tuple[DrafterManifest, ...]:
        """All drafters, or those of one tokenizer."""
        return await self._call("ListDrafters", codec.encode_drafter_query(tokenizer_sha256), codec.decode_drafters)

    async def watch_drafters(self, tokenizer_sha256: str = "") -> AsyncIterator[tuple[DrafterManifest, ...]]:
        """The list of drafters now, and again each time it changes."""
        call = self._channel.unary_stream(_PREFIX + "WatchDrafters")(codec.encode_drafter_query(tokenizer_sha256))
        try:
            async for data in call:
                yield codec.decode_drafters(data)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def report(self, report: SessionReport) -> None:
        """Hand in the figures of a finished session."""
        await self._call("ReportSession", codec.encode_report(report), codec.decode_nothing)

    async def status(self) -> ClusterStatus:
        """The coordinator's whole view."""
        return await self._call("Status", b"", codec.decode_status)

    async def drain(self, verifier: str) -> int:
        """Send the sessions of `verifier` elsewhere; how many there were."""
        return await self._call("Drain", codec.encode_drain(verifier), codec.decode_drained)

    async def close(self) -> None:
        """Give the channel back."""
        await self._channel.close()

    async def _call(self, method: str, request: bytes, decode: Callable[[bytes], T]) -> T:
        unary: Any = self._channel.unary_unary(_PREFIX + method)
        try:
            return decode(await unary(request, timeout=self._timeout_s))
        except grpc.aio.AioRpcError as error:
            translated = from_rpc_error(error)
            if isinstance(translated, DeadlineExceeded | Unavailable) and not translated.retry_after_s:
                message = f"the coordinator at {self.address} does not answer: {translated.message}"
                raise Unavailable(message, field="coordinator") from error
            raise translated from error


def file_fetcher(address: str, timeout_s: float = 120.0) -> Callable[[RemoteFile, int], Iterator[bytes]]:
    """A blocking download from the coordinator, for the drafter cache, which works in a thread."""

    def fetch(file: RemoteFile, offset: int) -> Iterator[bytes]:
        with grpc.insecure_channel(address, options=CLIENT_OPTIONS) as channel:
            stream: Any = channel.unary_stream(_PREFIX + "FetchFile")
            try:
                for data in stream(codec.encode_fetch(file.sha256, offset), timeout=timeout_s):
                    yield codec.decode_chunk(data)
            except grpc.RpcError as error:
                raise from_rpc_error(error) from error

    return fetch
