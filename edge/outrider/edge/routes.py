"""Where to decode: through a coordinator's leases, or on one verifier known beforehand."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, Protocol, Self

from outrider.edge.control import CoordinatorClient
from outrider.edge.features import TextFeatures
from outrider.edge.fleet_prior import NOT_KNOWN, FleetPrior
from outrider.edge.security import Security
from outrider.proto.errors import OutriderError
from outrider.proto.types import Lease, LeaseRequest, SessionReport


class Route(Protocol):
    """Finds a verifier, again and again if need be."""

    async def lease(self, session: str, avoid: tuple[str, ...]) -> Lease:
        """Permission to decode; `avoid` names verifiers just lost."""
        ...

    def about(self, features: TextFeatures) -> Route:
        """The same way for one text of this kind: what its leases say of drafters is of such texts."""
        ...

    def prior(self, features: TextFeatures) -> FleetPrior:
        """What the fleet is known to have seen of drafters in such texts; asks nobody."""
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

    def about(self, features: TextFeatures) -> Self:  # noqa: ARG002 - the protocol's
        """Nobody is told."""
        return self

    def prior(self, features: TextFeatures) -> FleetPrior:  # noqa: ARG002 - the protocol's
        """There is no fleet."""
        return NOT_KNOWN

    async def report(self, report: SessionReport) -> None:
        """Nobody collects figures here."""

    async def close(self) -> None:
        """Holds nothing."""


class CoordinatorRoute:
    """Leases from a coordinator, for texts of one kind."""

    def __init__(
        self,
        client: CoordinatorClient,
        model: str,
        tokenizer_sha256: str,
        features: TextFeatures = TextFeatures(),  # noqa: B008 - frozen
    ) -> None:
        self._client = client
        self._model = model
        self._tokenizer_sha256 = tokenizer_sha256
        self._features = features

    def about(self, features: TextFeatures) -> CoordinatorRoute:
        """Another over the same client."""
        return CoordinatorRoute(self._client, self._model, self._tokenizer_sha256, features)

    def prior(self, features: TextFeatures) -> FleetPrior:
        """As the newest leases said."""
        return self._client.priors.of(self._model, features)

    async def lease(self, session: str, avoid: tuple[str, ...]) -> Lease:
        """As the coordinator decides; where it relays, the address is its own."""
        lease = await self._client.open_lease(
            LeaseRequest(
                model=self._model,
                session=session,
                tokenizer_sha256=self._tokenizer_sha256,
                avoid=avoid,
                prompt_class=self._features.prompt_class,
                link_class=self._features.link_class,
            )
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
