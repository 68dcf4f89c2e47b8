"""Loop of an edge: draft, send, apply commits, as the instructions of the session machine say."""

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
from outrider.edge.link.attempts import Attempts
from outrider.edge.link.link import Channels, Stream, lease_metadata
from outrider.edge.link.routes import Route
from outrider.edge.link.silence_guard import SilenceGuard
from outrider.edge.pool.text_drafters import DrafterStates, TextDrafters, name_of
from outrider.proto.errors import Internal, OutriderError, Unavailable
from outrider.proto.plumbing.logs import about
from outrider.proto.policy.likely_branches import RUNNERS_UP
from outrider.proto.policy.suspicion import ReopenBudget
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
from outrider.proto.types import CloudFrame, EdgeFrame, FinishReason, Lease, Opened, Pong, Sampling

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


class Decoding:
    """Text being decoded: a session machine with its stream, its drafters and the thread that drafts.

    `run` decodes all of it. A conversation has `turn` after `turn`, with `begin_turn` between them, and `aclose`.
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
        rule: ProposalRule,
        thread: ThreadPoolExecutor,
        open_timeout_s: float,
        measured: SharedMeasurements,
        on_opened: Callable[[Opened], None],
        budget: ReopenBudget,
    ) -> None:
        self.machine = machine
        self._on_opened = on_opened
        self._measured = measured
        self._route = route
        self._channels = channels
        self._observer = observer
        self._subject = subject
        self.session = subject.session
        self.has = drafters
        self._states = DrafterStates(rule)
        self._eos_tokens = rule.eos_tokens  # of the target, once a verifier has named them
        self._thread = thread
        self._open_timeout_s = open_timeout_s
        self._stream: Stream | None = None
        self._attempts = Attempts(machine)
        self._jobs: asyncio.Queue[tuple[DraftJob | CatchUpJob, Drafter]] = asyncio.Queue()
        self._begun = asyncio.Event()
        self._guard = SilenceGuard(machine, route, channels, subject.session, self._begun, budget)
        self._place: Lease | None = None  # where to go, if known already
        self._tasks: list[asyncio.Task[None]] = []
        self._emitted: asyncio.Queue[Emit | Done] = asyncio.Queue()
        self._stopped_by: FinishReason | None = None

    def run(self) -> AsyncGenerator[Emit | Done]:
        """Yield committed tokens as they come, and at last Done; leaving early cancels the text everywhere."""
        return self._items(self.aclose)

    def turn(self) -> AsyncGenerator[Emit | Done]:
        """Run the first turn or the one that `begin_turn` began; the session stays where it is kept."""
        return self._items(self._cancel)

    async def _items(self, leave: Callable[[], Awaitable[None]]) -> AsyncGenerator[Emit | Done]:
        self._observer.began(self._subject, self.machine, time.monotonic())
        if not self._tasks:
            self._handle(Started())
            self._tasks = [asyncio.create_task(self._converse()), asyncio.create_task(self._run_jobs())]
        done: Done | None = None
        try:
            while done is None:
                item = await self._next_emitted()
                if isinstance(item, Done):
                    item = done = item if self._stopped_by is None else Done(self._stopped_by)
                yield item
        finally:
            at = time.monotonic()
            try:
                await leave()
            finally:
                self._observer.ended(done, at)

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
        self._stopped_by = None
        self._make_rule()
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

    def stop(self, finish: FinishReason) -> None:
        """End the text from this side; Done with `finish` follows, also where the verifier ended the text meanwhile."""
        self._stopped_by = finish
        self._handle(StopRequested(finish))

    async def _next_emitted(self) -> Emit | Done:
        """Return the next item; raise a defect of one of the tasks instead of waiting for ever."""
        getting = asyncio.create_task(self._emitted.get())
        running = [task for task in self._tasks if not task.done()]
        try:
            await asyncio.wait([getting, *running], return_when=asyncio.FIRST_COMPLETED)
            while not getting.done():
                for task in self._tasks:
                    if task.done() and task.exception() is not None:
                        task.result()
                await asyncio.wait([getting], timeout=0.05)
            return getting.result()
        finally:
            getting.cancel()  # without effect where it is done

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
        lease, self._place = self._place, None
        if lease is None:
            lease = await self._route.lease(
                self.session, avoid, machine.transcript, machine.precision, machine.next_epoch, machine.needed_context
            )
        if not attempts.wanted:  # the turn was left meanwhile, and its end reported before the lease came
            await self._route.give_back(self.session)
            return
        attempts.begin()  # this stream is also for a turn that has begun meanwhile
        metadata: tuple[tuple[str, str | bytes], ...] = (*self._observer.metadata, *lease_metadata(lease))
        tls_name = lease.tls_name if lease.tls else None
        stream = self._stream = self._channels.open_stream(lease.address, self.machine.statistics, metadata, tls_name)
        expected = stream.connection.opened
        if expected is not None:
            self._follow_terms(expected)
        self._handle(StreamReady(lease.token, expected))
        receiving = asyncio.create_task(self._receive_all(stream, lease))
        guarding = asyncio.create_task(self._guard.find_another(stream, lease, avoid))
        broken = True
        try:
            await asyncio.wait([receiving, guarding], return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                self._place = guarding.result()
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
            raise Unavailable(f"{lease.address} did not answer within {self._open_timeout_s:g} s") from error
        self._attempts.answered()
        while self._attempts.stays:
            self._receive(await anext(frames))

    def _receive(self, frame: CloudFrame) -> None:
        self._guard.hear(frame)
        self._observer.received(frame, time.monotonic())
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
            self._make_rule()

    def _make_rule(self) -> None:
        machine = self.machine
        self._states.rule = ProposalRule(
            machine.sampling, prompt_length=machine.prompt_length, runners_up=RUNNERS_UP, eos_tokens=self._eos_tokens
        )
