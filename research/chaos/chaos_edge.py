"""An edge that asks for several turns of a text: the shipped session machine and rules of streams, on its own clock."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from outrider.edge.decoding import ANSWER_WITHIN_S, Attempts
from outrider.proto.errors import Internal, OutriderError, Unavailable
from outrider.proto.policy.suspicion import AnswerTimes, ReopenBudget, SilenceWatch, Silent
from outrider.proto.session import (
    CatchUpJob,
    CaughtUp,
    Disconnected,
    Done,
    Drafted,
    DrafterFailed,
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
    TeacherForced,
    TurnBegun,
)
from outrider.proto.types import (
    CloudFrame,
    CommittedToken,
    Draft,
    DraftToken,
    FinishReason,
    Goaway,
    Lease,
    LeaseRequest,
    Open,
    Opened,
    Patience,
    Pong,
    Sampling,
    SessionReport,
)
from research.chaos.chaos_verifier import SimulatedCall, Verifier
from research.chaos.coordinator import Coordinator
from research.chaos.world import MODEL, TOKENIZER, VOCAB, LocalClock, OneWay, Path, ToyTarget, Violation, World, once

OPEN_S = 30.0  # the edge's default
CALL_S = 10.0  # the deadline of a call to the coordinator
MAX_UNDER_WAY = 400
SPENT = "tokens a minute"  # in every error of a key that has none left


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a conversation.

    Attributes:
        after_s: time that the user thinks before it, in seconds.
        forgets: tokens at the end of the transcript that it does not follow.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    after_s: float = 0.0
    forgets: int = 0


class TurnCheck:
    """Compares what a user gets with the text of plain decoding, token by token."""

    def __init__(self, turn: Turn, prompt: tuple[int, ...], target: ToyTarget) -> None:
        self.emitted: list[CommittedToken] = []
        self.cancelled = False
        self._prompt = prompt
        self._text, self._finish = target.text(prompt, turn.sampling.max_tokens)
        self._ended = False

    def emit(self, emit: Emit) -> None:
        """Fail where tokens are lost, repeated, late or others than the target's."""
        start = len(self._prompt) + len(self.emitted)
        if self._ended:
            raise Violation("tokens come after the end of their turn")
        if emit.start != start:
            raise Violation(f"tokens come for position {emit.start}; the user has those before {start}")
        wanted = self._text[len(self.emitted) : len(self.emitted) + len(emit.tokens)]
        if emit.tokens != wanted:
            raise Violation(f"position {start}: {emit.tokens} instead of {wanted}")
        self.emitted += emit.tokens

    def end(self, done: Done, machine: EdgeSession) -> None:
        """Fail where the turn ends twice, too soon, for another reason or with other counts than plain decoding's."""
        if self._ended:
            raise Violation("a turn ends twice")
        self._ended = True
        count = len(self.emitted)
        if machine.statistics.committed != count:
            raise Violation(f"the usage says {machine.statistics.committed} tokens; the user has {count}")
        if tuple(machine.transcript[len(self._prompt) :]) != tuple(token.id for token in self.emitted):
            raise Violation("the transcript is not what the user has")
        if done.error is not None:
            return
        whole = count == len(self._text)
        if not (whole and done.finish is self._finish) and not (
            self.cancelled and done.finish is FinishReason.CANCELLED and count <= len(self._text)
        ):
            raise Violation(f"ends with {done.finish} after {count} tokens instead of {self._finish}")


class ToyDrafter:
    """Keeps the prefix that it was given; a job that does not follow it is a violation."""

    def __init__(self, choose: Callable[[tuple[int, ...]], int], right: float, rng: random.Random) -> None:
        """Propose the token that `choose` gives after a prefix, with chance `right`."""
        self.fails = False
        self._choose = choose
        self._right = right
        self._rng = rng
        self._prefix: tuple[int, ...] = ()

    def do(self, job: DraftJob | CatchUpJob) -> tuple[Drafted | CaughtUp | DrafterFailed, float]:
        """Return the result of a job, and the seconds until it is there."""
        if job.truncate_to > len(self._prefix):
            raise Violation(f"a job truncates the drafter's {len(self._prefix)} tokens to {job.truncate_to}")
        seconds = self._rng.uniform(0.0005, 0.006)
        if self.fails:
            return DrafterFailed(Internal("the drafter has died"), job.drafter), seconds
        if isinstance(job, CatchUpJob):
            self._prefix = self._prefix[: job.truncate_to] + job.tokens
            return CaughtUp(job, TeacherForced(()), seconds), seconds
        forced_from = job.truncate_to + job.skip
        prefix = self._prefix[: job.truncate_to] + job.extend_with
        forced = [DraftToken(self._propose(prefix[:at])) for at in range(forced_from, forced_from + job.teacher_forced)]
        drafts: list[DraftToken] = []
        for _ in range(job.count if self._rng.random() < 0.9 else self._rng.randrange(job.count + 1)):
            token = self._propose(prefix)
            others = tuple({self._rng.randrange(VOCAB) for _ in range(2)} - {token})
            drafts.append(DraftToken(token, runners_up=others))
            prefix += (token,)
        self._prefix = prefix
        return Drafted(job, tuple(drafts), seconds, TeacherForced(tuple(forced))), seconds

    def _propose(self, prefix: tuple[int, ...]) -> int:
        return self._choose(prefix) if self._rng.random() < self._right else self._rng.randrange(VOCAB)


