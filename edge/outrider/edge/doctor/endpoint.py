"""A server that is looked at."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio

from outrider.edge.security import Security
from outrider.proto.address import split_address
from outrider.proto.channel import CLIENT_OPTIONS
from outrider.proto.plumbing.tls import ClientCredentials, open_channel


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server is, and how it is spoken to.

    Attributes:
        role: `coordinator` or `verifier`.
        address: host:port.
        option: that names it, or by which it came to be known.
        service: of gRPC, whose health is asked for.
        security: TLS files, and the key for coordinators.
        tls_name: that its certificate must have; empty: its host; None: it speaks plain text.
    """

    role: str
    address: str
    option: str
    service: str
    security: Security
    tls_name: str | None

    @property
    def host(self) -> str:
        """Without the port."""
        return split_address(self.address, self.role)[0]

    @property
    def port(self) -> int:
        """Alone."""
        return split_address(self.address, self.role)[1]

    @property
    def expected_name(self) -> str:
        """That its certificate must have."""
        return self.tls_name or self.host

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Of calls to it; only a coordinator is shown the key."""
        return self.security.metadata if self.role == "coordinator" else ()

    @asynccontextmanager
    async def channel(self) -> AsyncIterator[grpc.aio.Channel]:
        """A connection of its own; raises `ConfigError` where the TLS files are no good."""
        tls = self.security.tls if self.tls_name is not None else None
        credentials = ClientCredentials(tls).current() if tls is not None else None
        async with open_channel(self.address, CLIENT_OPTIONS, credentials, self.tls_name or "") as opened:
            yield opened
