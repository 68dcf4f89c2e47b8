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
    """A way to find a verifier, again and again if need be."""

    async def lease(self, session: str, avoid: tuple[str, ...]) -> Lease:
        """Return permission to decode; `avoid` names verifiers just lost."""
        ...

    def about(self, features: TextFeatures) -> Route:
        """Return a route for one text of this kind, whose leases bring priors for such texts."""
        ...

    def prior(self, features: TextFeatures) -> FleetPrior:
        """Return the known prior of drafters in such texts without asking anybody."""
        ...

    def report(self, report: SessionReport) -> Coroutine[Any, Any, None]:
        """Report a finished session, if anybody collects reports."""
        ...

    async def close(self) -> None:
        """Release all resources."""
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
        """Return the first address that is not to be avoided, or all in turn."""
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
        """Return this route, since nobody collects features."""
        return self

    def prior(self, features: TextFeatures) -> FleetPrior:  # noqa: ARG002 - the protocol's
        """Return no prior, since there is no fleet."""
        return NOT_KNOWN

    async def report(self, report: SessionReport) -> None:
        """Do nothing, since nobody collects reports."""

    async def close(self) -> None:
        """Do nothing, since it holds nothing."""


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
        """Return another route over the same client."""
        return CoordinatorRoute(self._client, self._model, self._tokenizer_sha256, features)

    def prior(self, features: TextFeatures) -> FleetPrior:
        """Return the prior of the newest leases."""
        return self._client.priors.of(self._model, features)

    async def lease(self, session: str, avoid: tuple[str, ...]) -> Lease:
        """Ask the coordinator for a lease; where it relays, the address is its own."""
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
        """Report to the coordinator, and ignore errors, since no text depends on it."""
        try:
            await self._client.report(report)
        except OutriderError:
            return

    async def close(self) -> None:
        """Do nothing, since the client belongs to its maker."""
