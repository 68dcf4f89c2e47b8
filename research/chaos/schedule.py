"""Schedules: a small fleet, texts and faults, all drawn from a seed, what each must leave behind, and their summary."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context

from outrider.proto.errors import Internal, LeaseExpired, OutriderError, ResourceExhausted, Unavailable
from outrider.proto.plumbing.access import Key
from outrider.proto.session import RetryRules
from outrider.proto.types import Patience, Sampling
from research.chaos.chaos_edge import Edge, Habits, Turn
from research.chaos.chaos_engine import Shape
from research.chaos.chaos_verifier import Process, Verifier
from research.chaos.coordinator import Coordinator
from research.chaos.faults import IMPOSSIBLE, KINDS, PAIRS, AimedFault, Injector, State, state_of
from research.chaos.world import VOCAB, LocalClock, Path, Violation, World

BOUND_S = 120.0  # after the last fault, within which every session ends
MAX_EVENTS = 20_000
TRIES, RETRY_S = 20, 0.02  # of a fault for whose victim it is too early
LONG_LEASE_S = 600.0
RATES = (None, None, None, None, 12, 60)  # of the key's tokens a minute
PART = 250  # schedules that a process is given at once


class Schedule:
    """A fleet under faults.

    Attributes:
        coverage: faults that happened, by kind and state of the session that they were aimed at.
        slowest_s: longest time that a session took after the last fault.
    """

    def __init__(self, seed: int, kinds: Sequence[str] = (), *, traced: bool = False) -> None:
        """Draw everything from `seed`, with faults of `kinds` alone; empty: of all kinds."""
        self.seed = seed
        self.world = world = World(seed, traced=traced)
        self.coverage: Counter[tuple[str, State]] = Counter()
        self.slowest_s = 0.0
        rng = world.rng
        num_edges = rng.choice((1, 1, 2, 2, 3))
        pages, max_sessions = rng.choice((24, 200)), rng.choice((1, 2, 3))
        self.verifiers = [
            Verifier(world, f"v{number}", LocalClock(world), self._shape(pages, max_sessions), self._watch_session)
            for number in range(rng.choice((1, 2, 2, 2, 3)))
        ]
        key = Key(
            "key", "00" * 32, max_sessions=rng.choice((None, 1, 2, num_edges)), tokens_per_minute=rng.choice(RATES)
        )
        self._lease_s = lease_s = rng.choice((0.4, 2.0, 10.0, LONG_LEASE_S))
        self.coordinator = Coordinator(world, LocalClock(world), self.verifiers, key, lease_s)
        self.edges = [self._edge(number, rng) for number in range(num_edges)]
        pairs = [(kind, state) for kind, state in PAIRS if kind in kinds or not kinds]
        self._aims = [aim for _ in range(rng.choice((1, 1, 2, 3))) for aim in _aims(rng, pairs, num_edges)]
        self._injector = Injector(world, self.coordinator)
        for edge in self.edges:
            world.after(rng.choice((0.0, 0.05, 0.5)) * rng.random(), edge.begin)

    def _shape(self, pages: int, max_sessions: int) -> Shape:
        rng = self.world.rng
        return Shape(pages, max_sessions, rng.choice((None, None, None, 0.7)), rng.choice((1, 2)))

    def _edge(self, number: int, rng: random.Random) -> Edge:
        delay_s = rng.choice((0.0005, 0.004, 0.02))
        verifiers = {v.name: (v, Path(self.world, delay_s, delay_s)) for v in self.verifiers}
        clock = LocalClock(self.world)
        control = Path(self.world, delay_s, delay_s)
        temperature, seed = rng.choice((0.0, 1.0)), rng.randrange(16)
        habits = Habits(
            f"e{number}",
            tuple(_turn(rng, temperature, seed) for _ in range(rng.choice((1, 1, 2, 3)))),
            keep_s=rng.choice((0.0, 0.2, 6.0, 6.0)),
            right=rng.choice((None, 0.0, 0.6, 0.9, 1.0)),
            patience=rng.choice((None, None, Patience(0.0), Patience(0.02, 2), Patience(math.inf, 2))),
            encoded=rng.random() < 0.1,
        )
        return Edge(self.world, clock, habits, self.coordinator, control, verifiers, self._watch)

    # --- faults ---

    def _watch_session(self, session: str) -> None:
        self._watch(next(edge for edge in self.edges if edge.habits.session == session))

    def _watch(self, edge: Edge) -> None:
        """Let the faults happen that wait for the state that an edge's session is in."""
        if not self._aims:
            return
        state = state_of(edge)
        for aim in list(self._aims):
            if aim.state is state and self.edges[aim.edge] is edge:
                if aim.skips:
                    aim.skips -= 1
                    continue
                self._aims.remove(aim)
                self.world.disturb(0.001)
                self.world.after(0.0, partial(self._inject, aim, edge, TRIES))

    def _inject(self, aim: AimedFault, edge: Edge, tries: int) -> None:
        """Let a fault happen, or try a little later where the state still holds but not yet what the fault needs."""
        state = state_of(edge)
        if state is None:
            return
        if KINDS[aim.kind](self._injector, edge):
            self.coverage[aim.kind, state] += 1
            edge.note("meets the fault", aim.kind, "while", state)
        elif state is aim.state and tries:
            self.world.after(RETRY_S * self.world.rng.random(), partial(self._inject, aim, edge, tries - 1))

    # --- run and check ---

    def run(self) -> None:
        """Let everything happen.

        Raises:
            Violation: an invariant does not hold.
        """
        world, clock = self.world, self.world.clock
        while not all(edge.over for edge in self.edges):
            if clock.is_over or clock.num_events > MAX_EVENTS:
                raise Violation(f"{self._unfinished()}: nothing helps after {clock.num_events} events")
            clock.advance()
            if world.now - world.faults_until > BOUND_S:
                raise Violation(f"{self._unfinished()}: no end {BOUND_S:g} s after the last fault")
        if not any(edge.errors for edge in self.edges):
            self.slowest_s = max(0.0, world.now - world.faults_until)
        world.is_over = True
        until = max(world.now, world.faults_until) + BOUND_S
        while not clock.is_over and world.now < until:
            clock.advance()
        clock.now = until + 4 * LONG_LEASE_S  # a slow clock's, too
        self._check_rest()

    def _unfinished(self) -> str:
        return ", ".join(f"{edge.habits.session} is {state_of(edge)}" for edge in self.edges if not edge.over)

    def _check_rest(self) -> None:
        """Fail where a slot, a page, a lease, a stream or a frame is left."""
        for edge in self.edges:
            for error in edge.errors:
                if not self._is_due(edge, error):
                    raise Violation(f"{edge.habits.session} ended with an error: {error}")
            if edge.call is not None:
                raise Violation(f"{edge.habits.session} still has a stream")
        for verifier in self.verifiers:
            _check_process(verifier.process)
        if self.coordinator.running:
            raise Violation(f"{self.coordinator.running} sessions still count for the key")

    def _is_due(self, owner: Edge, error: OutriderError) -> bool:
        """Return whether the schedule explains an error.

        Faults may last for longer than an edge tries, to which it counts the time for which it waits for its key. A
        slot of the key that nobody gives back lasts as long as its lease here, where a coordinator polls nobody: that
        of an edge that died, could not report, or left before the answer with its lease came.
        """
        if owner.habits.session in self.world.poisoned and isinstance(error, Internal):
            return True
        if error.field == "api_key" and any(edge.starved for edge in self.edges):
            return True  # one that waits for tokens keeps its slot
        if owner.starved or self.world.disturbed_s > RetryRules().abandon_after_s:
            return isinstance(error, Unavailable | ResourceExhausted | LeaseExpired)
        if owner.crowded and isinstance(error, Unavailable):
            return True
        unreported = any(edge.dead for edge in self.edges) or any(
            kind in ("cut-control", "coordinator") or (kind, state) == ("cancel", State.OPENING)
            for kind, state in self.coverage
        )
        return error.field == "api_key" and self._lease_s == LONG_LEASE_S and unreported


