"""The faults of a schedule, and the states of a session that each is aimed at."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from outrider.proto.errors import Unavailable
from research.chaos.chaos_edge import Edge
from research.chaos.chaos_verifier import SimulatedCall, Verifier
from research.chaos.coordinator import Coordinator
from research.chaos.world import KEEPALIVE_S, World


class State(StrEnum):
    """A state of a session, as its edge and its verifier together have it."""

    OPENING = "opening"
    PREFILLING = "prefilling"
    DRAFTING = "drafting"
    WAITING = "waiting"
    RESUMING = "resuming"
    FINISHING = "finishing"
    KEPT = "kept"


def state_of(edge: Edge) -> State | None:
    """Return the state of an edge's session; None: it has none."""
    machine = edge.machine
    if edge.over:
        return None
    if machine.done:
        return State.KEPT if machine.connected else None
    if not machine.connected:
        begun = len(machine.transcript) > machine.prompt_length
        return State.RESUMING if begun or machine.statistics.resumes else State.OPENING
    if edge.call is not None and edge.call.served is not None and edge.call.served.has_ended:
        return State.FINISHING
    if len(machine.transcript) == machine.prompt_length:
        return State.PREFILLING
    return State.DRAFTING if machine.in_flight else State.WAITING


@dataclass(slots=True)
class AimedFault:
    """A fault for the session of one edge.

    Attributes:
        state: when to let it happen.
        skips: times that the state is let pass before.
    """

    kind: str
    state: State
    edge: int
    skips: int


