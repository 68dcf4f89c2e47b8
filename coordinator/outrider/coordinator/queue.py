"""The line of texts that wait for a place at a verifier: in order of arrival, and fair between API keys. No I/O.

An edge that is refused for want of a place gets a ticket by its session, and is told when to ask again. A freed place
is kept for the ticket whose turn it is as long as its edge may still come in time, and nobody else gets it. The turn is
that of the key with fewest places, and within a key that of the oldest ticket. So no text is passed by a later one that
could take the same places, and no key gets another place while one with fewer waits.

A ticket counts from its edge's newest question until `GRACE_S` after the edge should have asked again; its number stays
`FORGET_S` after that question, for an edge that comes late. An end that is reported takes it away at once.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass

RETRY_WHEN_FULL_S = 2.0  # at most, from one question of a waiting edge to the next
SOON_S = 0.1  # at least
IDLE_SHARE = 0.03  # of a place's time that may pass until the edge whose turn it is asks again
QUESTIONS_PER_S = 50.0  # that all waiting edges may ask, wherever their turns are: many places may be free at once
GRACE_S = 1.0
FORGET_S = 2 * RETRY_WHEN_FULL_S
RATE_OVER_S = 10.0
MAX_TICKETS = 4096
MAX_TICKETS_OF_KEY = 1024  # where there are keys

Fits = Callable[[Hashable], Collection[str]]


@dataclass(slots=True)
class PlaceTicket:
    """A text that waits.

    Attributes:
        key: name of its API key; empty: none.
        session: its session.
        number: order of arrival.
        wants: what a verifier must have to take it.
        has_place: whether its key has counted it already, so that the key's limit does not hold it back.
        asked_s: newest question, in seconds.
        due_s: time by which the next one should come, in seconds.
    """

    key: str
    session: str
    number: int
    wants: Hashable
    has_place: bool
    asked_s: float
    due_s: float

    def counts(self, now_s: float) -> bool:
        """Return whether a place is kept for it."""
        return now_s <= self.due_s + GRACE_S


class PlaceQueue:
    """Tickets of waiting texts; times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._lines: dict[str, dict[str, PlaceTicket]] = {}  # by key and session, in order of their numbers
        self._numbers = itertools.count()
        self._served: deque[float] = deque(maxlen=MAX_TICKETS)
        self._swept_s = -math.inf

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def ask(
        self, key: str, session: str, wants: Hashable, now_s: float, *, has_place: bool, number: int | None
    ) -> PlaceTicket:
        """Return the ticket of a text whose edge asks, the one that it has or a new one.

        Args:
            key: name of its API key; empty: none.
            session: its session.
            wants: see `PlaceTicket`.
            now_s: present time.
            has_place: see `PlaceTicket`.
            number: that of its former ticket, with whose place nothing came about; None: it had none.
        """
        self._sweep(now_s)
        line = self._lines.get(key, {})
        ticket = line.get(session)
        if ticket is None:
            number = next(self._numbers) if number is None else number
            ticket = PlaceTicket(key, session, number, wants, has_place, now_s, now_s)
            if len(line) < (MAX_TICKETS_OF_KEY if key else MAX_TICKETS) and len(self) < MAX_TICKETS:
                self._insert(ticket)
        ticket.wants, ticket.has_place = wants, has_place
        ticket.asked_s = ticket.due_s = now_s
        return ticket

    def open_to(
        self,
        ticket: PlaceTicket,
        free: Mapping[str, int],
        held: Mapping[str, int],
        fits: Fits,
        room: Callable[[str], float],
        most: float,
        now_s: float,
    ) -> frozenset[str]:
        """Return the verifiers with a free place that no text before this one may take; none: it waits.

        Args:
            ticket: the text's.
            free: free places, by verifier.
            held: places that keys have, by name.
            fits: verifiers that have what a ticket wants.
            room: places that a key may have beside those it has.
            most: free places of all verifiers that may be given.
            now_s: present time.
        """
        left, has = Counter(free), Counter(held)
        more: dict[str, float] = {}
        kinds = {each.wants for line in self._lines.values() for each in line.values()} if len(free) > 1 else set()
        wanted = Counter(name for wants in kinds for name in fits(wants))  # by so many kinds of texts
        lines = {key: self._waiting(line, now_s) for key, line in self._lines.items()}
        if ticket.session not in self._lines.get(ticket.key, ()):  # there was no room for it in the line
            lines[ticket.key] = itertools.chain(lines.get(ticket.key, ()), [ticket])
        heads = {key: head for key, line in lines.items() if (head := next(line, None)) is not None}
        while heads and most > 0 and left.total():
            key = min(heads, key=lambda key: (has[key], heads[key].number))
            head = heads[key]
            more.setdefault(key, room(key))
            open_to = frozenset(name for name in fits(head.wants) if left[name] > 0)
            if not head.has_place and more[key] <= 0:
                open_to = frozenset()
            if head.session == ticket.session and key == ticket.key:
                return open_to
            if open_to:
                left[min(open_to, key=lambda name: (wanted[name], -left[name], name))] -= 1
                has[key] += 1
                most -= 1
                more[key] -= not head.has_place
            following = next(lines[key], None)
            if following is None:
                del heads[key]
            else:
                heads[key] = following
        return frozenset()

    def wait(self, ticket: PlaceTicket, places: float, now_s: float) -> float:
        """Keep the ticket's place in the line, and return in how many seconds its edge should ask again.

        That is sooner the nearer its turn is, by the places that were given lately, and the fewer texts wait.

        Args:
            ticket: the text's.
            places: places that there are, taken ones included; infinite: none is known.
            now_s: present time.
        """
        line = self._lines.get(ticket.key, {})
        ahead = len(self._lines) * sum(other.number < ticket.number for other in line.values())
        retry_s = RETRY_WHEN_FULL_S
        while self._served and self._served[0] <= now_s - RATE_OVER_S:
            self._served.popleft()
        if self._served:
            turn_s = RATE_OVER_S / len(self._served)  # from one place that is given to the next
            retry_s = min(max(IDLE_SHARE * places, ahead / 2) * turn_s, RETRY_WHEN_FULL_S)
        retry_s = max(min(retry_s, len(self) / QUESTIONS_PER_S), SOON_S)
        ticket.due_s = now_s + retry_s
        return retry_s

    def serve(self, key: str, session: str, now_s: float) -> int | None:
        """Take away the ticket of a text that got a place, and return its number, if it had one."""
        self._served.append(now_s)
        return self.leave(key, session)

    def leave(self, key: str, session: str) -> int | None:
        """Take away the ticket of a text that waits no more, and return its number, if it had one."""
        line = self._lines.get(key, {})
        ticket = line.pop(session, None)
        if not line:
            self._lines.pop(key, None)
        return ticket.number if ticket is not None else None

    def _insert(self, ticket: PlaceTicket) -> None:
        line = self._lines.setdefault(ticket.key, {})
        later = [other for other in line.values() if other.number > ticket.number]
        for other in later:
            del line[other.session]
        line.update({each.session: each for each in (ticket, *later)})

    @staticmethod
    def _waiting(line: Mapping[str, PlaceTicket], now_s: float) -> Iterator[PlaceTicket]:
        return (ticket for ticket in line.values() if ticket.counts(now_s))

    def _sweep(self, now_s: float) -> None:
        """Drop the tickets whose edges have not asked for long, once in a while."""
        if now_s < self._swept_s + SOON_S:
            return
        self._swept_s = now_s
        gone = [t for line in self._lines.values() for t in line.values() if now_s > t.asked_s + FORGET_S]
        for ticket in gone:
            self.leave(ticket.key, ticket.session)
