"""A coordinator on loopback, and a minimal client that uses codec and error tree alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from outrider.coordinator.cluster import Cluster
from outrider.coordinator.coordinator_config import CoordinatorConfig
from outrider.coordinator.coordinator_server import CoordinatorServer
from outrider.proto import codec
from outrider.proto.cluster_status import decode_status
from outrider.proto.rpc_errors import from_rpc_error

SECRET = b"0123456789abcdef"
FIXED_WINDOW = (("grpc.http2.bdp_probe", 0),)  # else a slow machine lets answers that nobody reads through
ENCODERS: dict[str, Callable[..., bytes]] = {
    "OpenLease": codec.encode_lease_request,
    "ListDrafters": codec.encode_drafter_query,
    "WatchDrafters": codec.encode_drafter_query,
    "FetchFile": codec.encode_fetch,
    "ReportSession": codec.encode_report,
    "Status": codec.encode_nothing,
    "Drain": codec.encode_drain,
}
DECODERS: dict[str, Callable[[bytes], Any]] = {
    "OpenLease": codec.decode_lease,
    "ListDrafters": codec.decode_drafters,
    "WatchDrafters": codec.decode_drafters,
    "FetchFile": codec.decode_chunk,
    "ReportSession": codec.decode_nothing,
    "Status": decode_status,
    "Drain": codec.decode_drained,
}


class Caller:
    """A client of `Control` at one address."""

    def __init__(self, channel: grpc.aio.Channel, server: CoordinatorServer, address: str) -> None:
        self.channel = channel
        self.server = server
        self.address = address

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not holds():  # noqa: ASYNC110 - the condition has no event
                await asyncio.sleep(0.02)

    async def raw(self, method: str, data: bytes) -> bytes:
        try:
            return await self.channel.unary_unary(f"/{codec.CONTROL_SERVICE}/{method}")(data, timeout=60)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def __call__(self, method: str, *request: Any) -> Any:
        return DECODERS[method](await self.raw(method, ENCODERS[method](*request)))

    async def stream(self, method: str, *request: Any) -> AsyncIterator[Any]:
        call = self.channel.unary_stream(f"/{codec.CONTROL_SERVICE}/{method}")(ENCODERS[method](*request), timeout=60)
        try:
            async for data in call:
                yield DECODERS[method](data)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error


@asynccontextmanager
async def coordinator(cluster: Cluster | None = None, **options: Any) -> AsyncIterator[Caller]:
    defaults: dict[str, Any] = {"lease_secret": SECRET, "listen": "127.0.0.1:0", "poll_s": 0.1}
    server = CoordinatorServer(CoordinatorConfig(**defaults | options), cluster)
    address = await server.start()
    try:
        async with grpc.aio.insecure_channel(address, options=FIXED_WINDOW) as channel:
            yield Caller(channel, server, address)
    finally:
        await server.stop(0.1)


@pytest.fixture
def coordinating() -> Callable[..., AbstractAsyncContextManager[Caller]]:
    """A coordinator over real gRPC."""
    return coordinator


@pytest.fixture
def drafters(tmp_path: Path) -> Path:
    """Return an empty folder for drafter packages."""
    folder = tmp_path / "drafters"
    folder.mkdir()
    return folder