class Injector:
    """Lets faults happen to one edge, its stream and the verifier that it is at; each says whether it could."""

    def __init__(self, world: World, coordinator: Coordinator) -> None:
        self._world = world
        self._coordinator = coordinator
        self._rng = world.rng

    # --- processes ---

    def fault_kill(self, edge: Edge) -> bool:
        return self._end_process(edge, SimulatedCall.lose_server)

    def fault_power(self, edge: Edge) -> bool:
        self._world.disturb(KEEPALIVE_S[1])
        return self._end_process(edge, SimulatedCall.fall_silent)

    def _end_process(self, edge: Edge, lose: Callable[[SimulatedCall], None]) -> bool:
        verifier = self._verifier(edge)
        if not verifier.is_up:
            return False
        restart_s = self._rng.choice((0.01, 0.2, 3.0))
        self._world.disturb(restart_s)
        verifier.kill(restart_s, lose)
        return True

    def fault_freeze(self, edge: Edge) -> bool:
        verifier, seconds = self._verifier(edge), self._lasts_s(45.0)
        process = verifier.process
        if not verifier.is_up:
            return False
        process.freeze(seconds)
        for call in verifier.calls:
            self._keepalive(call.break_edge, seconds, lambda: process.alive and process.is_frozen)
        return True

    def fault_hang(self, edge: Edge) -> bool:
        verifier, seconds = self._verifier(edge), self._lasts_s(50.0)
        if not verifier.is_up:
            return False
        verifier.process.hang(seconds)
        return True

    def fault_fail(self, edge: Edge) -> bool:
        """Let a step fail, which succeeds when it is made again, or all steps of a process."""
        verifier, failures = self._verifier(edge), self._rng.choice((1, math.inf))
        verifier.process.note("has", failures, "steps that fail")
        verifier.process.engine.steps.failures = failures
        self._world.disturb(5.0 if failures > 1 else 0.0)
        return verifier.is_up

    def fault_memory(self, edge: Edge) -> bool:
        steps, rows = self._verifier(edge).process.engine.steps, self._rng.choice((1, 2, 5))
        return self._set(steps, "max_rows", rows, math.inf, 8.0)

    def fault_slow(self, edge: Edge) -> bool:
        return self._set(self._verifier(edge).process.engine.steps, "slow", True, False, 20.0)

    def fault_own_drafter(self, edge: Edge) -> bool:
        """Let a verifier's own drafter fail, or be stuck for some time."""
        own = self._verifier(edge).process.own
        if own is None:
            return False
        if self._rng.random() < 0.5:
            own.drafter.fails = True
        else:
            own.stuck_until = self._world.now + self._lasts_s(20.0)
        return True

    def fault_poison(self, edge: Edge) -> bool:
        self._world.poisoned.add(edge.habits.session)
        return True

    def fault_drain(self, edge: Edge) -> bool:
        verifier = self._verifier(edge)
        process, grace_s = verifier.process, self._rng.uniform(0.01, 2.0)
        if not verifier.is_up or process.engine.sessions.draining:
            return False
        self._world.disturb(grace_s + 1.0)
        self._coordinator.drain(verifier.name)

        def replace() -> None:
            if verifier.process is process and process.alive:
                process.serve(process.engine.sessions.stop)
                verifier.kill(self._rng.uniform(0.01, 1.0), SimulatedCall.lose_server)

        self._world.after(grace_s, replace)
        return True

    def fault_crowd(self, edge: Edge) -> bool:
        """Let others take every slot."""
        process = self._verifier(edge).process
        return self._set(process.engine.sessions, "max_sessions", 0, process.max_sessions, 8.0) and process.alive

    def fault_coordinator(self, _: Edge) -> bool:
        down_s = self._rng.choice((0.0, 0.3, 4.0))
        self._world.disturb(down_s)
        self._coordinator.restart(down_s)
        return True

    # --- links ---

    def fault_cut(self, edge: Edge) -> bool:
        verifier, seconds = self._verifier(edge), self._lasts_s(45.0)
        path = edge.verifiers[verifier.name][1]
        path.cut(seconds)
        if (call := edge.call) is not None:
            self._keepalive(call.break_edge, seconds, lambda: path.is_cut)
            self._keepalive(lambda _: call.break_served(), seconds, lambda: path.is_cut)
        return True

    def fault_cut_control(self, edge: Edge) -> bool:
        edge.control_path.cut(self._lasts_s(15.0))
        return True

    def fault_cut_poll(self, edge: Edge) -> bool:
        verifier = self._verifier(edge)
        self._coordinator.paths[verifier.name].cut(self._lasts_s(15.0))
        return True

    def fault_break(self, edge: Edge) -> bool:
        return self._with_call(edge, SimulatedCall.reset)

    def fault_half_open(self, edge: Edge) -> bool:
        self._world.disturb(KEEPALIVE_S[1])
        return self._with_call(edge, SimulatedCall.fall_silent)

    def fault_late(self, edge: Edge) -> bool:
        self._world.disturb(KEEPALIVE_S[1])
        return self._with_call(edge, SimulatedCall.lose_edge)

    def fault_copies(self, edge: Edge) -> bool:
        def copy(call: SimulatedCall) -> None:
            call.copies = 4

        return self._with_call(edge, copy)

    def fault_lease(self, edge: Edge) -> bool:
        call = edge.call
        if call is None or call.served is None:
            return False
        call.served.end_lease()
        return True

    # --- clocks ---

    def fault_jump(self, edge: Edge) -> bool:
        clock = self._rng.choice((self._verifier(edge).clock, self._coordinator.clock))
        return self._set(clock, "wall_error_s", self._rng.choice((-7200.0, -20.0, 20.0, 7200.0)), 0.0, 8.0)

    def fault_drift(self, edge: Edge) -> bool:
        clock = self._rng.choice((self._verifier(edge).clock, edge.clock, self._coordinator.clock))
        clock.drift(self._rng.choice((0.3, 0.9, 1.1, 3.0)))
        self._world.after(self._lasts_s(8.0), partial(clock.drift, 1.0))
        return True

    # --- the edge itself ---

    def fault_cancel(self, edge: Edge) -> bool:
        runs = not edge.machine.done
        edge.cancel()
        return runs

    def fault_die(self, edge: Edge) -> bool:
        if edge.call is not None and self._rng.random() < 0.5:
            edge.call.fall_silent()
        self._world.disturb(KEEPALIVE_S[1])
        edge.die()
        return True

    def fault_drafter(self, edge: Edge) -> bool:
        edge.drafter.fails = True
        return edge.habits.right is not None

    # --- common ---

    def _verifier(self, edge: Edge) -> Verifier:
        """Return the verifier that an edge is at or was last, or else any."""
        name = edge.address or self._rng.choice(list(edge.verifiers))
        return edge.verifiers[name][0]

    def _with_call(self, edge: Edge, act: Callable[[SimulatedCall], None]) -> bool:
        if edge.call is None:
            return False
        act(edge.call)
        return True

    def _set(self, owner: object, name: str, value: object, usual: object, longest_s: float) -> bool:
        """Let an attribute have another value for some time."""
        self._world.note("-", name, "is", value)
        setattr(owner, name, value)
        self._world.after(self._lasts_s(longest_s), partial(setattr, owner, name, usual))
        return True

    def _lasts_s(self, longest_s: float) -> float:
        """Return how long a fault lasts: mostly about a step, a turn or a retry, and at times for long."""
        seconds = self._rng.choice((0.01, 0.05, 0.3, 2.0, longest_s)) * self._rng.uniform(0.5, 1.0)
        self._world.note("-", f"a fault lasts for {seconds:.2f} s")
        self._world.disturb(seconds)
        return seconds

    def _keepalive(self, give_up: Callable[[Unavailable], None], seconds: float, lasts: Callable[[], bool]) -> None:
        """Let an end of a connection give up, where the other is still silent after its keepalive."""
        silence_s = self._rng.uniform(*KEEPALIVE_S)

        def look() -> None:
            if lasts():
                give_up(Unavailable("the stream broke: keepalive"))

        if seconds > silence_s:
            self._world.after(silence_s, look)


KINDS: dict[str, Callable[[Injector, Edge], bool]] = {
    name.removeprefix("fault_").replace("_", "-"): method
    for name, method in vars(Injector).items()
    if name.startswith("fault_")
}
IMPOSSIBLE = {("cancel", State.KEPT)}  # no text runs
PAIRS = [(kind, state) for kind in KINDS for state in State if (kind, state) not in IMPOSSIBLE]