@dataclass(frozen=True, slots=True)
class Habits:
    """Plan of one edge for its session.

    Attributes:
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
        attempts: rules of its streams.
        address: verifier of the newest stream; empty: there was none.
        errors: errors that turns have ended with.
        over: whether the user wants no more.
        dead: whether the edge itself is gone.
        starved: whether it has had to wait for tokens of its key.
        crowded: whether it has had to wait for a slot of its key.
    """

    def __init__(
        self,
        world: World,
        clock: LocalClock,
        habits: Habits,
        coordinator: Coordinator,
        control_path: Path,
        verifiers: dict[str, tuple[Verifier, Path]],
        watch: Callable[[Edge], None],
    ) -> None:
        """Reach `verifiers` over the path beside each; `watch` is called after each of its events."""
        self.habits = habits
        self.clock = clock
        self.call: SimulatedCall | None = None
        self.address = ""
        self.errors: list[OutriderError] = []
        self.over = self.dead = self.starved = self.crowded = False
        self.control_path = control_path
        self.verifiers = verifiers
        self.drafter = ToyDrafter(self._choose, habits.right or 0.0, random.Random(world.rng.randrange(1 << 30)))
        self._world = world
        self._coordinator = coordinator
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
        self.check = TurnCheck(first, first.prompt, world.target_of(first.sampling))
        self._known: dict[str, Opened] = {}
        self._answered = False
        self._waits = False  # for a turn to begin
        self._elsewhere: Lease | None = None  # where a silent verifier is left for
        self._answers, self._budget = AnswerTimes(), ReopenBudget()
        self._silence: SilenceWatch | None = None  # of the stream that is open
        self._opened_at = 0.0
        self._avoid: tuple[str, ...] = ()  # as the stream was opened

    def _choose(self, prefix: tuple[int, ...]) -> int:
        return self._world.target_of(self.machine.sampling).token(prefix).id

    def note(self, *what: object) -> None:
        self._world.note(self.habits.session, *what)

    # --- the user ---

    def begin(self) -> None:
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
        self.check.end(done, self.machine)
        if done.error is not None:
            self.errors.append(done.error)
            self._world.disturb(0.0)  # the next turn may take as long
        tokens = len(self.check.emitted)
        self._world.counts["turns"] += 1
        self._world.counts["tokens"] += tokens
        self._report(self.machine.verifier, tokens)
        self._turn_number += 1
        if self._turn_number < len(self.habits.turns):
            self.clock.after(self.habits.turns[self._turn_number].after_s, self._begin_turn)
        else:
            # An asynchronous generator is closed by the loop that reads it, some time after its last item.
            self.clock.after(0.001, self._close)

    def _begin_turn(self) -> None:
        if self.dead:
            return
        turn = self.habits.turns[self._turn_number]
        start = max(0, len(self.machine.transcript) - turn.forgets)
        prompt = (*self.machine.transcript[:start], *turn.prompt)
        self.check = TurnCheck(turn, prompt, self._world.target_of(turn.sampling))
        self.note("begins another turn at", start)
        self.handle(TurnBegun(start, turn.prompt, turn.sampling))
        if self._silence is not None:
            self._silence.resume(self.clock.monotonic())
            self._look_later(self._silence)
        if self._waits:
            self._waits = False
            self._attempt()

    def _close(self) -> None:
        if not self.dead:
            self.handle(StopRequested())
            self.over = True
            self._close_call()

    # --- calls to the coordinator ---

    def _lease(self, request: LeaseRequest, answer: Callable[[Lease | OutriderError], None]) -> None:
        answer = once(answer)
        OneWay(self._world, self.control_path).send(partial(self._ask_coordinator, request, answer))
        self.clock.after(CALL_S, partial(answer, Unavailable("does not answer", field="coordinator")))

    def _ask_coordinator(self, request: LeaseRequest, answer: Callable[[Lease | OutriderError], None]) -> None:
        OneWay(self._world, self.control_path).send(partial(answer, self._coordinator.answer(request)))

    def _report(self, verifier: str, tokens: int = 0) -> None:
        """Report the end of a text; an empty name of the verifier gives back a lease that nobody used."""
        report = SessionReport(self.habits.session, MODEL, verifier, committed_tokens=tokens)
        OneWay(self._world, self.control_path).send(partial(self._coordinator.report, report))

    # --- streams, as the shipped loop opens and leaves them ---

    def _attempt(self) -> None:
        if self.over:
            return
        if not self.attempts.wanted:
            self._waits = True
            return
        self.attempts.begin()
        elsewhere, self._elsewhere = self._elsewhere, None
        if elsewhere is not None:
            self._leased(elsewhere)
        else:
            self._lease(self._request(self.attempts.avoid), self._leased)

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
            self._report("")
            self._waits = True
            return
        self.attempts.begin()
        verifier, path = self.verifiers[result.verifier]
        self.address = verifier.name
        self._answered = False
        self.call = call = SimulatedCall(
            self._world, path, self.received, self.broken, verifier, encoded=self.habits.encoded
        )
        self._world.counts["streams"] += 1
        self.note("opens a stream to", verifier.name)
        self.handle(StreamReady(result.token, self._known.get(verifier.name)))
        self.clock.after(OPEN_S, partial(self._time_out, call))
        if call is self.call:
            self._avoid, self._opened_at = self.attempts.avoid, self.clock.monotonic()
            self._silence = SilenceWatch(self._answers, self._budget.rules, self._opened_at)
            self._look_later(self._silence)

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
        if self._silence is not None:
            self._silence.hear(frame, self.clock.monotonic())
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
            if self.attempts.wanted:
                self.attempts.failed(self.address)
            self._leave()

    def broken(self, call: SimulatedCall, error: OutriderError) -> None:
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
        self._leave()

    def _starve(self, seconds: float) -> None:
        self.starved = True
        self._world.wait(min(seconds, RetryRules().abandon_after_s))

    def _leave(self) -> None:
        self._close_call()
        self.clock.after(self.attempts.pause_s, self._attempt)

    def _close_call(self) -> None:
        self._silence = None
        call, self.call = self.call, None
        if call is not None:
            call.leave()

    # --- a silent verifier, as the shipped loop leaves it ---

    def _look_later(self, watch: SilenceWatch) -> None:
        self.clock.after(watch.next_look - self.clock.monotonic(), partial(self._look, watch, watch.next_look))

    def _look(self, watch: SilenceWatch, planned: float) -> None:
        if watch is not self._silence or self.machine.done or planned != watch.next_look:
            return
        word = watch.look(self.clock.monotonic(), self.machine.round_trip_s)
        if isinstance(word, Silent):
            self._find_another(watch, word)
            return
        if word is not None and self.call is not None:
            self.call.send_up(word)
        self._look_later(watch)

    def _find_another(self, watch: SilenceWatch, word: Silent) -> None:
        """Leave the stream for a verifier that answers in time, or look again some time later."""
        settle: Callable[[Lease | None], None] = once(partial(self._settle, watch))

        def granted(result: Lease | OutriderError) -> None:
            if isinstance(result, OutriderError):
                settle(None)
            else:
                self._knock(result, settle)

        if not self._budget.allows(self.address, self._opened_at, self.clock.monotonic()):
            settle(None)
            return
        self.clock.after(max(ANSWER_WITHIN_S, word.bound_s), partial(settle, None))
        avoid = (*(name for name in self._avoid if name != self.address), self.address)
        self._lease(self._request(avoid, suspected=True), granted)

    def _knock(self, lease: Lease, settle: Callable[[Lease | None], None]) -> None:
        """Connect to the verifier of a lease, which answers if it runs and can be reached."""
        verifier, path = self.verifiers[lease.verifier]

        def answer() -> None:
            if verifier.is_up:
                verifier.process.serve(lambda: OneWay(self._world, path).send(partial(settle, lease)))

        OneWay(self._world, path).send(answer)

    def _settle(self, watch: SilenceWatch, found: Lease | None) -> None:
        if watch is not self._silence or self.call is None:
            return
        now = self.clock.monotonic()
        if found is None or not watch.silent or self.machine.done:
            watch.postpone(now)
            if not self.machine.done:
                self._look_later(watch)
            return
        self._budget.take(self.address, self._opened_at, now)
        self._world.counts["left for silence"] += 1
        self._elsewhere = found
        self.note(self.address, "is silent; leaves it for", found.verifier)
        self.broken(self.call, Unavailable(f"verifier {self.address} is silent"))

    # --- the machine ---

    def handle(self, event: EdgeEvent) -> None:
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
