"""A fleet, its coordinator's view and waiting edges on a virtual clock.

Order and shares are checked at every lease, and at every poll that no place stays free while a text waits for it.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from outrider.coordinator.cluster import VerifierInfo
from outrider.coordinator.fleet_view import FleetView
from outrider.coordinator.queue import GRACE_S, RETRY_WHEN_FULL_S
from outrider.coordinator.testing import TOKENIZER_SHA256, ready
from outrider.proto.errors import ResourceExhausted
from outrider.proto.types import LeaseRequest

POLL_S = 1.0
REFRESH_GAP_S = 0.1
GIVE_UP_S = 60.0
VERIFIER_RETRY_S = 1.0
# A place is seen to be free at a poll. Whoever has the turn may be gone, and the next asks a retry later.
MAX_IDLE_S = POLL_S + 2 * RETRY_WHEN_FULL_S + GRACE_S


@dataclass(frozen=True)
class Shape:
    """What a world has.

    Attributes:
        places: sessions that each verifier admits; the last verifier alone has the context that long texts need.
        service_s: mean time of a text.
        load: arrivals, as a share of what can be served.
        until_s: time of the last arrival.
        burst: texts that come in the first second.
        keys: API keys and their weights in the arrivals; the empty name: there are none.
        limits: sessions that a key may have.
        long: share of the texts that need the last verifier.
        leaves: share of the waiting texts that are left, half of them without a word.
        unused: share of the leases that no edge uses.
        unreported: share of the ends that the coordinator is not told.
        restarts: times at which the coordinator forgets everything.
    """

    places: tuple[int, ...] = (4, 4)
    service_s: float = 3.0
    load: float = 1.0
    until_s: float = 60.0
    burst: int = 0
    keys: tuple[tuple[str, float], ...] = (("", 1.0),)
    limits: tuple[tuple[str, int], ...] = ()
    long: float = 0.0
    leaves: float = 0.0
    unused: float = 0.0
    unreported: float = 0.0
    restarts: tuple[float, ...] = ()


@dataclass(eq=False)
class Text:
    """A text from its first question to its end."""

    name: str
    key: str
    long: bool
    service_s: float
    arrived_s: float
    leaves_at_s: float
    known_since_s: float = float("inf")  # to the coordinator that runs
    due_s: float = 0.0  # the time that it was told
    served_s: float | None = None
    failed: bool = False


@dataclass
class Verifier:
    """A verifier with its sessions."""

    name: str
    places: int
    context: int
    running: set[Text] = field(default_factory=set)
    coming: int = 0  # leased, and not here yet
    idle_since_s: float = float("inf")  # a text waits that could take a place, and none was given since
    admitted: dict[str, int] = field(default_factory=dict)

    def info(self) -> VerifierInfo:
        texts: dict[str, dict[str, float]] = {}
        for text in self.running:
            if text.key:
                texts.setdefault(text.key, {})[text.name] = 1.0
        return ready(
            self.name,
            max_sessions=self.places,
            sessions=len(self.running),
            lists_admitted=True,
            admitted=dict(self.admitted),
            context_length=self.context,
            lists_texts=True,
            texts_of_keys=texts,
            incarnation="1",
        )


class WaitingWorld:
    """A schedule that a seed decides; `run` it, and look at `found`.

    Attributes:
        texts: all texts.
        found: what should not have happened.
        most_waiting: most texts that waited at once.
        busy_s: place-seconds that texts took.
    """

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape, self.now = shape, 0.0
        self.found: list[str] = []
        self.texts: list[Text] = []
        self.most_waiting = 0
        self.busy_s = 0.0
        self._rng = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        last = len(shape.places) - 1
        self.verifiers = [Verifier(f"v{i}", n, 128 if i == last else 64) for i, n in enumerate(shape.places)]
        self._restart()
        self._arrive()
        self._at(POLL_S, self._poll)
        for at_s in shape.restarts:
            self._at(at_s, self._restart)

    def run(self) -> WaitingWorld:
        while self._events:
            self.now, _, act = heapq.heappop(self._events)
            act()
        assert all(text.served_s is not None or text.failed for text in self.texts)
        return self

    @property
    def waits(self) -> list[float]:
        """Waiting times of the texts that were served, sorted."""
        return sorted(text.served_s - text.arrived_s for text in self.texts if text.served_s is not None)

    # --- the world ---

    def _at(self, time_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), act))

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self._at(self.now + seconds, act)

    def _hop_s(self) -> float:
        return self._rng.uniform(0.001, 0.03)

    def _arrive(self) -> None:
        shape, rng = self.shape, self._rng
        names, weights = zip(*shape.keys, strict=True)
        times = [rng.uniform(0, 1) for _ in range(shape.burst)]
        at_s = 0.0
        while (at_s := at_s + rng.expovariate(shape.load * sum(shape.places) / shape.service_s)) < shape.until_s:
            times.append(at_s)
        for number, arrived_s in enumerate(sorted(times)):
            leaves = rng.random() < shape.leaves
            text = Text(
                f"s{number}",
                rng.choices(names, weights)[0],
                rng.random() < shape.long,
                rng.expovariate(1 / shape.service_s),
                arrived_s,
                arrived_s + rng.uniform(0, 5) if leaves else arrived_s + GIVE_UP_S,
            )
            self.texts.append(text)
            self._at(arrived_s, partial(self._ask, text))

    def _restart(self) -> None:
        """Let another coordinator begin, which knows what verifiers say and nothing else."""
        self.view = FleetView(POLL_S)
        self._refreshed_s = -1.0
        self.waiting: dict[Text, None] = {}  # as the coordinator knows them
        for text in self.texts:
            text.known_since_s = float("inf")
        self._refresh()

    def _poll(self) -> None:
        self._refresh()
        self._check_idle()
        if self._events:
            self._after(POLL_S, self._poll)

    def _refresh(self) -> None:
        if self.now - self._refreshed_s >= REFRESH_GAP_S:
            self._refreshed_s = self.now
            self.view.observe(tuple(verifier.info() for verifier in self.verifiers))

    # --- a text ---

    def _request(self, text: Text) -> LeaseRequest:
        return LeaseRequest("tiny", text.name, TOKENIZER_SHA256, context_length=100 if text.long else 10)

    def _room(self, key: str) -> float:
        limit = dict(self.shape.limits).get(key)
        return float("inf") if limit is None else limit - self._held()[key]

    def _held(self) -> Counter[str]:
        """Places of keys as the coordinator can know them."""
        held = Counter(grant.tenant for grant in self.view.granted if grant.is_open)
        for info in self.view.known:
            held.update({key: len(texts) for key, texts in info.texts_of_keys.items()})
        return held

    def _ask(self, text: Text) -> None:
        if text.failed:
            return
        if self.now >= text.leaves_at_s:
            text.failed = True
            if self._rng.random() < 0.5:
                self.waiting.pop(text, None)
                self.view.leave(text.key, text.name)
            else:  # a place is kept for it as long as it might still come
                self._at(text.due_s + GRACE_S, lambda: self.waiting.pop(text, None))
            return
        if text.known_since_s == float("inf"):
            text.known_since_s = self.now
        request = self._request(text)
        try:
            chosen = self.view.welcome(request, text.key, self.now, self._room)
            if chosen is None:
                self._refresh()
                chosen = self.view.choose(request, text.key, self.now, self._room)
        except ResourceExhausted as error:
            if not 0 < error.retry_after_s <= RETRY_WHEN_FULL_S:
                self.found.append(f"{text.name} is to ask again after {error.retry_after_s} s")
            self.waiting[text], text.due_s = None, self.now + error.retry_after_s
            self.most_waiting = max(self.most_waiting, len(self.waiting))
            self._after(error.retry_after_s + 2 * self._hop_s(), partial(self._ask, text))
            return
        self.waiting.pop(text, None)
        self._check(text, chosen.name, self._held())
        self.view.grant(request, text.key, chosen, self.now)
        verifier = self.verifiers[int(chosen.name[1:])]
        verifier.idle_since_s = float("inf")
        if self._rng.random() < self.shape.unused:
            text.failed = True
            return
        verifier.coming += 1
        self._after(2 * self._hop_s(), partial(self._open, text, verifier))

    def _open(self, text: Text, verifier: Verifier) -> None:
        verifier.coming -= 1
        if len(verifier.running) >= verifier.places:
            self._after(VERIFIER_RETRY_S, partial(self._ask, text))
            return
        verifier.running.add(text)
        verifier.admitted[text.name] = 0
        text.served_s = self.now
        self.busy_s += text.service_s
        self._after(text.service_s, partial(self._end, text, verifier))

    def _end(self, text: Text, verifier: Verifier) -> None:
        verifier.running.discard(text)
        if self._rng.random() >= self.shape.unreported:
            self._after(self._hop_s(), partial(self.view.leave, text.key, text.name))

    # --- what must hold ---

    def _check(self, text: Text, verifier: str, held: Counter[str]) -> None:
        """Note whom a lease passes: texts before this one that its place would have served now."""
        free = Counter({v.name: v.max_sessions - v.sessions for v in self.view.known})
        free.subtract(grant.verifier for grant in self.view.granted if grant.is_open)
        after = free - Counter([verifier])
        if free[verifier] <= 0 and self.waiting:
            self.found.append(f"{self.now:.2f} s: {text.name} has a lease for no place, though others wait")
        earlier = [
            other for other in self.waiting if other.key == text.key and other.known_since_s < text.known_since_s
        ]
        if self._served(earlier, +free) > self._served(earlier, after):
            self.found.append(f"{self.now:.2f} s: {text.name} passes one of {[other.name for other in earlier]}")
        for key, _ in self.shape.keys:
            due = min(held[text.key] - held[key], self._room(key))
            owed = [other for other in self.waiting if other.key == key][: max(0, int(min(due, 1e6)))]
            if self._served(owed, +free) > self._served(owed, after):
                self.found.append(f"{self.now:.2f} s: {text.key} has {held[text.key]}, {key} waits with {held[key]}")

    def _check_idle(self) -> None:
        """Note a place that texts which wait, and whose keys may have it, do not get for long."""
        for verifier in self.verifiers:
            could = [t for t in self.waiting if self._room(t.key) > 0 and verifier.context >= (100 if t.long else 10)]
            is_idle = could and len(verifier.running) + verifier.coming < verifier.places
            verifier.idle_since_s = min(verifier.idle_since_s, self.now) if is_idle else float("inf")
            if self.now > verifier.idle_since_s + MAX_IDLE_S:
                self.found.append(f"{self.now:.2f} s: {verifier.name} has a place, and {could[0].name} waits for ever")

    def _served(self, texts: list[Text], free: Counter[str]) -> int:
        """Return how many of the texts the free places can serve at once."""
        long = min(sum(text.long for text in texts), free[self.verifiers[-1].name])
        return long + min(sum(not text.long for text in texts), free.total() - long)


def by_luck(view: FleetView, *_: object) -> tuple[VerifierInfo, ...]:
    """The rule before there was a line: whoever asks first has the place."""
    return view.verifiers


def in_order(world: WaitingWorld) -> list[float]:
    """Waiting times, sorted, if every freed place went to the oldest text at once, and nobody gave up."""
    free = [0.0] * sum(world.shape.places)
    waits = []
    for text in world.texts:
        began = max(text.arrived_s, heapq.heappop(free))
        waits.append(began - text.arrived_s)
        heapq.heappush(free, began + text.service_s)
    return sorted(waits)
