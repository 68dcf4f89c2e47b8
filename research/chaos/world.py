"""A world that all parts of a schedule share: one clock, one source of chance, a trace, and the links between parts."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable
from functools import partial

from research.chaos.chaos_target import ToyTargets
from research.simulator.clock import VirtualClock

KEEPALIVE_S = (20.0, 30.0)  # the silence of a connection after which an end of it gives up, as gRPC's options have it
EXACT_S = 1e-6  # to which a clock that reads up to 1e5 s is read
Event = Callable[[], None]


class Violation(BaseException):
    """An invariant does not hold; nothing that goes on after errors may catch it."""


class ShuffledClock(VirtualClock):
    """A virtual clock on which events of one time happen in any order."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng
        self.num_events = 0

    def at(self, time: float, event: Event) -> None:
        """Let `event` happen at `time`."""
        order = (self._rng.randrange(1 << 30) << 30) + next(self._order)
        heapq.heappush(self._events, (time, order, event))

    def advance(self) -> None:
        """Let the next event happen."""
        self.num_events += 1
        super().advance()

    @property
    def is_over(self) -> bool:
        """Whether nothing will ever happen again."""
        return not self._events


class World:
    """Clock, chance and trace of one schedule.

    Attributes:
        targets: targets of all texts.
        faults_until: time at which the last fault or wait so far is over, in seconds.
        is_over: whether all edges are done, so that nobody has to look again and again.
        poisoned: sessions whose texts are too much for any target.
        disturbed_s: sum of the lengths of all faults, in seconds.
        counts: what has happened, for the report.
        trace: lines of the schedule; None: nobody wants them.
    """

    def __init__(self, seed: int, *, traced: bool = False) -> None:
        self.rng = random.Random(seed)
        self.clock = ShuffledClock(self.rng)
        self.targets = ToyTargets()
        self.faults_until = 0.0
        self.is_over = False
        self.poisoned: set[str] = set()
        self.disturbed_s = 0.0
        self.counts: Counter[str] = Counter()
        self.trace: list[str] | None = [] if traced else None

    @property
    def now(self) -> float:
        """True time, in seconds, which no part can read."""
        return self.clock.now

    def after(self, seconds: float, event: Event) -> None:
        """Let `event` happen after true `seconds`."""
        self.clock.at(self.clock.now + seconds, event)

    def note(self, who: str, *what: object) -> None:
        """Add a line to the trace."""
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
    """The clocks of one part: a monotonic one that drifts, and a wall clock that may jump.

    Attributes:
        rate: seconds that the monotonic clock counts in a true second.
        wall_error_s: error of the wall clock, in seconds.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.rate = 1.0
        self.wall_error_s = 0.0
        self._at, self._reads = world.now, world.rng.uniform(0, 1e5)
        self._numbers = itertools.count()
        self._timers: dict[int, tuple[float, Event]] = {}  # that have not gone off: when, by this clock, and what then

    def monotonic(self) -> float:
        """Return the monotonic clock, in its seconds."""
        return self._reads + (self._world.now - self._at) * self.rate

    def wall(self) -> float:
        """Return Unix time as this part has it."""
        return 1e9 + self._world.now + self.wall_error_s

    def drift(self, rate: float) -> None:
        """Let the monotonic clock go at another rate from now on."""
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


class Path:
    """The network between two parts.

    Attributes:
        cut_until: time until which nothing gets through.
    """

    def __init__(self, world: World, delay_s: float, jitter_s: float) -> None:
        self.cut_until = 0.0
        self._world = world
        self._delay_s = delay_s
        self._jitter_s = jitter_s

    @property
    def is_cut(self) -> bool:
        """Whether nothing gets through now."""
        return self._world.now < self.cut_until

    def arrival(self) -> float:
        """Return when something arrives that is sent now."""
        world = self._world
        return max(world.now, self.cut_until) + self._delay_s + world.rng.random() * self._jitter_s

    def cut(self, seconds: float) -> None:
        """Let nothing through for true `seconds`."""
        self.cut_until = max(self.cut_until, self._world.now + seconds)


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
