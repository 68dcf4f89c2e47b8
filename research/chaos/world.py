"""A world that all parts of a schedule share: one clock, one source of chance, targets, a trace, and the network."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import add
from typing import TypeVar

import numpy as np

from outrider.proto.noise import gumbel
from outrider.proto.types import CommittedToken, DraftToken, FinishReason, Sampling
from research.simulator.clock import VirtualClock

MODEL, TOKENIZER = "toy", "ab" * 32
SECRET = b"a secret of sixteen bytes or more"  # of all leases
VOCAB, EOS, CONTEXT = 8, 0, 96
_ROWS = 1 << 10
_EOS_EVERY = 24  # rows of which one favours EOS
KEEPALIVE_S = (20.0, 30.0)  # the silence of a connection after which an end of it gives up, as gRPC's options have it
EXACT_S = 1e-6  # to which a clock that reads up to 1e5 s is read
Event = Callable[[], None]
T = TypeVar("T")


def _rows() -> list[list[float]]:
    """Return log probabilities [_ROWS][VOCAB] in sixteenths, which every number format on the wire keeps."""
    rng, rows = random.Random(0), []
    for number in range(_ROWS):
        favour = 3.0 if number % _EOS_EVERY == 0 else -4.0
        logits = [favour, *(rng.uniform(-1.5, 1.5) for _ in range(VOCAB - 1))]
        total = math.log(sum(map(math.exp, logits)))
        rows.append([round(16 * (logit - total)) / 16 for logit in logits])
    return rows


ROWS = _rows()


@functools.cache
def _noise(seed: int, position: int) -> list[float]:
    noise: list[float] = gumbel(seed, position, np.arange(VOCAB)).tolist()
    return noise


def once(take: Callable[[T], None]) -> Callable[[T], None]:
    """Return `take`, which only the first call of what is returned reaches."""
    taken = False

    def first(value: T) -> None:
        nonlocal taken
        if not taken:
            taken = True
            take(value)

    return first


class ToyTarget:
    """The target's choice after any prefix, by the rule y = argmax(log p + G), for one seed and temperature."""

    def __init__(self, sampling: Sampling) -> None:
        self._seed = sampling.seed
        self._greedy = sampling.temperature == 0
        self._known: dict[tuple[int, ...], CommittedToken] = {}

    def token(self, prefix: tuple[int, ...]) -> CommittedToken:
        """Return the token after `prefix` [n], with its log probability."""
        found = self._known.get(prefix)
        if found is None:
            row = ROWS[hash(prefix) % _ROWS]  # Python hashes tuples of integers alike in every process
            scores = row if self._greedy else list(map(add, row, _noise(self._seed, len(prefix))))
            token = scores.index(max(scores))
            found = self._known[prefix] = CommittedToken(token, row[token])
        return found

    def after(self, transcript: Sequence[int], block: Sequence[DraftToken]) -> tuple[CommittedToken, ...]:
        """Return the tokens [k + 1] after the transcript and after each draft of `block` [k]."""
        prefix, tokens = tuple(transcript), []
        for draft in block:
            tokens.append(self.token(prefix))
            prefix += (draft.id,)
        return (*tokens, self.token(prefix))

    def text(self, prompt: tuple[int, ...], max_tokens: int) -> tuple[tuple[CommittedToken, ...], FinishReason]:
        """Return the text of plain decoding, and why it ends: what every schedule is held to."""
        text, prefix = list[CommittedToken](), prompt
        while True:
            text.append(self.token(prefix))
            prefix += (text[-1].id,)
            if text[-1].id == EOS:
                return tuple(text), FinishReason.EOS
            if len(text) == max_tokens:
                return tuple(text), FinishReason.LENGTH


class Violation(BaseException):
    """An invariant does not hold; nothing that goes on after errors may catch it."""


