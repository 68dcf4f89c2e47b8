"""The line of texts that wait for a slot at a verifier: in order of arrival, and fair between API keys. No I/O.

An edge that is refused for want of a slot gets a ticket by its session, and is told when to ask again. A freed slot
is kept for the ticket whose turn it is as long as its edge may still come in time, and nobody else gets it. Texts that
had a slot and lost it come first. Then the turn is that of the key with fewest slots, and within a key that
of the oldest ticket. So no running text yields to a newcomer, no text is passed by a later one that could take the same
slots, and no key gets another slot while one with fewer waits.

Texts stand in order of worth by the seconds of `AHEAD_S`: one counts as if it had come so much earlier or later than it
did. So those of a class keep their order, and nobody is passed by texts that come later than the difference.

Edges say when texts end, and may lie. So the texts of a key that lost their slots come before other keys' newcomers
only until the key has as many slots as lately: a liar has no more of it than of texts that do not end.

A ticket counts from its edge's newest question until `GRACE_S` after the edge should have asked again; its number stays
`FORGET_S` after that question, for an edge that comes late, and that of a text with a lease until its end is reported,
which takes a ticket away at once.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from outrider.proto.types import ServiceClass, ServiceGoal, class_of

RETRY_WHEN_FULL_S = 2.0  # at most, from one question of a waiting edge to the next
SOON_S = 0.1  # at least
INQUIRIES_PER_S = 100.0  # of edges that only look whether the cloud is there
LOOK_EVERY_S = 2.0  # their own pace
LOOK_WITHIN_S = 120.0  # the longest pause of these
IDLE_SHARE = 0.03  # of a slot's time that may pass until the edge whose turn it is asks again
QUESTIONS_PER_S = 50.0  # that all waiting edges may ask, wherever their turns are: many slots may be free at once
GRACE_S = 1.0
FORGET_S = 2 * RETRY_WHEN_FULL_S
RATE_OVER_S = 10.0
MAX_TICKETS = 4096
MAX_TICKETS_OF_KEY = 1024  # where there are keys
AHEAD_S = {ServiceClass.FIGURES: 10.0, ServiceClass.INTERACTIVE: 0.0, ServiceClass.BATCH: -30.0}
MAX_NUMBERS = 8192  # of texts with leases, since some ends are never reported

Fits = Callable[[Hashable], Collection[str]]

Place = tuple[float, int]
"""When a text came, by its worth, and its number: its place in the order of arrival."""

_NONE: frozenset[str] = frozenset()


@dataclass(slots=True)
class SlotTicket:
    """A text that waits.

    Attributes:
        key: name of its API key; empty: none.
        session: its session.
        turn: whether it is a newcomer, and its place in the order of arrival.
        wants: what a verifier must have to take it.
        has_slot: whether its key has counted it already, so that the key's limit does not hold it back.
        asked_s: newest question, in seconds.
        due_s: time by which the next one should come, in seconds.
    """

    key: str
    session: str
    turn: tuple[bool, Place]
    wants: Hashable
    has_slot: bool
    asked_s: float
    due_s: float

    def counts(self, now_s: float) -> bool:
        """Return whether a slot is kept for it."""
        return now_s <= self.due_s + GRACE_S


@dataclass(frozen=True, slots=True)
class KeyShare:
    """The slots that an API key has and had, by which its turn in the line is decided.

    Attributes:
        now: slots that it has.
        lately: most slots that it had at once in the last minute or two; infinite: not known.
        listed: its sessions that verifiers report as running; one of these that asks is about to leave its slot.
    """

    now: int = 0
    lately: float = math.inf
    listed: Collection[str] = ()


class _FreeSlots:
    """The free slots that are left once the texts before one have taken theirs."""

    def __init__(self, free: Mapping[str, int], fits: Fits, room: Callable[[str], float]) -> None:
        self._left = {name: slots for name, slots in free.items() if slots > 0}
        self._fits = fits
        self._room = room
        self._more: dict[str, float] = {}  # that a key may have
        self._open_to: dict[Hashable, frozenset[str]] = {}  # by what a text wants

    def open_to(self, ticket: SlotTicket) -> frozenset[str]:
        """Return the verifiers with a slot that a text may have."""
        if not ticket.has_slot:
            if ticket.key not in self._more:
                self._more[ticket.key] = self._room(ticket.key)
            if self._more[ticket.key] <= 0:
                return _NONE
        open_to = self._open_to.get(ticket.wants)
        if open_to is None:
            open_to = self._open_to[ticket.wants] = _NONE.union(self._left).intersection(self._fits(ticket.wants))
        return open_to

    def take(self, ticket: SlotTicket, wanted: Mapping[str, int]) -> None:
        """Give a text the slot that fewest kinds of texts want."""
        name = min(self.open_to(ticket), key=lambda name: (wanted[name], -self._left[name], name))
        self._left[name] -= 1
        if not self._left[name]:
            del self._left[name]
            self._open_to.clear()
        if not ticket.has_slot:
            self._more[ticket.key] -= 1


class InquiryPace:
    """The times at which edges that only look should look again: at most `INQUIRIES_PER_S`, however many edges live.

    Each gets the next free moment after those of the edges before it, so that edges which came back together do not
    come together again. Times are seconds of a monotonic clock.
    """

    def __init__(self) -> None:
        self._taken_s = -math.inf

    def again_in(self, now_s: float) -> float:
        """Return the seconds after which an edge that looks now should look again; 0: at its own pace."""
        due_s = max(self._taken_s + 1 / INQUIRIES_PER_S, now_s + LOOK_EVERY_S)
        self._taken_s = min(due_s, now_s + LOOK_WITHIN_S)
        return self._taken_s - now_s if self._taken_s > now_s + LOOK_EVERY_S else 0.0


class SlotQueue:
    """Tickets of waiting texts; times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._lines: dict[str, dict[str, SlotTicket]] = {}  # by key and session, in order of their turns
        self._numbers = itertools.count()
        self._leased: OrderedDict[tuple[str, str], Place] = OrderedDict()  # by key and session, newest lease last
        self._served: deque[float] = deque(maxlen=MAX_TICKETS)
        self._swept_s = -math.inf

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def ask(
        self,
        key: str,
        session: str,
        wants: Hashable,
        now_s: float,
        *,
        has_slot: bool = False,
        has_run: bool = False,
        service: ServiceGoal | None = None,
    ) -> SlotTicket:
        """Return the ticket of a text whose edge asks, the one that it has or a new one; see `SlotTicket`.

        `has_run` says that it is no newcomer although this queue knows of no lease; `service` is what it asks for.
        """
        self._sweep(now_s)
        line = self._lines.get(key, {})
        ticket = line.get(session)
        if ticket is None:
            place = self._leased.get((key, session))
            newcomer = place is None and not has_run
            turn = newcomer, self._place(now_s, service) if place is None else place
            ticket = SlotTicket(key, session, turn, wants, has_slot, now_s, now_s)
            if not newcomer or (len(line) < (MAX_TICKETS_OF_KEY if key else MAX_TICKETS) and len(self) < MAX_TICKETS):
                self._insert(ticket)
        elif has_run and ticket.turn[0]:  # which was not known when it came
            del line[session]
            ticket.turn = False, ticket.turn[1]
            self._insert(ticket)
        ticket.wants, ticket.has_slot = wants, has_slot
        ticket.asked_s = ticket.due_s = now_s
        return ticket

    def open_to(
        self,
        ticket: SlotTicket,
        free: Mapping[str, int],
        share_of: Callable[[str], KeyShare],
        fits: Fits,
        room: Callable[[str], float],
        most: float,
        now_s: float,
    ) -> frozenset[str]:
        """Return the verifiers with a free slot that no text before this one may take; none: it waits.

        Args:
            ticket: the text's.
            free: free slots of verifiers that take texts, by name.
            share_of: what a key has, by its name.
            fits: verifiers that have what a ticket wants.
            room: slots that a key may have beside those it has.
            most: slots that may be given in all.
            now_s: present time.
        """
        left = _FreeSlots(free, fits, room)
        if not left.open_to(ticket):
            return _NONE
        tickets: dict[str, Iterable[SlotTicket]] = {key: line.values() for key, line in self._lines.items()}
        if ticket.session not in self._lines.get(ticket.key, ()):  # there was no room for it in the line
            tickets[ticket.key] = itertools.chain(tickets.get(ticket.key, ()), [ticket])
        lines = {key: self._waiting(line, left, now_s) for key, line in tickets.items()}
        shares = {key: share_of(key) for key in lines}
        has = {key: share.now for key, share in shares.items()}
        turns: list[tuple[bool, int, Place, SlotTicket]] = []  # of each key the next, as a heap

        def look_at_next(key: str) -> None:
            head = next(lines[key], None)
            if head is not None:
                (newcomer, place), share = head.turn, shares[key]
                yields = newcomer or has[key] - (head.session in share.listed) >= share.lately
                heapq.heappush(turns, (yields, has[key], place, head))

        for key in lines:
            look_at_next(key)
        wanted: Counter[str] | None = None
        while turns and most > 0 and left.open_to(ticket):
            *_, head = heapq.heappop(turns)
            open_to = left.open_to(head)
            if head is ticket:
                return open_to
            if open_to:
                if wanted is None:
                    kinds = {each.wants for line in self._lines.values() for each in line.values()}
                    wanted = Counter(name for wants in kinds for name in fits(wants))  # by so many kinds of texts
                left.take(head, wanted)
                has[head.key] += head.session not in shares[head.key].listed
                most -= 1
            look_at_next(head.key)
        return _NONE

    def wait(self, ticket: SlotTicket, slots: float, now_s: float) -> float:
        """Keep the ticket's turn in the line, and return in how many seconds its edge should ask again.

        That is sooner the nearer its turn is, by the slots that were given lately, and the fewer texts wait.

        `slots` counts those that there are, taken ones included; infinite: none is known.
        """
        retry_s = RETRY_WHEN_FULL_S
        while self._served and self._served[0] <= now_s - RATE_OVER_S:
            self._served.popleft()
        if self._served:
            line = self._lines.get(ticket.key, {})
            before = next((n for n, session in enumerate(line) if session == ticket.session), len(line))
            ahead = len(self._lines) * before
            turn_s = RATE_OVER_S / len(self._served)  # from one slot that is given to the next
            retry_s = min(max(IDLE_SHARE * slots, ahead / 2) * turn_s, RETRY_WHEN_FULL_S)
        retry_s = max(min(retry_s, len(self) / QUESTIONS_PER_S), SOON_S)
        ticket.due_s = now_s + retry_s
        return retry_s

    def serve(self, key: str, session: str, now_s: float) -> None:
        """Take away the ticket of a text that gets a slot, and keep its number until it leaves."""
        self._served.append(now_s)
        ticket = self.withdraw(key, session)
        self._leased.setdefault((key, session), ticket.turn[1] if ticket is not None else self._place(now_s, None))
        self._leased.move_to_end((key, session))
        if len(self._leased) > MAX_NUMBERS:
            self._leased.popitem(last=False)

    def withdraw(self, key: str, session: str) -> SlotTicket | None:
        """Take away the ticket of a text that does not wait now, and return it, if it had one."""
        line = self._lines.get(key, {})
        ticket = line.pop(session, None)
        if not line:
            self._lines.pop(key, None)
        return ticket

    def leave(self, key: str, session: str) -> None:
        self.withdraw(key, session)
        self._leased.pop((key, session), None)

    def _place(self, now_s: float, service: ServiceGoal | None) -> Place:
        return now_s - AHEAD_S[class_of(service)], next(self._numbers)

    def _insert(self, ticket: SlotTicket) -> None:
        line = self._lines.setdefault(ticket.key, {})
        later = list(itertools.takewhile(lambda other: other.turn > ticket.turn, reversed(line.values())))
        for other in later:
            del line[other.session]
        line.update({each.session: each for each in (ticket, *reversed(later))})

    @staticmethod
    def _waiting(line: Iterable[SlotTicket], left: _FreeSlots, now_s: float) -> Iterator[SlotTicket]:
        """Return the tickets of a key, in order, that may have one of the slots left when they are reached."""
        return (ticket for ticket in line if left.open_to(ticket) and ticket.counts(now_s))

    def _sweep(self, now_s: float) -> None:
        """Drop the tickets whose edges have not asked for long, once in a while."""
        if now_s < self._swept_s + SOON_S:
            return
        self._swept_s = now_s
        gone = [t for line in self._lines.values() for t in line.values() if now_s > t.asked_s + FORGET_S]
        for ticket in gone:
            self.withdraw(ticket.key, ticket.session)
