"""An edge of a small world: its machine, and a shell that holds what the machine does not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import checked_simulation
from small_rules import (
    PROMPT,
    Action,
    AnyDrafter,
    Rules,
    Violation,
    any_idle_s,
    drafts_of,
    job_tokens,
    known_measurements,
    terms,
)
from small_states import Interned

from outrider.proto.errors import Unavailable
from outrider.proto.policy import Window
from outrider.proto.policy.selector import StaticSelector
from outrider.proto.session import (
    CatchUpJob,
    CaughtUp,
    Disconnected,
    Done,
    Drafted,
    DraftJob,
    EdgeEvent,
    EdgeSession,
    Emit,
    Reopen,
    Selection,
    Send,
    Started,
    StopRequested,
    StreamReady,
    TeacherForced,
    TurnBegun,
)
from outrider.proto.session.verifier import VerifierSession
from outrider.proto.types import FinishReason, Grammar, GrammarKind, Sampling, token_ids

MINUTE_S = 61.0  # a little more than a text may go without a verifier
LEAVE = -1  # in place of a frame: the stream is left


class SmallEdge:
    """One text, and further turns.

    Attributes:
        now: time on its clock.
        job: job of its drafters that runs.
        prefixes: what each drafter has read.
        reopens: whether it wants another stream.
        emitted: tokens of the present turn that the user has.
        done: how the present turn has ended; None: it runs.
        turn: turns begun after the first.
        alone_s: time without a verifier since the newest token, in seconds.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.now = 0.0
        frame = checked_simulation.open_frame(
            prompt=PROMPT,
            sampling=self.sampling,
            drafting=rules.drafters > 0,
            trees=rules.trees,
            keep_s=300.0 if rules.turns else 0.0,
            drafts_here=rules.own or None,
        )
        selector, drafters = AnyDrafter() if rules.switches else StaticSelector(), ("a", "b")[: max(1, rules.drafters)]
        self.edge = EdgeSession(
            frame,
            Window(rules.window),
            measurements=known_measurements(),
            selection=Selection(selector, drafters),
            job_tokens=job_tokens,
        )
        if rules.idles:
            self.edge._meter.idle_s = any_idle_s  # type: ignore[method-assign]
        self.job: DraftJob | CatchUpJob | None = None
        self.prefixes: list[tuple[int, ...]] = [()] * max(1, rules.drafters)
        self.reopens = True
        self.emitted = 0
        self.done: Done | None = None
        self.turn = 0
        self.alone_s = 0.0
        self._said: list[int] = []
        self._frames = Interned()
        self._handle(Started())

    @property
    def sampling(self) -> Sampling:
        """Settings of every turn."""
        grammar = Grammar(GrammarKind.LARK, "letters") if self.rules.grammar else None
        return Sampling(max_tokens=self.rules.tokens, grammar=grammar)

    @property
    def over(self) -> bool:
        """Whether the last turn has ended."""
        return self.done is not None and self.turn == self.rules.turns

    def options(self) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
        """Return the events that come by themselves, and those that may come."""
        comes: list[Action] = []
        if self.job is not None:
            comes += [("job", tokens) for tokens in self._results(self.job)]
        if self.done is not None and not self.over:
            comes.append(("turn",))
        may: list[Action] = [("minute",)]
        if self.done is None:
            may.append(("stop",))
        return tuple(comes), tuple(may)

    def _results(self, job: DraftJob | CatchUpJob) -> Iterator[tuple[int, ...]]:
        """Yield what may come of a job."""
        if isinstance(job, CatchUpJob):
            yield ()
        elif job.count:
            yield from self.rules.results(self.prefixes[job.drafter][: job.truncate_to] + job.extend_with, job.count)
        else:  # it reads the chain, and shows what it would have proposed
            prefix = self.prefixes[job.drafter][: job.truncate_to] + job.extend_with
            chain = range(max(len(self.edge.transcript), job.truncate_to + job.skip), len(prefix))
            hits = tuple(self.rules.text_after(prefix[:end], 1)[0] for end in chain)
            yield hits
            yield from (each for each in itertools.product(self.rules.proposals, repeat=len(chain)) if each != hits)

    # --- events ---

    def happen(self, event: Action, frames: Interned) -> tuple[int, ...]:
        """Take an event in; return the numbers of the frames to send, and `LEAVE` where the stream is left."""
        self._frames, self._said = frames, []
        kind, *about = event
        getattr(self, "_" + kind)(*about)
        self._tidy()
        said, self._said = tuple(self._said), []
        return said

    def _frame(self, number: int) -> None:
        self._handle(self._frames[number])

    def _lost(self, number: int) -> None:
        self._handle(Disconnected(self._frames[number]))

    def _broken(self) -> None:
        self._handle(Disconnected(Unavailable("the link broke")))

    def _open(self, name: str) -> None:
        self.reopens = False
        opened = VerifierSession(self.edge._text.frame, terms(self.rules, name), 0.0).opened()
        self._handle(StreamReady(b"", opened if self.rules.early else None))

    def _minute(self) -> None:
        self.now += MINUTE_S
        if not self.edge.connected:
            self.alone_s += MINUTE_S

    def _stop(self) -> None:
        self._handle(StopRequested())

    def _turn(self) -> None:
        self.turn += 1
        self.done, self.emitted, self.alone_s = None, 0, 0.0
        self._handle(TurnBegun(len(self.edge.transcript), PROMPT, self.sampling))

    def _job(self, tokens: tuple[int, ...]) -> None:
        job, self.job = self.job, None
        assert job is not None
        drafts = drafts_of(self.rules, tokens)
        if isinstance(job, CatchUpJob):
            prefix = self.prefixes[job.drafter][: job.truncate_to] + job.tokens
            self.prefixes[job.drafter] = prefix
            known = drafts_of(self.rules, prefix[job.start :])
            self._handle(CaughtUp(job, TeacherForced(known, (-1.0,) * job.score), 0.001))
            return
        prefix = self.prefixes[job.drafter][: job.truncate_to] + job.extend_with
        start = job.truncate_to + job.skip
        forced = drafts_of(self.rules, prefix[start : start + job.teacher_forced])
        if not job.count:
            forced, drafts = (*forced[: len(forced) - len(tokens)], *drafts), ()
        self.prefixes[job.drafter] = prefix + token_ids(drafts)
        self._handle(Drafted(job, drafts, 0.001, TeacherForced(forced)))

    # --- the shell ---

    def _handle(self, event: EdgeEvent) -> None:
        for instruction in self.edge.handle(event, self.now):
            match instruction:
                case Send(frame):
                    self._said.append(self._frames.number(frame))
                case DraftJob() | CatchUpJob():
                    self._begin(instruction)
                case Emit():
                    self._emit(instruction)
                case Reopen():
                    self._said.append(LEAVE)
                    self.reopens = True
                case Done():
                    self._end(instruction)

    def _begin(self, job: DraftJob | CatchUpJob) -> None:
        if self.job is not None:
            raise Violation("two jobs run at once")
        self.job = job
        if isinstance(job, CatchUpJob):
            return
        prefix = self.prefixes[job.drafter][: job.truncate_to] + job.extend_with
        wanted, end = (*self.edge.transcript, *self.edge._tree.tokens), job.branch if job.branch >= 0 else None
        if len(prefix) != job.start or prefix[:end] != wanted[:end]:
            raise Violation(f"drafter {job.drafter} would follow {prefix}, not {wanted}")

    def _emit(self, emit: Emit) -> None:
        before = self.edge.prompt_length + self.emitted
        if emit.start != before:
            raise Violation(f"the user has {self.emitted} tokens, and gets those from {emit.start} on")
        ids = token_ids(emit.tokens)
        if ids != self.rules.text_after(tuple(self.edge.transcript[:before]), len(ids)):
            raise Violation(f"{ids} is not the target's text at {before}")
        self.emitted += len(ids)
        self.alone_s = 0.0

    def _end(self, done: Done) -> None:
        if self.done is not None:
            raise Violation("the text ends twice")
        self.done = done
        if done.error is not None and not (isinstance(done.error, Unavailable) and self.alone_s):
            raise Violation(f"the text is lost, and was never for a minute without a verifier: {done.error!r}")
        if done.finish is FinishReason.LENGTH and self.emitted != self.rules.tokens:
            raise Violation(f"the text ends after {self.emitted} tokens")
        if done.finish not in (FinishReason.LENGTH, FinishReason.CANCELLED, None):
            raise Violation(f"the text ends for {done.finish}")
        if not self.edge.connected or self.over:
            self._said.append(LEAVE)

    def _tidy(self) -> None:
        """Forget what drafters have read beyond what is relied on."""
        for drafter in range(len(self.prefixes)):
            kept = self.edge._selection.read(drafter)
            if self.job is not None and self.job.drafter == drafter:
                kept = self.job.truncate_to
            self.prefixes[drafter] = self.prefixes[drafter][:kept]