def _check_process(process: Process) -> None:
    name = f"{process.rules.name}.{process.number}"
    engine = process.engine
    if len(engine.sessions):
        raise Violation(f"{name} still has the sessions {[slot.session.id for slot in engine.sessions]}")
    if engine.pages.held:
        raise Violation(f"{name} still holds {engine.pages.held} KV pages")
    if process.streams or engine.inbox:
        raise Violation(f"{name} still has {len(process.streams)} streams and {len(engine.inbox)} events")
    process.meters.check(name)
    if process.own is not None:
        process.own.check_rest(name)
    if process.health.outboxes or not process.is_well:
        raise Violation(f"{name} is {process.health.condition.value}, with {len(process.health.outboxes)} streams")


def _turn(rng: random.Random, temperature: float, seed: int) -> Turn:
    prompt = tuple(rng.randrange(1, VOCAB) for _ in range(rng.choice((1, 2, 5))))
    sampling = Sampling(temperature=temperature, seed=seed, max_tokens=rng.choice((1, 3, 6, 10)))
    return Turn(prompt, sampling, after_s=rng.choice((0.0, 0.01, 0.3)), forgets=rng.choice((0, 0, 1, 3)))


def _aims(rng: random.Random, pairs: Sequence[tuple[str, State]], num_edges: int) -> list[AimedFault]:
    """Return a fault to let happen, after another where its state comes only after one."""
    kind, state = rng.choice(pairs)
    aim = AimedFault(kind, state, rng.randrange(num_edges), rng.choice((0, 0, 0, 1, 2)))
    if state is not State.RESUMING:
        return [aim]
    before = rng.choice((State.PREFILLING, State.DRAFTING, State.WAITING))
    return [AimedFault(rng.choice(("break", "kill", "lease")), before, aim.edge, 0), aim]


