"""Routes to verifiers: through a coordinator's leases, or to addresses known beforehand.

A coordinator recognises texts that begin alike by hashes, to place them where their beginning is cached.

With a lease's request an edge sends a 64-bit hash of the first 16, 22, 32, 45, ... tokens of the text so far: so few
that a long text has some twenty, and so dense that two texts which share n tokens have a hash of 0.7 n of them in
common. All are keyed by the edge's API key, whoever a daemon with keys of its own decodes for, the model and its
tokenizer, so that hashes of two keys have nothing in common, as their KV pages have not. Where no key is asked for, all
edges hash alike.

What this reveals to a coordinator: which texts of one key begin alike, to within these lengths, and by the number of
hashes about how long a text is. No token can be computed from a hash. But whoever has the key, and the coordinator is
shown it with each call, can try a guessed beginning, whose first 16 tokens must be right, the next 6, and so on; a
system prompt that is public is recognised so. The file of keys at a coordinator holds other hashes of them, which do
not help. Against all of it an edge can decode without a coordinator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from outrider.edge.features import FleetPrior, TextFeatures
from outrider.edge.link.control_client import CoordinatorClient
from outrider.edge.link.security import Security
from outrider.proto.errors import OutriderError
from outrider.proto.types import MAX_PREFIXES, Lease, LeaseRequest, SessionReport

PREFIX_LENGTHS = tuple(int(16 * 2 ** (i / 2)) for i in range(MAX_PREFIXES))  # tokens


class Route(ABC):
    """A way to find a verifier, again and again if need be; without a coordinator unless a subclass has one."""

    @abstractmethod
    async def lease(self, request: LeaseRequest, transcript: Sequence[int] = ()) -> Lease:
        """Return permission to decode.

        Args:
            request: what the edge knows; the route adds what it was made for.
            transcript: [n] tokens of the text so far, prompt included.
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
        """Give up the slot of a session for which no verifier was asked."""


class DirectRoute(Route):
    """Verifiers at fixed addresses that ask for no lease; a lost one is followed by the next in the list."""

    def __init__(
        self, addresses: tuple[str, ...], model: str, tokenizer_sha256: str, security: Security | None = None
    ) -> None:
        self._security = security or Security()
        self._addresses = addresses
        self._model = model
        self._tokenizer_sha256 = tokenizer_sha256

    async def lease(self, request: LeaseRequest, transcript: Sequence[int] = ()) -> Lease:  # noqa: ARG002
        """Return the first address that is not to be avoided, or else the one lost longest ago."""
        lost = {address: number for number, address in enumerate(request.avoid, 1)}
        return self._lease_of(min(self._addresses, key=lambda address: lost.get(address, 0)))

    def expected(self) -> Lease:
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
        return CoordinatorRoute(self._client, self._model, self._tokenizer_sha256, features, isolation)

    def prior(self, features: TextFeatures) -> FleetPrior:
        return self._client.priors.of(self._model, features)

    async def lease(self, request: LeaseRequest, transcript: Sequence[int] = ()) -> Lease:
        """Ask the coordinator for a lease; where it relays the streams, the lease has its own address."""
        request = replace(
            request,
            model=self._model,
            tokenizer_sha256=self._tokenizer_sha256,
            prompt_class=self._features.prompt_class,
            link_class=self._features.link_class,
            prefixes=text_prefixes(transcript, self._prefix_key),
        )
        return self._joined(await self._client.open_lease(request))

    def expected(self) -> Lease | None:
        newest = self._client.newest_lease
        return None if newest is None else self._joined(newest)

    def _joined(self, lease: Lease) -> Lease:
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


def prefix_key(api_key: str, model: str, tokenizer_sha256: str, isolation: bytes = b"") -> bytes:
    """Return the key of the hashes, 32 bytes, for texts whose Open has this `isolation`; an API key may be empty."""
    parts = "\0".join((api_key, model, tokenizer_sha256, *([isolation.hex()] if isolation else [])))
    return blake2b(parts.encode(), digest_size=32, person=b"outrider prefix").digest()


def text_prefixes(transcript: Sequence[int], key: bytes) -> tuple[int, ...]:
    """Return the hashes of the beginnings of `transcript` [n] that have one of `PREFIX_LENGTHS`, the shortest first."""
    data = np.asarray(transcript[: PREFIX_LENGTHS[-1]], dtype="<u4").tobytes()
    running = blake2b(digest_size=8, key=key)
    found, done = [], 0
    for length in PREFIX_LENGTHS:
        if length > len(transcript):
            break
        running.update(data[4 * done : 4 * length])
        found.append(int.from_bytes(running.copy().digest(), "little"))
        done = length
    return tuple(found)
