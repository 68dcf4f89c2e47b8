"""Routes to verifiers: through a coordinator's leases, or to addresses known beforehand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from outrider.edge.features import TextFeatures
from outrider.edge.link.control_client import CoordinatorClient
from outrider.edge.link.security import Security
from outrider.edge.prefixes import prefix_key, text_prefixes
from outrider.edge.warm_start import FleetPrior
from outrider.proto.errors import OutriderError
from outrider.proto.types import Lease, LeaseRequest, SessionReport


class Route(ABC):
    """A way to find a verifier, again and again if need be; without a coordinator unless a subclass has one."""

    @abstractmethod
    async def lease(
        self,
        session: str,
        avoid: tuple[str, ...],
        transcript: Sequence[int] = (),
        precision: str = "",
        epoch: int = 0,
        context_length: int = 0,
        *,
        suspected: bool = False,
    ) -> Lease:
        """Return permission to decode.

        Args:
            session: id of the session.
            avoid: verifiers just lost, the newest last.
            transcript: [n] tokens of the text so far, prompt included.
            precision: what the verifier should round by, which is checked when it answers; empty: anything.
            epoch: streams that the session had before.
            context_length: positions that the verifier should have, which is checked when it answers; 0: any number.
            suspected: whether the last of `avoid` is silent, and is left only where there is another.
        """

    def expected(self) -> Lease | None:
        """Return a lease like the next text's, without a call, so that its connection can be made; None: unknown."""
        return None

    def about(self, features: TextFeatures, isolation: bytes = b"") -> Route:  # noqa: ARG002 - no coordinator
        """Return a route for one text of this kind, whose leases bring priors for such texts.

        Its beginning is recognised only among texts of the same `isolation`, which is that of its Open.
        """
        return self

    def prior(self, features: TextFeatures) -> FleetPrior:  # noqa: ARG002 - no coordinator, no fleet
        """Return what is known of drafters in such texts, without a call."""
        return {}

    async def report(self, report: SessionReport) -> None:  # noqa: B027 - not every route has somewhere to report to
        """Report a finished session to a coordinator."""

    async def give_back(self, session: str) -> None:  # noqa: B027 - as above
        """Give up the place of a session for which no verifier was asked."""


class DirectRoute(Route):
    """Verifiers at fixed addresses that ask for no lease; a lost one is followed by the next in the list."""

    def __init__(
        self, addresses: tuple[str, ...], model: str, tokenizer_sha256: str, security: Security | None = None
    ) -> None:
        self._security = security or Security()
        self._addresses = addresses
        self._model = model
        self._tokenizer_sha256 = tokenizer_sha256

    async def lease(  # the protocol's
        self,
        session: str,  # noqa: ARG002
        avoid: tuple[str, ...],
        transcript: Sequence[int] = (),  # noqa: ARG002
        precision: str = "",  # noqa: ARG002
        epoch: int = 0,  # noqa: ARG002
        context_length: int = 0,  # noqa: ARG002
        *,
        suspected: bool = False,  # noqa: ARG002
    ) -> Lease:
        """Return the first address that is not to be avoided, or else the one lost longest ago."""
        lost = {address: number for number, address in enumerate(avoid, 1)}
        return self._lease_of(min(self._addresses, key=lambda address: lost.get(address, 0)))

    def expected(self) -> Lease:
        """Return the first address."""
        return self._lease_of(self._addresses[0])

    def _lease_of(self, address: str) -> Lease:
        return Lease(
            token=b"",
            verifier=address,
            address=address,
            expires_in_s=float("inf"),
            model=self._model,
            tokenizer_sha256=self._tokenizer_sha256,
            tls=self._security.tls is not None,
            tls_name=self._security.server_name,
        )


class CoordinatorRoute(Route):
    """Leases from a coordinator, for texts of one kind."""

    def __init__(
        self,
        client: CoordinatorClient,
        model: str,
        tokenizer_sha256: str,
        features: TextFeatures = TextFeatures(),  # noqa: B008 - frozen
        isolation: bytes = b"",
    ) -> None:
        self._client = client
        self._model = model
        self._tokenizer_sha256 = tokenizer_sha256
        self._features = features
        self._prefix_key = prefix_key(client.security.api_key, model, tokenizer_sha256, isolation)

    def about(self, features: TextFeatures, isolation: bytes = b"") -> CoordinatorRoute:
        """Return another route over the same client."""
        return CoordinatorRoute(self._client, self._model, self._tokenizer_sha256, features, isolation)

    def prior(self, features: TextFeatures) -> FleetPrior:
        """Return the prior of the newest leases."""
        return self._client.priors.of(self._model, features)

    async def lease(
        self,
        session: str,
        avoid: tuple[str, ...],
        transcript: Sequence[int] = (),
        precision: str = "",
        epoch: int = 0,
        context_length: int = 0,
        *,
        suspected: bool = False,
    ) -> Lease:
        """Ask the coordinator for a lease; where it relays, the address is its own."""
        lease = await self._client.open_lease(
            LeaseRequest(
                model=self._model,
                session=session,
                tokenizer_sha256=self._tokenizer_sha256,
                avoid=avoid,
                prompt_class=self._features.prompt_class,
                link_class=self._features.link_class,
                prefixes=text_prefixes(transcript, self._prefix_key),
                precision=precision,
                epoch=epoch,
                context_length=context_length,
                suspected=suspected,
            )
        )
        return self._joined(lease)

    def expected(self) -> Lease | None:
        """Return the newest lease of any text."""
        newest = self._client.newest_lease
        return None if newest is None else self._joined(newest)

    def _joined(self, lease: Lease) -> Lease:
        """Return the lease with the address to connect to."""
        if not lease.relayed:
            return lease
        security = self._client.security
        return replace(lease, address=self._client.address, tls=security.tls is not None, tls_name=security.server_name)

    async def report(self, report: SessionReport) -> None:
        """Report to the coordinator, and ignore errors, since no text depends on it."""
        try:
            await self._client.report(report)
        except OutriderError:
            return

    async def give_back(self, session: str) -> None:
        """Report that no verifier took the session."""
        await self.report(SessionReport(session=session, model=self._model, verifier=""))