@dataclass(slots=True)
class ChaosSummary:
    """Summary of schedules that were run.

    Attributes:
        coverage: faults by kind and by the state of the session that they met.
        found: what does not hold, by seed.
        slowest_s: longest time from the last fault to the end of the last session, in virtual seconds.
        seconds: processor time.
    """

    schedules: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    coverage: Counter[tuple[str, State]] = field(default_factory=Counter)
    found: dict[int, str] = field(default_factory=dict)
    slowest_s: float = 0.0
    slowest: int = 0
    seconds: float = 0.0

    def add(self, other: ChaosSummary) -> None:
        self.schedules += other.schedules
        self.counts += other.counts
        self.coverage += other.coverage
        self.found |= other.found
        self.seconds += other.seconds
        if other.slowest_s > self.slowest_s:
            self.slowest_s, self.slowest = other.slowest_s, other.slowest

    @property
    def missed(self) -> list[tuple[str, State]]:
        """Pairs of a fault and a state that can meet and have not."""
        return [pair for pair in PAIRS if not self.coverage[pair]]

    def lines(self) -> Iterable[str]:
        counts = self.counts
        yield (
            f"{self.schedules} schedules, {counts['events']} events, {counts['turns']} turns of "
            f"{counts['tokens']} tokens, {counts['streams']} streams, {self.coverage.total()} faults, "
            f"{self.seconds:.0f} s of processor time"
        )
        yield (
            f"{counts['left for silence']} streams left because their verifier was silent, "
            f"{counts['fenced frames']} late frames fenced"
        )
        yield f"the slowest session ended {self.slowest_s:.1f} s after the last fault (seed {self.slowest})"
        yield "".join([f"{'fault':12}", *(f"{state:>12}" for state in State)])
        for kind in KINDS:
            cells = ("-" if (kind, state) in IMPOSSIBLE else str(self.coverage[kind, state]) for state in State)
            yield "".join([f"{kind:12}", *(f"{cell:>12}" for cell in cells)])
        for seed, what in sorted(self.found.items()):
            yield f"seed {seed}: {what}"
        if self.found:
            yield f"replay one with: python -m research.chaos --seed {min(self.found)}"


def run_schedules(first: int, count: int, kinds: Sequence[str] = ()) -> ChaosSummary:
    """Run schedules one after the other, from seed `first` on, with faults of `kinds` alone; empty: of all kinds."""
    summary, began = ChaosSummary(), time.process_time()
    for seed in range(first, first + count):
        schedule = Schedule(seed, kinds)
        try:
            schedule.run()
        except (Exception, Violation) as error:  # whatever shipped code raises is a finding
            summary.found[seed] = f"{type(error).__name__}: {error}"
        summary.schedules += 1
        summary.counts += schedule.world.counts
        summary.counts["events"] += schedule.world.clock.num_events
        summary.coverage += schedule.coverage
        if schedule.slowest_s > summary.slowest_s:
            summary.slowest_s, summary.slowest = schedule.slowest_s, seed
    summary.seconds = time.process_time() - began
    return summary


def run_in_processes(first: int, count: int, kinds: Sequence[str] = (), *, processes: int) -> ChaosSummary:
    """Run schedules like `run_schedules`, in several processes at once."""
    if processes == 1:
        return run_schedules(first, count, kinds)
    total = ChaosSummary()
    starts = range(first, first + count, PART)
    counts = [min(PART, first + count - start) for start in starts]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for part in pool.map(run_schedules, starts, counts, [kinds] * len(counts)):
            total.add(part)
    return total
