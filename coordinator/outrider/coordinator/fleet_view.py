"""The fleet as it was at the last poll, with what was leased since, and the choice of verifiers from it: no I/O."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from outrider.coordinator.cluster import VerifierInfo, VerifierState
from outrider.coordinator.placement import place
from outrider.coordinator.prefixes import PrefixMemory
from outrider.proto.errors import NotFound, ResourceExhausted, Unavailable
from outrider.proto.types import LeaseRequest


class FleetView:
    """A coordinator's view of its verifiers; times are seconds of a monotonic clock.

    Attributes:
        known: verifiers at the last poll.
        granted: time and verifier of the leases that may not be in a report yet.
    """

    def __init__(self, poll_s: float) -> None:
        """View a fleet that is polled every `poll_s` seconds."""
        self.known: tuple[VerifierInfo, ...] = ()
        self.granted: deque[tuple[float, str]] = deque()
        self._poll_s = poll_s
        self._draining: Counter[str] = Counter()
        self._prefixes = PrefixMemory()

    @property
    def verifiers(self) -> tuple[VerifierInfo, ...]:
        """Verifiers at the last poll, with those marked that are being drained."""
        return tuple(
            replace(v, state=VerifierState.DRAINING) if self._draining[v.name] and v.state is VerifierState.READY else v
            for v in self.known
        )

    @contextmanager
    def draining(self, name: str) -> Iterator[None]:
        """Mark a verifier as draining, until its new state is known."""
        self._draining[name] += 1
        try:
            yield
        finally:
            self._draining[name] -= 1

    def welcome(self, request: LeaseRequest, tenant: str, now_s: float) -> VerifierInfo | None:
        """Return the verifier for a session where the view serves; None: poll again first.

        The view may be one poll old, so that is due before a refusal, or an offer of what the edge has just lost.
        """
        try:
            chosen = self.choose(request, tenant, now_s)
        except (Unavailable, ResourceExhausted, NotFound):
            return None
        return None if chosen.name in request.avoid else chosen

    def choose(self, request: LeaseRequest, tenant: str, now_s: float) -> VerifierInfo:
        """Return the most suitable verifier for a session of key `tenant`; raises like `place`."""
        return place(
            self.verifiers,
            request.model,
            request.tokenizer_sha256,
            request.avoid,
            self._pending(now_s),
            self.known_prefixes(request, tenant),
            request.precision,
        )

    def known_prefixes(self, request: LeaseRequest, tenant: str) -> dict[str, int]:
        """Return how many beginnings of the text each verifier has taken before."""
        return self._prefixes.find(tenant, request.prefixes, self.known)

    def grant(self, request: LeaseRequest, tenant: str, verifier: VerifierInfo, now_s: float) -> None:
        """Note that the session has a lease for `verifier`."""
        if request.prefixes:
            self._prefixes.note(tenant, request.prefixes, verifier)
        self.granted.append((now_s, verifier.name))

    def _pending(self, now_s: float) -> Counter[str]:
        # A lease becomes a session after a round trip, and is in the verifier's report one poll later.
        while self.granted and self.granted[0][0] < now_s - 2 * self._poll_s:
            self.granted.popleft()
        return Counter(name for _, name in self.granted)
