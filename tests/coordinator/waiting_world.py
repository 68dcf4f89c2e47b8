"""A fleet, its coordinator's view and waiting edges on a virtual clock.

Order and shares are checked at every lease, and at every poll that no slot stays free while a text waits for it. Texts
that have begun lose their slots to drains, to the ends of leases and for want of memory, and none of them may fail.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from fake_cluster import TOKENIZER_SHA256, ready

from outrider.coordinator.cluster import VerifierInfo, VerifierState
from outrider.coordinator.fleet_view import FleetView
from outrider.coordinator.queue import GRACE_S, RETRY_WHEN_FULL_S
from outrider.proto.errors import ResourceExhausted, Unavailable
from outrider.proto.lease import text_name
from outrider.proto.types import LeaseRequest

POLL_S = 1.0
REFRESH_GAP_S = 0.1
GIVE_UP_S = 60.0
VERIFIER_RETRY_S = 1.0
DRAIN_S = 2.0
PRECISION = "float32"
# A slot is seen to be free at a poll. Whoever has the turn may be gone, and the next asks a retry later.
MAX_IDLE_S = POLL_S + 2 * RETRY_WHEN_FULL_S + GRACE_S


@dataclass(frozen=True)
class Shape:
    """Shape of a world.

    Attributes:
        slots: sessions that each verifier admits; the last verifier alone has the context that long texts need.
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
        lease_s: time for which a text may go on before it needs another lease.
        preempted: share of the texts that lose their slots halfway.
        drains: times at which the first verifier sends its texts elsewhere; another takes its place `DRAIN_S` later.
    """

    slots: tuple[int, ...] = (4, 4)
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
    lease_s: float = float("inf")
    preempted: float = 0.0
    drains: tuple[float, ...] = ()


class Finding(NamedTuple):
    """A violation: what happened, and the property that it breaks."""

    violated: str
    what: str


@dataclass(eq=False)
class Text:
    """A text from its first question to its end.

    Attributes:
        left_s: time that it needs yet.
        preempt_s: time after which it loses its slot, once.
        leases: streams that it had.
        began: whether a verifier has had it.
        counted: whether the coordinator that runs has given it a lease, and knows of no end.
    """

    name: str
    key: str
    long: bool
    service_s: float
    arrived_s: float
    leaves_at_s: float
    left_s: float
    preempt_s: float
    leases: int = 0
    began: bool = False
    counted: bool = False
    since_s: float = 0.0  # when it began to run where it runs
    known_since_s: float = float("inf")  # to the coordinator that runs
    due_s: float = 0.0  # the time that it was told
    served_s: float | None = None
    failed: bool = False

    @property
    def turn(self) -> tuple[bool, float]:
        """Whether it is a newcomer, and since when it is known."""
        return not (self.began or self.counted), self.known_since_s


@dataclass
class Verifier:
    """A verifier with its sessions."""

    name: str
    slots: int
    context: int
    draining: bool = False
    running: dict[Text, None] = field(default_factory=dict)  # in order, so that a seed decides all
    coming: int = 0  # leased, and not here yet
    idle_since_s: float = float("inf")  # a text waits that could take a slot, and none was given since
    admitted: dict[str, int] = field(default_factory=dict)

    def info(self) -> VerifierInfo:
        texts: dict[str, dict[str, float]] = {}
        for text in self.running:
            if text.key:
                texts.setdefault(text.key, {})[text.name] = 1.0
        return ready(
            self.name,
            state=VerifierState.DRAINING if self.draining else VerifierState.READY,
            precision=PRECISION,
            max_sessions=self.slots,
            sessions=len(self.running),
            admitted=dict(self.admitted),
            context_length=self.context,
            texts_of_keys=texts,
            incarnation="1",
        )


class WaitingWorld:
    """A schedule that a seed decides; `run` it, and look at `found`.

    Attributes:
        texts: all texts.
        found: what should not have happened.
        most_waiting: most texts that waited at once.
        busy_s: slot-seconds that texts took.
    """

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape, self.now = shape, 0.0
        self.found: list[Finding] = []
        self.texts: list[Text] = []
        self.most_waiting = 0
        self.busy_s = 0.0
        self._rng = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        last = len(shape.slots) - 1
        self.verifiers = [Verifier(f"v{i}", n, 128 if i == last else 64) for i, n in enumerate(shape.slots)]
        self._restart()
        self._arrive()
        self._at(POLL_S, self._poll)
        for at_s in shape.restarts:
            self._at(at_s, self._restart)
        for at_s in shape.drains:
            self._at(at_s, self._drain)

    def run(self) -> WaitingWorld:
        while self._events:
            self.now, _, act = heapq.heappop(self._events)
            act()
        assert all(text.left_s <= 0 or text.failed for text in self.texts)
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
        while (at_s := at_s + rng.expovariate(shape.load * sum(shape.slots) / shape.service_s)) < shape.until_s:
            times.append(at_s)
        for number, arrived_s in enumerate(sorted(times)):
            leaves = rng.random() < shape.leaves
            service_s = rng.expovariate(1 / shape.service_s)
            text = Text(
                f"s{number}",
                rng.choices(names, weights)[0],
                rng.random() < shape.long,
                service_s,
                arrived_s,
                arrived_s + rng.uniform(0, 5) if leaves else arrived_s + GIVE_UP_S,
                left_s=service_s,
                preempt_s=service_s / 2 if rng.random() < shape.preempted else float("inf"),
            )
            self.texts.append(text)
            self._at(arrived_s, partial(self._ask, text))

    def _restart(self) -> None:
        """Let another coordinator begin, which knows what verifiers say and nothing else."""
        self.view = FleetView(POLL_S)
        self._refreshed_s = -1.0
        self.waiting: dict[Text, None] = {}  # as the coordinator knows them
        self.leased: dict[Text, tuple[float, str]] = {}  # when and where, as long as it may not be in a report
        for text in self.texts:
            text.known_since_s, text.counted = float("inf"), False
        self._refresh()

    def _drain(self) -> None:
        """Take the first verifier out of service, and another into it."""
        verifier = self.verifiers[0]
        verifier.draining = True
        for text in list(verifier.running):
            self._stop(text, verifier, text.leases)
        self._refresh()

        def replace() -> None:
            verifier.draining = False

        self._after(DRAIN_S, replace)

    def _poll(self) -> None:
        self._refresh()
        self._check_idle()
        if self._events:
            self._after(POLL_S, self._poll)

    def _refresh(self) -> None:
        if self.now - self._refreshed_s >= REFRESH_GAP_S:
            self._refreshed_s = self.now
            infos = tuple(verifier.info() for verifier in self.verifiers)
            self.view.observe(infos, self.now)
            admitted = {(info.name, name, epoch) for info in infos for name, epoch in info.admitted.items()}
            self.leased = {
                t: at
                for t, at in self.leased.items()
                if (at[1], text_name(t.key, t.name), t.leases - 1) not in admitted
            }

    # --- a text ---

    def _request(self, text: Text) -> LeaseRequest:
        return LeaseRequest(
            "tiny",
            text.name,
            TOKENIZER_SHA256,
            precision=PRECISION if text.began else "",
            epoch=text.leases,
            context_length=100 if text.long else 10,
        )

    def _room(self, key: str) -> float:
        limit = dict(self.shape.limits).get(key)
        counted = {text.name for text in self.texts if text.counted and text.key == key}
        return float("inf") if limit is None else limit - len(counted | self._with_slot()[key])

    def _with_slot(self) -> defaultdict[str, set[str]]:
        """Sessions that have a slot of each key as the coordinator can know it."""
        texts = defaultdict(set)
        for text in self._coming():
            texts[text.key].add(text.name)
        for info in self.view.known:
            for key, listed in info.texts_of_keys.items():
                texts[key].update(listed)
        return texts

    def _coming(self) -> dict[Text, str]:
        """Texts with leases that take their slots, and their verifiers."""
        return {text: name for text, (at_s, name) in self.leased.items() if at_s >= self.now - 2 * POLL_S}

    def _ask(self, text: Text) -> None:
        if text.failed:
            return
        self.leased.pop(text, None)
        if self.now >= text.leaves_at_s:
            self._give_up(text)
            return
        if text.known_since_s == float("inf"):
            text.known_since_s = self.now
        request, has_slot = self._request(text), text.counted
        try:
            chosen = self.view.welcome(request, text.key, self.now, self._room, has_slot=has_slot)
            if chosen is None:
                self._refresh()
                chosen = self.view.choose(request, text.key, self.now, self._room, has_slot=has_slot)
        except (ResourceExhausted, Unavailable) as error:
            if not 0 < error.retry_after_s <= RETRY_WHEN_FULL_S:
                self._note("time", f"{text.name} is to ask again after {error.retry_after_s} s")
            self.waiting[text], text.due_s = None, self.now + error.retry_after_s
            self.most_waiting = max(self.most_waiting, len(self.waiting))
            self._after(error.retry_after_s + 2 * self._hop_s(), partial(self._ask, text))
            return
        self.waiting.pop(text, None)
        self._check(text, chosen.name)
        self.view.grant(request, text.key, chosen, self.now)
        text.leases += 1
        self.leased[text] = self.now, chosen.name
        verifier = self.verifiers[int(chosen.name[1:])]
        verifier.idle_since_s = float("inf")
        if not text.began and self._rng.random() < self.shape.unused:
            text.failed = True
            return
        text.counted = True
        verifier.coming += 1
        self._after(2 * self._hop_s(), partial(self._open, text, verifier))

    def _give_up(self, text: Text) -> None:
        text.failed = True
        if text.began:
            self._note("running texts go on", f"{text.name} had {text.service_s - text.left_s:.2f} s of its text")
        if text.began or self._rng.random() < 0.5:
            self.waiting.pop(text, None)
            text.counted = False
            self.view.leave(text.key, text.name)
        else:
            self._at(text.due_s + GRACE_S, partial(self._gone, text))

    def _gone(self, text: Text) -> None:
        """Wait no more for one that left without a word: a slot was kept for it, and the next asks a retry later."""
        self.waiting.pop(text, None)
        for verifier in self.verifiers:
            verifier.idle_since_s = max(verifier.idle_since_s, self.now)

    def _open(self, text: Text, verifier: Verifier) -> None:
        verifier.coming -= 1
        if len(verifier.running) >= verifier.slots or verifier.draining:
            self._after(VERIFIER_RETRY_S, partial(self._ask, text))
            return
        verifier.running[text] = None
        verifier.admitted[text_name(text.key, text.name)] = text.leases - 1
        text.since_s, text.began = self.now, True
        text.served_s = self.now if text.served_s is None else text.served_s
        goes_on_s = min(text.left_s, text.preempt_s, self.shape.lease_s)
        self._after(goes_on_s, partial(self._stop, text, verifier, text.leases))

    def _stop(self, text: Text, verifier: Verifier, leases: int) -> None:
        """End a stream: its text is whole, or looks for another slot."""
        if text not in verifier.running or text.leases != leases:
            return
        del verifier.running[text]
        went_on_s = self.now - text.since_s
        self.busy_s += went_on_s
        text.left_s -= went_on_s
        if text.left_s > 1e-9:
            text.preempt_s = float("inf") if went_on_s >= text.preempt_s - 1e-9 else text.preempt_s - went_on_s
            text.leaves_at_s = self.now + GIVE_UP_S
            self._after(self._hop_s(), partial(self._ask, text))
            return
        text.left_s, text.counted = 0.0, False
        if self._rng.random() >= self.shape.unreported:
            self._after(self._hop_s(), partial(self._leave, text))

    def _leave(self, text: Text) -> None:
        self.leased.pop(text, None)
        self.view.leave(text.key, text.name)

    # --- what must hold ---

    def _note(self, violated: str, what: str) -> None:
        self.found.append(Finding(violated, f"{self.now:.2f} s: {what}"))

    def _check(self, text: Text, verifier: str) -> None:
        """Note whom a lease passes: texts before this one that its slot would have served now."""
        free = Counter({v.name: v.max_sessions - v.sessions for v in self.view.known if v.state is VerifierState.READY})
        free.subtract(self._coming().values())
        after = +free - Counter([verifier])

        def passes(others: list[Text]) -> bool:
            return self._served(others, +free) > self._served(others, after)

        if free[verifier] <= 0 and self.waiting:
            self._note("a lease is a slot", f"{text.name} has one, though others wait")
        waiting = sorted(self.waiting, key=lambda text: text.turn)
        if passes([other for other in waiting if other.key == text.key and other.turn < text.turn]):
            self._note("order", f"{text.name} passes one of its key")
        held = {key: len(texts) for key, texts in self._with_slot().items()}
        newcomer = text.turn[0]
        for key, _ in self.shape.keys:
            room = min(self._room(key), 1e6)
            owed = [other for other in waiting if other.key == key and (other.counted or room > 0)]
            if newcomer and passes([other for other in owed if not other.turn[0]]):
                self._note("running texts first", f"{text.name} passes one of {key}")
            due = max(0, int(min(held.get(text.key, 0) - held.get(key, 0), room)))
            if passes([other for other in owed if other.turn[0] <= newcomer][:due]):
                self._note("shares", f"{text.key} has {held.get(text.key, 0)}, {key} waits with {held.get(key, 0)}")

    def _check_idle(self) -> None:
        """Note a slot that texts which wait, and whose keys may have it, do not get for long."""
        for verifier in self.verifiers:
            could = [t for t in self.waiting if self._room(t.key) > 0 and verifier.context >= (100 if t.long else 10)]
            has_slot = len(verifier.running) + verifier.coming < verifier.slots and not verifier.draining
            verifier.idle_since_s = min(verifier.idle_since_s, self.now) if could and has_slot else float("inf")
            if self.now > verifier.idle_since_s + MAX_IDLE_S:
                self._note("no slot stays free", f"{verifier.name} has one, and {could[0].name} waits for ever")

    def _served(self, texts: list[Text], free: Counter[str]) -> int:
        """Return how many of the texts the free slots can serve at once."""
        long = min(sum(text.long for text in texts), free[self.verifiers[-1].name])
        return long + min(sum(not text.long for text in texts), free.total() - long)


def by_luck(view: FleetView, *_: object) -> tuple[VerifierInfo, ...]:
    """The rule before there was a line: whoever asks first has the slot."""
    return view.verifiers


def in_order(world: WaitingWorld) -> list[float]:
    """Waiting times, sorted, if every freed slot went to the oldest text at once, and nobody gave up."""
    free = [0.0] * sum(world.shape.slots)
    waits = []
    for text in world.texts:
        began = max(text.arrived_s, heapq.heappop(free))
        waits.append(began - text.arrived_s)
        heapq.heappush(free, began + text.service_s)
    return sorted(waits)
