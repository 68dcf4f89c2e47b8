"""An edge that asks for several turns of a text: the shipped session machine and rules of streams, on its own clock."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from outrider.edge.link.attempts import Attempts
from outrider.proto.errors import OutriderError, Unavailable
from outrider.proto.session import (
    CatchUpJob,
    Disconnected,
    Done,
    Drafted,
    DraftJob,
    EdgeEvent,
    EdgeInstruction,
    EdgeSession,
    Emit,
    Reopen,
    RetryRules,
    Send,
    Started,
    StopRequested,
    StreamReady,
    TurnBegun,
)
from outrider.proto.types import (
    CloudFrame,
    Draft,
    Goaway,
    Lease,
    LeaseRequest,
    Open,
    Opened,
    Patience,
    Ping,
    Pong,
    SessionReport,
)
from research.chaos.call import SimulatedCall
from research.chaos.chaos_drafter import ToyDrafter
from research.chaos.chaos_target import MODEL, TOKENIZER
from research.chaos.chaos_turns import Turn, TurnCheck
from research.chaos.chaos_verifier import Verifier
from research.chaos.coordinator import CoordinatorCalls
from research.chaos.guard import StreamGuard
from research.chaos.world import LocalClock, Path, Violation, World

OPEN_S = 30.0  # the edge's default
MAX_UNDER_WAY = 400
SPENT = "tokens a minute"  # in every error of a key that has none left


@dataclass(frozen=True, slots=True)
class Habits:
    """Plan of one edge for its session.

    Attributes:
        session: id.
        turns: turns that the user will ask for, one after the other.
        keep_s: time to keep the session between turns; 0: each turn has a stream of its own.
        right: chance that a draft is the target's token; None: nothing is drafted.
        encoded: whether its frames pass through the codec.
    """

    session: str
    turns: tuple[Turn, ...]
    keep_s: float
    right: float | None
    patience: Patience | None
    encoded: bool


class Edge:
    """One edge: the shell around its session machine, and a user who reads what comes.

    Attributes:
        habits: what it wants.
        machine: session machine.
        attempts: rules of its streams.
        call: present stream; None: none.
        address: verifier of the newest stream; empty: there was none.
        errors: errors that turns have ended with.
        over: whether the user wants no more.
        dead: whether the edge itself is gone.
        starved: whether it has had to wait for tokens of its key.
        crowded: whether it has had to wait for a place of its key.
    """

    def __init__(
        self,
        world: World,
        clock: LocalClock,
        habits: Habits,
        calls: CoordinatorCalls,
        verifiers: dict[str, tuple[Verifier, Path]],
        watch: Callable[[Edge], None],
    ) -> None:
        """Reach `verifiers` over the path beside each; `watch` is called after each of its events."""
        self.habits = habits
        self.clock = clock
        self.call: SimulatedCall | None = None
        self.errors: list[OutriderError] = []
        self.over = self.dead = self.starved = self.crowded = False
        self.verifiers = verifiers
        self.coordinator = calls
        self.drafter = ToyDrafter(self._choose, habits.right or 0.0, random.Random(world.rng.randrange(1 << 30)))
        self._world = world
        self._watch = watch
        self._turn_number = 0
        first = habits.turns[0]
        frame = Open(
            MODEL,
            TOKENIZER,
            first.prompt,
            first.sampling,
            habits.session,
            patience=habits.patience,
            drafting=habits.right is not None,
            keep_s=habits.keep_s,
            trees=True,
        )
        self.machine = EdgeSession(frame, job_tokens=lambda _: 3)
        self.attempts = Attempts(self.machine)
        self.check = TurnCheck(first, first.prompt, world.targets.of(first.sampling))
        self._known: dict[str, Opened] = {}
        self.address = ""
        self._answered = False
        self._waits = False  # for a turn to begin
        self._place: Lease | None = None  # where a silent verifier is left for
        self.guard = StreamGuard(world, clock, calls, verifiers, self._ping, self._leave_silent)

    def _choose(self, prefix: tuple[int, ...]) -> int:
        return self._world.targets.of(self.machine.sampling).token(prefix).id

    def note(self, *what: object) -> None:
        """Add a line to the trace."""
        self._world.note(self.habits.session, *what)

    def session_has_ended(self) -> bool:
        """Return whether the present text has ended at its verifier."""
        return self.call is not None and self.call.served is not None and self.call.served.has_ended

    # --- the user ---

    def begin(self) -> None:
        """Ask for the first turn."""
        self.handle(Started())
        self._attempt()

    def cancel(self) -> None:
        """Stop the turn that runs, if one does."""
        if not self.machine.done and not self.dead:
            self.note("the user cancels")
            self.check.cancelled = True
            self.handle(StopRequested())

    def die(self) -> None:
        """Vanish: nothing of the edge runs from now on, and its system closes its streams."""
        self.note("dies")
        self.dead = self.over = True
        self._close_call()

    def _end_turn(self, done: Done) -> None:
        """Check what the user has got, and ask for the next turn some time later."""
        self.note("is done:", done.finish, done.error or "")
        self.guard.rest()
        self.check.end(done, self.machine)
        if done.error is not None:
            self.errors.append(done.error)
            self._world.disturb(0.0)  # the next turn may take as long
        self._world.counts["turns"] += 1
        self._world.counts["tokens"] += len(self.check.emitted)
        self._report()
        self._turn_number += 1
        if self._turn_number < len(self.habits.turns):
            self.clock.after(self.habits.turns[self._turn_number].after_s, self._begin_turn)
        else:
            # An asynchronous generator is closed by the loop that reads it, some time after its last item.
            self.clock.after(0.001, self.close)

    def _begin_turn(self) -> None:
        if self.dead:
            return
        turn = self.habits.turns[self._turn_number]
        start = max(0, len(self.machine.transcript) - turn.forgets)
        prompt = (*self.machine.transcript[:start], *turn.prompt)
        self.check = TurnCheck(turn, prompt, self._world.targets.of(turn.sampling))
        self.note("begins another turn at", start)
        self.handle(TurnBegun(start, turn.prompt, turn.sampling))
        self.guard.resume()
        if self._waits:
            self._waits = False
            self._attempt()

    def close(self) -> None:
        """End the session here and at the verifier."""
        if not self.dead:
            self.handle(StopRequested())
            self.over = True
            self._close_call()

    def _report(self) -> None:
        verifier, tokens = self.machine.verifier, len(self.check.emitted)
        self.coordinator.report(SessionReport(self.habits.session, MODEL, verifier, committed_tokens=tokens))

    def _give_back(self) -> None:
        """Report that no verifier took the session."""
        self.coordinator.report(SessionReport(self.habits.session, MODEL, ""))

    # --- streams, as the shipped loop opens and leaves them ---

    def _attempt(self) -> None:
        if self.over:
            return
        if not self.attempts.wanted:
            self._waits = True
            return
        self.attempts.begin()
        place, self._place = self._place, None
        if place is not None:
            self._leased(place)
        else:
            self.coordinator.lease(self._request(self.attempts.avoid), self._leased)

    def _request(self, avoid: tuple[str, ...], *, suspected: bool = False) -> LeaseRequest:
        epoch = self.machine.next_epoch
        return LeaseRequest(MODEL, self.habits.session, TOKENIZER, avoid, epoch=epoch, suspected=suspected)

    def _leased(self, result: Lease | OutriderError) -> None:
        if self.over:
            return
        if isinstance(result, OutriderError):
            self._lose(result)
            return
        if not self.attempts.wanted:
            self._give_back()
            self._waits = True
            return
        self.attempts.begin()
        verifier, path = self.verifiers[result.verifier]
        self.address = verifier.name
        self._answered = False
        self.call = call = SimulatedCall(self._world, path, self, verifier, encoded=self.habits.encoded)
        self._world.counts["streams"] += 1
        self.note("opens a stream to", verifier.name)
        self.handle(StreamReady(result.token, self._known.get(verifier.name)))
        self.clock.after(OPEN_S, partial(self._time_out, call))
        avoid = self.attempts.avoid

        def request_another(silent: str) -> LeaseRequest:
            return self._request((*(name for name in avoid if name != silent), silent), suspected=True)

        if call is self.call:
            self.guard.begin(verifier.name, lambda: self.machine.round_trip_s, request_another)
            if self.machine.done:
                self.guard.rest()

    def _time_out(self, call: SimulatedCall) -> None:
        if call is self.call and not self._answered and not self.over:
            self.broken(call, Unavailable(f"{self.address} did not answer"))

    def received(self, call: SimulatedCall, frame: CloudFrame) -> None:
        """Take a frame of the present stream; the machine has to fence one that comes astray from another."""
        if self.dead:
            return
        if call is not self.call:
            if self.call is not None:
                self.handle(frame)
            return
        self.guard.hear(frame)
        if isinstance(frame, Goaway) and SPENT in frame.reason:
            self._starve(frame.retry_after_s)
        if isinstance(frame, Opened):
            self._known[self.address] = frame
        self.handle(frame)
        if isinstance(frame, Pong) and not self._answered:
            return
        if not self._answered:
            self._answered = True
            self.attempts.answered()
        if call is self.call and not self.attempts.stays:
            self._leave(broken=self.attempts.wanted)

    def broken(self, call: SimulatedCall, error: OutriderError) -> None:
        """Note the end of a stream."""
        if call is not self.call or self.dead:
            return
        self._known.pop(self.address, None)  # with its connection
        self.attempts.failed(self.address)
        self._lose(error)

    def _lose(self, error: OutriderError) -> None:
        if SPENT in str(error):
            self._starve(error.retry_after_s)
        self.crowded |= error.field == "api_key"
        self.note("loses its stream:", error)
        self.handle(Disconnected(error))
        self._leave(broken=False)

    def _starve(self, seconds: float) -> None:
        self.starved = True
        self._world.wait(min(seconds, RetryRules().abandon_after_s))

    def _leave(self, *, broken: bool) -> None:
        if broken:
            self.attempts.failed(self.address)
        self._close_call()
        self.clock.after(self.attempts.pause_s, self._attempt)

    def _ping(self, ping: Ping) -> None:
        if self.call is not None and not self.dead:
            self.call.send_up(ping)

    def _leave_silent(self, place: Lease) -> None:
        """Leave a verifier that is silent for one that answers."""
        if self.call is not None and not self.over:
            self._place = place
            self.note(self.address, "is silent; leaves it for", place.verifier)
            self.broken(self.call, Unavailable(f"verifier {self.address} is silent"))

    def _close_call(self) -> None:
        self.guard.end()
        call, self.call = self.call, None
        if call is not None:
            call.leave()

    # --- the machine ---

    def handle(self, event: EdgeEvent) -> None:
        """Give the machine an event and follow its instructions."""
        if self.dead:
            return
        fenced = self.machine.statistics.fenced
        instructions = self.machine.handle(event, self.clock.monotonic())
        self._world.counts["fenced frames"] += self.machine.statistics.fenced > fenced
        done: Done | None = None
        for instruction in instructions:
            if isinstance(instruction, Done):
                done = instruction
            self._follow(instruction)
        if done is not None:
            self._end_turn(done)
        self._watch(self)

    def _follow(self, instruction: EdgeInstruction) -> None:
        match instruction:
            case Send(frame):
                if self.call is not None:
                    self._check_credit(frame)
                    self.call.send_up(frame)
            case Emit():
                self.check.emit(instruction)
            case DraftJob() | CatchUpJob():
                result, seconds = self.drafter.do(instruction)
                self.clock.after(seconds, partial(self._answer, result))
            case Reopen():
                self.attempts.reopen = instruction

    def _answer(self, result: EdgeEvent) -> None:
        if not self.over or isinstance(result, Drafted):
            self.handle(result)

    def _check_credit(self, frame: object) -> None:
        machine = self.machine
        if isinstance(frame, Draft) and machine.in_flight > max(machine._stream.credit, machine._tree.sent):
            raise Violation(f"{machine.in_flight} drafts in flight on {machine._stream.credit} of credit")
        if self.call is not None and self.call.num_under_way > MAX_UNDER_WAY:
            raise Violation(f"{self.call.num_under_way} frames under way")
