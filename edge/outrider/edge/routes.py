"""Where to decode: through a coordinator's leases, or on one verifier known beforehand."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, Protocol

from outrider.edge.control import CoordinatorClient
from outrider.edge.security import Security
from outrider.proto.errors import OutriderError
from outrider.proto.types import Lease, LeaseRequest, SessionReport


class Route(Protocol):
    """Finds a verifier, again and again if need be."""

    async def lease(self, session: str, avoid: tuple[str, ...]) -> Lease:
        """Permission to decode; `avoid` names verifiers just lost."""
        ...

    def report(self, report: SessionReport) -> Coroutine[Any, Any, None]:
        """Hand in a finished session's figures, if anybody wants them."""
        ...

    async def close(self) -> None:
        """Give back what it holds."""
        ...


class DirectRoute:
    """Verifiers at fixed addresses that ask for no lease; a lost one is followed by the next in the list."""

    def __init__(
        self, addresses: tuple[str, ...], model: str, tokenizer_sha256: str, security: Security | None = None
    ) -> None:
        self._tls = security.tls if security is not None else None
        self._addresses = addresses
        self._model = model
        self._tokenizer_sha256 = tokenizer_sha256

    async def lease(self, session: str, avoid: tuple[str, ...]) -> Lease:  # noqa: ARG002 - the protocol's
        """The first address that is not to be avoided; all are tried in turn when all are."""
        fresh = [address for address in self._addresses if address not in avoid]
        address = fresh[0] if fresh else self._addresses[len(avoid) % len(self._addresses)]
        return Lease(
            token=b"",
            verifier=address,
            address=address,
            expires_in_s=float("inf"),
            model=self._model,
            tokenizer_sha256=self._tokenizer_sha256,
            tls=self._tls is not None,
            tls_name=self._tls.server_name if self._tls is not None else "",
        )

    async def report(self, report: SessionReport) -> None:
        """Nobody collects figures here."""

    async def close(self) -> None:
        """Holds nothing."""


class CoordinatorRoute:
    """Leases from a coordinator."""

    def __init__(self, client: CoordinatorClient, model: str, tokenizer_sha256: str) -> None:
        self._client = client
        self._model = model
        self._tokenizer_sha256 = tokenizer_sha256

    async def lease(self, session: str, avoid: tuple[str, ...]) -> Lease:
        """As the coordinator decides; where it relays, the address is its own."""
        lease = await self._client.open_lease(
            LeaseRequest(model=self._model, session=session, tokenizer_sha256=self._tokenizer_sha256, avoid=avoid)
        )
        if not lease.relayed:
            return lease
        tls = self._client.security.tls
        name = tls.server_name if tls is not None else ""
        return replace(lease, address=self._client.address, tls=tls is not None, tls_name=name)

    async def report(self, report: SessionReport) -> None:
        """Figures are wanted, but no text depends on them: a coordinator that is away is not missed."""
        try:
            await self._client.report(report)
        except OutriderError:
            return

    async def close(self) -> None:
        """The client belongs to who made it."""