class ShuffledClock(VirtualClock):
    """A virtual clock on which events of one time happen in any order."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng
        self.num_events = 0

    def at(self, time: float, event: Event) -> None:
        order = (self._rng.randrange(1 << 30) << 30) + next(self._order)
        heapq.heappush(self._events, (time, order, event))

    def advance(self) -> None:
        self.num_events += 1
        super().advance()

    @property
    def is_over(self) -> bool:
        """Whether nothing will ever happen again."""
        return not self._events


class World:
    """Clock, chance and trace of one schedule.

    Attributes:
        faults_until: time at which the last fault or wait so far is over, in seconds.
        is_over: whether all edges are done, so that nobody has to look once more.
        poisoned: sessions whose texts are too much for any target.
        disturbed_s: sum of the lengths of all faults, in seconds.
        trace: lines of the schedule; None: nobody wants them.
    """

    def __init__(self, seed: int, *, traced: bool = False) -> None:
        self.rng = random.Random(seed)
        self.clock = ShuffledClock(self.rng)
        self.faults_until = 0.0
        self.is_over = False
        self.poisoned: set[str] = set()
        self.disturbed_s = 0.0
        self.counts: Counter[str] = Counter()
        self.trace: list[str] | None = [] if traced else None
        self._targets: dict[tuple[int, float], ToyTarget] = {}

    @property
    def now(self) -> float:
        """True time, in seconds, which no part can read."""
        return self.clock.now

    def target_of(self, sampling: Sampling) -> ToyTarget:
        """Return the target for texts of this seed and temperature, which all parts share for speed alone."""
        key = sampling.seed, sampling.temperature
        if key not in self._targets:
            self._targets[key] = ToyTarget(sampling)
        return self._targets[key]

    def after(self, seconds: float, event: Event) -> None:
        """Let `event` happen after true `seconds`."""
        self.clock.at(self.clock.now + seconds, event)

    def note(self, who: str, *what: object) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now:10.4f}  {who:<4} {' '.join(map(str, what))}")

    def disturb(self, seconds: float) -> None:
        """Note that a fault lasts for true `seconds` from now on."""
        self.wait(seconds)
        self.disturbed_s += seconds

    def wait(self, seconds: float) -> None:
        """Note that a text waits for true `seconds`, as it is told to."""
        self.faults_until = max(self.faults_until, self.now + seconds)


class LocalClock:
    """The clocks of one part: a monotonic one that counts `rate` seconds a true second, and a wall clock that jumps."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.rate = 1.0
        self.wall_error_s = 0.0
        self._at, self._reads = world.now, world.rng.uniform(0, 1e5)
        self._numbers = itertools.count()
        self._timers: dict[int, tuple[float, Event]] = {}  # that have not gone off: when, by this clock, and what then

    def monotonic(self) -> float:
        return self._reads + (self._world.now - self._at) * self.rate

    def wall(self) -> float:
        """Return Unix time as this part has it."""
        return 1e9 + self._world.now + self.wall_error_s

    def drift(self, rate: float) -> None:
        self._reads, self._at = self.monotonic(), self._world.now
        self.rate = rate
        for number in list(self._timers):
            self._wait(number)

    def after(self, seconds: float, event: Event) -> None:
        """Let `event` happen after `seconds` of this clock, at whatever rates it goes meanwhile."""
        number = next(self._numbers)
        self._timers[number] = self.monotonic() + max(0.0, seconds), event
        self._wait(number)

    def _wait(self, number: int) -> None:
        at_s, _ = self._timers[number]
        self._world.after(max(0.0, at_s - self.monotonic()) / self.rate, partial(self._go_off, number))

    def _go_off(self, number: int) -> None:
        at_s, event = self._timers.get(number, (math.inf, None))
        if event is not None and at_s <= self.monotonic() + EXACT_S:  # else it did, or the clock is slower since
            del self._timers[number]
            event()


@dataclass
class Path:
    """The network between two parts; nothing gets through before `cut_until`."""

    world: World
    delay_s: float
    jitter_s: float
    cut_until: float = 0.0

    @property
    def is_cut(self) -> bool:
        return self.world.now < self.cut_until

    def arrival(self) -> float:
        return max(self.world.now, self.cut_until) + self.delay_s + self.world.rng.random() * self.jitter_s

    def cut(self, seconds: float) -> None:
        """Let nothing through for true `seconds`."""
        self.cut_until = max(self.cut_until, self.world.now + seconds)


class OneWay:
    """One direction of a connection: what is sent arrives in order, held up where the path is cut."""

    def __init__(self, world: World, path: Path) -> None:
        self._world = world
        self._path = path
        self._until = 0.0
        self._waiting: deque[Event] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def send(self, event: Event) -> None:
        """Let `event` happen at the other end, after all that was sent before."""
        self._waiting.append(event)
        self._schedule()

    def _schedule(self) -> None:
        self._until = max(self._until, self._path.arrival())
        self._world.clock.at(self._until, self._arrive)

    def _arrive(self) -> None:
        if self._path.is_cut:
            self._schedule()
        else:
            self._waiting.popleft()()
