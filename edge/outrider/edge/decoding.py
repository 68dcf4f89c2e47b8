"""Loop of an edge: draft, send, apply commits, as the instructions of the session machine say.

A stream whose verifier is silent is left only once another place to go to has answered over a connection of its own.
Where the whole link stands still, or there is no other verifier, nothing answers, and the stream stays: its session is
still there when the verifier wakes. A verifier whose connection alone is dead answers over the new one, and is opened
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from outrider.drafters.proposals import ProposalRule
from outrider.drafters.protocol import Drafter
from outrider.drafters.retrieval import RetrievalDrafter
from outrider.drafters.suffix_index import SuffixIndex
from outrider.edge.drafter_states import DrafterStates, TextDrafters, name_of
from outrider.edge.event_stream import Event, Finished, TextStream, Tokens, within
from outrider.edge.link.link import Channels, Stream
from outrider.edge.link.routes import Route
from outrider.proto.errors import Internal, OutriderError, Unavailable
from outrider.proto.plumbing.logs import about
from outrider.proto.policy.likely_branches import RUNNERS_UP
from outrider.proto.policy.suspicion import AnswerTimes, ReopenBudget, SilenceWatch, Silent
from outrider.proto.session import (
    CatchUpJob,
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
    Send,
    SharedMeasurements,
    Started,
    StopRequested,
    StreamReady,
    TurnBegun,
)
from outrider.proto.types import (
    CloudFrame,
    EdgeFrame,
    FinishReason,
    Lease,
    LeaseRequest,
    Opened,
    Pong,
    Provenance,
    Sampling,
    token_ids,
)

MAX_AVOIDED = 16  # verifiers that a lease request names
ANSWER_WITHIN_S = 2.0  # of another verifier; longer where answers usually take long

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Subject:
    """The session id, target and drafter (`none` without one) of a decoding."""

    session: str
    model: str
    drafter: str


class Observer:
    """Observer of one text's events, on the monotonic clock; this one does nothing.

    Attributes:
        metadata: sent to the verifier with every stream that is opened, such as a trace's `traceparent`.
    """

    metadata: tuple[tuple[str, str], ...] = ()

    def began(self, subject: Subject, machine: EdgeSession, at: float) -> None:
        """Note that the text begins; `machine.statistics` counts on until `ended`."""

    def lost(self, error: OutriderError, at: float) -> None:
        """Note that a stream broke or was refused; another may follow."""

    def ended(self, done: Done | None, at: float) -> None:
        """Note that the text is whole or has failed; None: it was left before."""

    def drafted(self, began: float, ended: float, tokens: int) -> None:
        """Note a drafting job, in monotonic seconds."""

    def sent(self, frame: EdgeFrame, at: float) -> None:
        """Note a frame that was put on the stream."""

    def received(self, frame: CloudFrame, at: float) -> None:
        """Note a frame that came."""


class Attempts:
    """Attempts of one text to reach verifiers, one stream after the other; its shell opens and closes the streams.

    Attributes:
        reopen: when to open the next stream, as the machine says; None: it has not said that.
    """

    def __init__(self, machine: EdgeSession) -> None:
        self.reopen: Reopen | None = None
        self._machine = machine
        self._lost: list[str] = []

    @property
    def avoid(self) -> tuple[str, ...]:
        """Verifiers that were just lost, the newest last."""
        return tuple(self._lost[-MAX_AVOIDED:])

    @property
    def wanted(self) -> bool:
        """Whether there is a text to open streams for."""
        return not self._machine.done

    @property
    def stays(self) -> bool:
        """Whether to read on from the stream that the verifier has answered."""
        return self._machine.connected and self.reopen is None

    @property
    def pause_s(self) -> float:
        """Seconds from the end of a stream to the next attempt."""
        return self.reopen.after_s if self.reopen is not None else 0.0

    def begin(self) -> None:
        self.reopen = None

    def answered(self) -> None:
        """Note that the verifier has answered the Open."""
        if self._machine.connected:  # else its terms were refused
            self._lost.clear()

    def failed(self, verifier: str) -> None:
        """Note that a stream to `verifier` broke, was refused or left while a text ran."""
        self._lost = [*(name for name in self._lost if name != verifier), verifier]


class Decoding:
    """Text being decoded: a session machine with its stream, its drafters and the thread that drafts.

    `run` decodes all of it. A conversation has `turn` after `turn`, with `begin_turn` between them, and `aclose`.

    Args:
        machine: the session.
        route: where verifiers are found.
        drafters: drafters of the text, or of its first turn, which draft in `thread`.
        open_timeout_s: limit of a verifier's first answer, in seconds.
        measured: measurements of texts of such sampling.
        on_opened: called with a verifier's answer to an Open.
        on_ended: called once for each text or turn, with this decoding and the seconds that it took.
        budget: budget of all texts here for leaving silent verifiers, with the rules of silence.
    """

    def __init__(
        self,
        machine: EdgeSession,
        route: Route,
        subject: Subject,
        *,
        channels: Channels,
        observer: Observer,
        drafters: TextDrafters,
        thread: ThreadPoolExecutor,
        open_timeout_s: float,
        measured: SharedMeasurements,
        on_opened: Callable[[Opened], None],
        on_ended: Callable[[Decoding, float], None],
        budget: ReopenBudget,
    ) -> None:
        self.machine = machine
        self.session = subject.session
        self.has = drafters
        self._route = route
        self._subject = subject
        self._channels = channels
        self._observer = observer
        self._thread = thread
        self._open_timeout_s = open_timeout_s
        self._measured = measured
        self._on_opened = on_opened
        self._on_ended = on_ended
        self._budget = budget
        self._eos_tokens = frozenset[int]()  # of the target, once a verifier has named them
        self._states = DrafterStates(self._rule())
        self._stream: Stream | None = None
        self._attempts = Attempts(machine)
        self._answers = AnswerTimes()  # of this session's verifiers so far
        self._silence: SilenceWatch | None = None  # of the stream that is open
        self._elsewhere: Lease | None = None  # where to go, if known already
        self._begun = asyncio.Event()  # set when a turn begins
        self._jobs: asyncio.Queue[tuple[DraftJob | CatchUpJob, Drafter]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._emitted: asyncio.Queue[Emit | Done | BaseException] = asyncio.Queue()
        self._stopped_by: FinishReason | None = None

    def run(self, text: TextStream, began: float, deadline: float | None) -> AsyncGenerator[Event]:
        """Yield the events of the whole text; leaving early cancels it everywhere.

        Args:
            text: makes text of tokens; the decoding stops where it sees a stop string.
            began: monotonic time of the text's beginning, in seconds.
            deadline: monotonic time by which it must end, in seconds; None: no limit.

        Raises:
            DeadlineExceeded: the time is over; what came until then has been yielded.
            OutriderError: the text cannot be finished anywhere.
        """
        return self._events(text, began, deadline, self.aclose)

    def turn(self, text: TextStream, began: float, deadline: float | None) -> AsyncGenerator[Event]:
        """Yield the events of the first turn or the one that `begin_turn` began, like `run`; the session stays."""
        return self._events(text, began, deadline, self._cancel)

    async def _events(
        self, text: TextStream, began: float, deadline: float | None, leave: Callable[[], Awaitable[None]]
    ) -> AsyncGenerator[Event]:
        self._observer.began(self._subject, self.machine, time.monotonic())
        if not self._tasks:
            self._handle(Started())
            self._tasks = [asyncio.create_task(self._converse()), asyncio.create_task(self._run_jobs())]
            for task in self._tasks:
                task.add_done_callback(self._pass_defect_on)
        done: Done | None = None
        reported = False
        first_token_s = 0.0
        try:
            while done is None:
                item = await within(self._emitted.get(), deadline)
                if isinstance(item, BaseException):
                    raise item
                if isinstance(item, Done):
                    done = item if self._stopped_by is None else Done(self._stopped_by)
                elif not text.stopped:  # else it was on its way when the stop string was seen
                    first_token_s = first_token_s or time.monotonic() - began
                    event = _tokens_event(item, text)
                    if text.stopped:
                        self._stopped_by = FinishReason.STOP_STRING
                        self._handle(StopRequested(FinishReason.STOP_STRING))
                    yield event
            if done.error is not None:
                raise done.error
            rest = text.finish()
            reason = FinishReason.STOP_STRING if text.stopped else done.finish or FinishReason.CANCELLED
            seconds, reported = time.monotonic() - began, True
            self._on_ended(self, seconds)
            yield Finished(
                reason,
                rest,
                self.machine.statistics,
                seconds,
                first_token_s,
                text.stopped_by,
                self.machine.prompt_length,
            )
        finally:
            at = time.monotonic()
            try:
                await leave()
            finally:
                self._observer.ended(done, at)
                if not reported:
                    self._on_ended(self, time.monotonic() - began)

    def _pass_defect_on(self, task: asyncio.Task[None]) -> None:
        """Have whoever waits for the text get a defect of one of its tasks."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._emitted.put_nowait(error)

    async def _cancel(self) -> None:
        self._handle(StopRequested())

    def begin_turn(
        self,
        start: int,
        prompt: tuple[int, ...],
        sampling: Sampling,
        measured: SharedMeasurements,
        others: TextDrafters | None = None,
    ) -> None:
        """Go on with `prompt` after the first `start` tokens of the transcript, and drop what waits to be taken.

        Args:
            start: number of tokens that are kept.
            prompt: [n] new tokens.
            sampling: parameters of the turn.
            measured: measurements of texts of such sampling.
            others: drafters that take the place of those so far, where these have read the same; None: these go on.

        Raises:
            InvalidArgument: the turn cannot begin so; nothing has changed then.
        """
        another = measured.snapshot() if measured is not self._measured else None
        selection = others.selection if others is not None else None
        instructions = self._react(TurnBegun(start, prompt, sampling, another, selection), measured)
        self._measured = measured
        if others is not None:
            self.has = others
            kept = {name_of(drafter) for drafter in others.drafters}
            self._thread.submit(self._states.close, kept)  # after a job that may still run there
        self._emitted = asyncio.Queue()
        for task in self._tasks:
            if task.done():
                self._pass_defect_on(task)
        self._stopped_by = None
        self._states.rule = self._rule()
        if self._stream is not None:
            self._stream.statistics = self.machine.statistics
        self._apply(instructions)
        self._begun.set()

    def may_take(self, others: TextDrafters | None, prediction: SuffixIndex | None) -> bool:
        """Expect the next turn to be `prediction`, or anything; return whether the session can go on with `others`.

        The verifier's vectors must stay what they are, and a drafter must copy from the prediction, if there is one.
        None stands for the drafters so far.
        """
        others = others or self.has
        copiers = [drafter for drafter in others.drafters if isinstance(drafter, RetrievalDrafter)]
        for drafter in copiers:
            drafter.prediction = prediction
        return others.steering_request == self.has.steering_request and (bool(copiers) or prediction is None)

    async def aclose(self) -> None:
        """End the session here and at the verifier."""
        await self._cancel()
        try:
            await self._close_stream()
        finally:  # whoever waits for the end of the stream may be cancelled
            for task in self._tasks:
                task.cancel()
            with contextlib.suppress(RuntimeError):  # the client is closed, and the thread with it
                self._thread.submit(self._states.close)  # after a job that may still run there
            await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- draft ---

    async def _run_jobs(self) -> None:
        """Do the machine's jobs for the drafters, one after the other."""
        loop = asyncio.get_running_loop()
        while True:
            job, drafter = await self._jobs.get()
            try:
                done = await loop.run_in_executor(self._thread, self._states.do, job, drafter)
            except Exception as error:  # a drafter may be anybody's code, and no text may fail for it
                self._drafter_failed(error, job.drafter, drafter.name)
                continue
            if isinstance(done, Drafted):
                now = time.monotonic()
                self._observer.drafted(now - done.seconds, now, len(done.drafts))
            self._handle(done)

    def _drafter_failed(self, error: Exception, drafter: int, name: str) -> None:
        """Go on without the drafter; a foreign error's message is not logged, since it may hold the text."""
        extra = about(self.session, self.machine.verifier, error)
        log.warning("the drafter %s failed; the text goes on without", name, extra=extra)
        known = error if isinstance(error, OutriderError) else Internal(f"{type(error).__name__}: {error}")
        self._handle(DrafterFailed(known, drafter))

    # --- send, apply commits ---

    def _handle(self, event: EdgeEvent) -> None:
        self._apply(self._react(event, self._measured))

    def _react(self, event: EdgeEvent, measured: SharedMeasurements) -> list[EdgeInstruction]:
        """Give the machine an event and what other texts have measured, and share what it measures."""
        machine = self.machine
        instructions = machine.handle(event, time.monotonic(), measured.newer_than(machine.measurements))
        measured.newest = machine.measurements
        return instructions

    def _apply(self, instructions: list[EdgeInstruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Send(frame):
                    if self._stream is not None:
                        self._stream.send(frame)
                        self._observer.sent(frame, time.monotonic())
                case Emit() | Done():
                    self._emitted.put_nowait(instruction)
                case DraftJob() | CatchUpJob():
                    self._jobs.put_nowait((instruction, self.has.drafters[instruction.drafter]))
                case Reopen():
                    self._attempts.reopen = instruction

    async def _converse(self) -> None:
        """Open streams, one after the other, while there is a text to finish or a session to keep."""
        while True:
            while not self._attempts.wanted:
                self._begun.clear()
                await self._begun.wait()
            self._attempts.begin()
            try:
                await self._one_stream()
            except OutriderError as error:
                self._observer.lost(error, time.monotonic())
                log.info("the stream is lost: %s", error, extra=about(self.session, self.machine.verifier, error))
                self._handle(Disconnected(error))
            await self._close_stream()
            await asyncio.sleep(self._attempts.pause_s)

    async def _one_stream(self) -> None:
        machine, attempts = self.machine, self._attempts
        avoid = attempts.avoid
        lease, self._elsewhere = self._elsewhere, None
        if lease is None:
            lease = await self._route.lease(self._lease_request(avoid), machine.transcript)
        if not attempts.wanted:  # the turn was left meanwhile, and its end reported before the lease came
            await self._route.give_back(self.session)
            return
        attempts.begin()  # this stream is also for a turn that has begun meanwhile
        observer, quiet = self._observer, machine.quiet
        stream = self._stream = self._channels.open_stream(lease, machine.statistics, observer.metadata, quiet)
        expected = stream.connection.opened
        if expected is not None:
            self._follow_terms(expected)
        machine.take_service(lease.service, unkept=lease.service_unkept)
        self._handle(StreamReady(lease.token, expected))
        receiving = asyncio.create_task(self._receive_all(stream, lease))
        guarding = asyncio.create_task(self._find_another(stream, lease, avoid))
        broken = True
        try:
            await asyncio.wait([receiving, guarding], return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                self._elsewhere = guarding.result()
                raise Unavailable(f"verifier {lease.verifier} is silent")
            receiving.result()
            broken = attempts.wanted
        finally:
            for task in (receiving, guarding):
                task.cancel()
            await asyncio.gather(receiving, guarding, return_exceptions=True)
            if broken and self._stream is stream:  # else it was closed here
                attempts.failed(lease.verifier)
                if not stream.refused:
                    self._channels.retire(lease.address, stream.connection)

    def _lease_request(self, avoid: tuple[str, ...], *, suspected: bool = False) -> LeaseRequest:
        machine = self.machine
        return LeaseRequest(
            self._subject.model,
            self.session,
            avoid=avoid,
            precision=machine.precision,
            epoch=machine.next_epoch,
            suspected=suspected,
            context_length=machine.needed_context,
            service=machine.service,
        )

    async def _close_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            await self._channels.close_stream(stream)

    async def _receive_all(self, stream: Stream, lease: Lease) -> None:
        """Take the stream's frames until its session ends or is to be opened again."""
        frames = stream.frames()
        try:
            async with asyncio.timeout(self._open_timeout_s):
                while isinstance(frame := await anext(frames), Pong):
                    self._receive(frame)
                self._receive(frame)
        except TimeoutError as error:
            message = f"{lease.address} did not answer within {self._open_timeout_s:g} s"
            raise Unavailable(message, code="OUT-102") from error
        self._attempts.answered()
        while self._attempts.stays:
            self._receive(await anext(frames))

    def _receive(self, frame: CloudFrame) -> None:
        now = time.monotonic()
        if self._silence is not None:
            self._silence.hear(frame, now)
        self._observer.received(frame, now)
        self._handle(frame)
        if isinstance(frame, Opened):
            self._on_opened(frame)
            if self._stream is not None:
                self._stream.connection.opened = frame
            self._follow_terms(frame)

    def _follow_terms(self, terms: Opened) -> None:
        """Propose no EOS of the verifier's target where `min_tokens` forbids it."""
        self._eos_tokens = frozenset(terms.eos_tokens)
        if self.machine.sampling.min_tokens and self._eos_tokens != self._states.rule.eos_tokens:
            self._states.rule = self._rule()

    def _rule(self) -> ProposalRule:
        machine = self.machine
        return ProposalRule(
            machine.sampling, prompt_length=machine.prompt_length, runners_up=RUNNERS_UP, eos_tokens=self._eos_tokens
        )

    # --- leave a silent verifier ---

    async def _find_another(self, stream: Stream, lease: Lease, avoid: tuple[str, ...]) -> Lease:
        """Watch `stream`, just opened by `lease`, until it is to be left; return the lease of where to go."""
        machine, opened_at = self.machine, time.monotonic()
        watch = self._silence = SilenceWatch(self._answers, self._budget.rules, opened_at)
        while True:
            if machine.done:  # an idle session is not watched
                self._begun.clear()
                await self._begun.wait()
                watch.resume(time.monotonic())
            await asyncio.sleep(max(0.0, watch.next_look - time.monotonic()))
            if machine.done:
                continue
            word = watch.look(time.monotonic(), machine.round_trip_s)
            if isinstance(word, Silent):
                if not word.again:
                    machine.statistics.suspected += 1
                    line = "verifier %s is silent for %.1f s, %.1f s are usual at most; looking for another"
                    where = about(self.session, lease.verifier)
                    log.info(line, lease.verifier, word.silence_s, word.bound_s, extra=where)
                found = await self._another(word, lease, avoid, opened_at)
                now = time.monotonic()
                if machine.done:  # the turn was left meanwhile, and its end reported before the lease came
                    await self._route.give_back(self.session)
                elif watch.silent and found is not None:
                    self._budget.take(lease.verifier, opened_at, now)
                    machine.statistics.reopened += 1
                    return found
                watch.postpone(now)
            elif word is not None:
                stream.send(word)

    async def _another(self, word: Silent, lease: Lease, avoid: tuple[str, ...], opened_at: float) -> Lease | None:
        """Return a lease of a verifier that answers now; None: none does, or suspicion has cost enough already."""
        if not self._budget.allows(lease.verifier, opened_at, time.monotonic()):
            return None
        avoid = (*(name for name in avoid if name != lease.verifier), lease.verifier)
        try:
            async with asyncio.timeout(max(ANSWER_WITHIN_S, word.bound_s)):
                found = await self._route.lease(self._lease_request(avoid, suspected=True), self.machine.transcript)
                await self._channels.renew(found)
                return found
        except (OutriderError, TimeoutError) as error:
            log.debug("no other verifier answers: %r", error)
            return None


def _tokens_event(item: Emit, text: TextStream) -> Tokens:
    """Return the event of emitted tokens, as far as a stop string lets them be part of the text."""
    pieces = text.push(token_ids(item.tokens))
    n = len(pieces)
    provenance = tuple(Provenance.DRAFT if drafted else Provenance.TARGET for drafted in item.drafted[:n])
    return Tokens(item.start, item.tokens[:n], provenance, pieces, item.prompt)
