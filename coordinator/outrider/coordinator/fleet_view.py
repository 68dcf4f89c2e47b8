"""The fleet as it was at the last poll, with what was leased since, and the choice of verifiers from it: no I/O."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

from outrider.coordinator.cluster import VerifierInfo, VerifierState
from outrider.coordinator.placement import place, verifiers_for
from outrider.coordinator.prefixes import PrefixMemory
from outrider.coordinator.queue import PlaceQueue, PlaceTicket
from outrider.proto.errors import NotFound, OutriderError, ResourceExhausted, Unavailable
from outrider.proto.types import LeaseRequest

_Wants = tuple[str, str, str, int]  # model, tokenizer, precision, context


@dataclass(slots=True)
class LeaseGrant:
    """A lease that may not be in a report yet.

    Attributes:
        ticket: number of the ticket that its text had in the line.
        is_open: whether it may still become a session.
    """

    at_s: float
    verifier: str
    tenant: str
    session: str
    epoch: int
    ticket: int | None
    is_open: bool = True


class FleetView:
    """A coordinator's view of its verifiers; times are seconds of a monotonic clock.

    Attributes:
        granted: leases that may not be in a report yet, the oldest first.
        queue: texts that wait for a place.
    """

    def __init__(self, poll_s: float, most: Callable[[], float] = lambda: math.inf) -> None:
        """View a fleet that is polled every `poll_s` seconds, and may have `most()` more streams in all."""
        self.granted: deque[LeaseGrant] = deque()
        self.queue = PlaceQueue()
        self._known: tuple[VerifierInfo, ...] = ()
        self._poll_s = poll_s
        self._most = most
        self._draining: Counter[str] = Counter()
        self._prefixes = PrefixMemory()

    @property
    def known(self) -> tuple[VerifierInfo, ...]:
        """Verifiers at the last poll."""
        return self._known

    def observe(self, verifiers: tuple[VerifierInfo, ...]) -> None:
        """Take in a poll: leases that verifiers have admitted are sessions now, and those of former starts are void."""
        before = {v.name: v.incarnation for v in self._known}
        self._known = verifiers
        of_name = {v.name: v for v in verifiers}
        for grant in self.granted:
            v = of_name.get(grant.verifier)
            restarted = v is not None and v.incarnation != before.get(v.name, v.incarnation)
            if v is None or restarted or v.admitted.get(grant.session, -1) >= grant.epoch:
                grant.is_open = False

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

    def welcome(
        self,
        request: LeaseRequest,
        tenant: str,
        now_s: float,
        room: Callable[[str], float] = lambda _: math.inf,
        *,
        has_place: bool = False,
    ) -> VerifierInfo | None:
        """Return the verifier for a session where the view serves; None: poll again first.

        The view may be one poll old, so that is due before a refusal, or an offer of what the edge has just lost. The
        arguments are those of `choose`.
        """
        try:
            chosen = self.choose(request, tenant, now_s, room, has_place=has_place)
        except (Unavailable, ResourceExhausted, NotFound):
            return None
        return None if chosen.name in request.avoid else chosen

    def choose(
        self,
        request: LeaseRequest,
        tenant: str,
        now_s: float,
        room: Callable[[str], float] = lambda _: math.inf,
        *,
        has_place: bool = False,
    ) -> VerifierInfo:
        """Return the most suitable verifier for a session; without a place it has a ticket from now on.

        Args:
            request: the edge's question.
            tenant: name of its API key; empty: none.
            now_s: present time.
            room: places that a key, by its name, may have beside those it has.
            has_place: whether the key has counted the session already.

        Raises:
            OutriderError: as `place` does, with the time of the next question where there is no place.
        """
        if request.inquiry:
            return self._place(request, tenant, now_s, self.verifiers)
        number = self._take_back(tenant, request.session)
        contexts = [v.context_length for v in self.known if v.context_length >= request.context_length]
        enough = min(contexts, default=request.context_length)  # so that texts of one kind want the same
        wants = (request.model, request.tokenizer_sha256, request.precision, enough)
        ticket = self.queue.ask(tenant, request.session, wants, now_s, has_place=has_place, number=number)
        try:
            return self._place(request, tenant, now_s, self._with_places_for(ticket, room, now_s))
        except (ResourceExhausted, Unavailable) as error:
            if request.suspected:  # its stream stands, and is left only where there is a place at once
                self.queue.leave(tenant, request.session)
                raise
            places = sum(v.max_sessions for v in self.known if v.name in self._fits(wants)) or math.inf
            retry_s = self.queue.wait(ticket, places, now_s)
            if isinstance(error, ResourceExhausted):
                raise ResourceExhausted(error.message, retry_after_s=retry_s) from error
            raise
        except OutriderError:
            self.queue.leave(tenant, request.session)
            raise

    def leave(self, tenant: str, session: str) -> None:
        """Forget a session that waits no more, or whose lease nobody will use."""
        self.queue.leave(tenant, session)
        self._take_back(tenant, session)

    def known_prefixes(self, request: LeaseRequest, tenant: str) -> dict[str, int]:
        """Return how many beginnings of the text each verifier has taken before."""
        return self._prefixes.find(tenant, request.prefixes, self.known)

    def grant(self, request: LeaseRequest, tenant: str, verifier: VerifierInfo, now_s: float) -> None:
        """Note that the session has a lease for `verifier`."""
        if request.prefixes:
            self._prefixes.note(tenant, request.prefixes, verifier)
        number = self.queue.serve(tenant, request.session, now_s)
        self.granted.append(LeaseGrant(now_s, verifier.name, tenant, request.session, request.epoch, number))

    def _place(
        self, request: LeaseRequest, tenant: str, now_s: float, verifiers: Sequence[VerifierInfo]
    ) -> VerifierInfo:
        self._expire(now_s)
        return place(
            verifiers,
            request.model,
            request.tokenizer_sha256,
            request.avoid,
            Counter(grant.verifier for grant in self.granted),
            self.known_prefixes(request, tenant),
            request.precision,
            request.context_length,
        )

    def _with_places_for(
        self, ticket: PlaceTicket, room: Callable[[str], float], now_s: float
    ) -> tuple[VerifierInfo, ...]:
        """Return the fleet with those verifiers full whose free places are kept for others."""
        self._expire(now_s)
        pending = Counter(grant.verifier for grant in self.granted if grant.is_open)
        free = {v.name: v.max_sessions - v.sessions - (pending[v.name] if v.lists_admitted else 0) for v in self.known}
        free = {name: places for name, places in free.items() if places > 0}
        most = self._most() - pending.total()
        open_to = self.queue.open_to(ticket, free, self._held(), cache(self._fits), room, most, now_s)
        return tuple(v if v.name in open_to else replace(v, sessions=v.max_sessions) for v in self.verifiers)

    def _fits(self, wants: _Wants) -> frozenset[str]:
        """Return the names of the verifiers that are ready and have what a text wants."""
        try:
            serve = verifiers_for(self.verifiers, *wants)
        except OutriderError:
            return frozenset()
        return frozenset(v.name for v in serve if v.state is VerifierState.READY)

    def _held(self) -> Counter[str]:
        """Return the places that keys have, by name, so far as verifiers tell."""
        held = Counter(grant.tenant for grant in self.granted if grant.is_open)
        for verifier in self.known:
            held.update({key: len(texts) for key, texts in verifier.texts_of_keys.items()})
        return held

    def _take_back(self, tenant: str, session: str) -> int | None:
        """Forget the leases of a session that nobody uses; return the number of the ticket of the newest."""
        number = None
        for grant in self.granted:
            if grant.is_open and (grant.tenant, grant.session) == (tenant, session):
                grant.is_open, number = False, grant.ticket
        return number

    def _expire(self, now_s: float) -> None:
        # A lease becomes a session after a round trip, and is in the verifier's report one poll later.
        while self.granted and self.granted[0].at_s < now_s - 2 * self._poll_s:
            self.granted.popleft()
