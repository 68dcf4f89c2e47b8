"""The edge's loop: draft, send, apply commits. All rules are the session machine's; this moves its instructions."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor

from outrider.edge.drafters.protocol import DraftState, Proposal
from outrider.edge.link import Channels, Stream
from outrider.edge.routes import Route
from outrider.proto.errors import Internal, OutriderError, Unavailable
from outrider.proto.session import Done, DraftJob, EdgeInstruction, EdgeSession, Emit, Reopen, Send
from outrider.proto.types import CloudFrame, Commit, EdgeFrame, FinishReason, Goaway, Opened

BLOCK_S = 0.004  # drafting time between looks at what the verifier has said


def block_tokens(drafting_s: float) -> int:
    """Tokens a drafting job, where one takes `drafting_s` seconds; 0: not known yet."""
    return max(1, min(8, int(BLOCK_S / max(1e-4, drafting_s))))


class Journal:
    """Sees what one text does and when, on the monotonic clock; this one looks away."""

    def drafted(self, began: float, ended: float, tokens: int) -> None:
        """A drafting job."""

    def sent(self, frame: EdgeFrame, at: float) -> None:
        """A frame that was put on the stream."""

    def received(self, frame: CloudFrame, at: float) -> None:
        """A frame that came."""


class Decoding:
    """One text being decoded: a session machine with its stream, its drafter and the thread that drafts."""

    def __init__(
        self,
        machine: EdgeSession,
        route: Route,
        session: str,
        *,
        channels: Channels,
        journal: Journal,
        drafter: DraftState | None,
        thread: ThreadPoolExecutor,
        open_timeout_s: float,
    ) -> None:
        self.machine = machine
        self._route = route
        self._channels = channels
        self._journal = journal
        self._session = session
        self._drafter = drafter
        self._thread = thread
        self._open_timeout_s = open_timeout_s
        self._stream: Stream | None = None
        self._address = ""
        self._reopen: Reopen | None = None
        self._lost: list[str] = []
        self._wake = asyncio.Event()
        self._emitted: asyncio.Queue[Emit | Done] = asyncio.Queue()

    async def run(self) -> AsyncGenerator[Emit | Done]:
        """Committed tokens as they come, and at last Done. Leaving early cancels the text everywhere."""
        tasks = [asyncio.create_task(self._converse()), asyncio.create_task(self._draft())]
        try:
            while True:
                item = await self._next_emitted(tasks)
                yield item
                if isinstance(item, Done):
                    return
        finally:
            self._apply(self.machine.on_cancel())
            await self._close_stream()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._drafter is not None:
                with contextlib.suppress(RuntimeError):  # the client is closed, and the thread with it
                    self._thread.submit(self._drafter.close)  # behind a job that may still run there

    def stop(self, finish: FinishReason) -> None:
        """End the text from this side; Done follows."""
        self._apply(self.machine.on_cancel(finish))

    async def _next_emitted(self, tasks: list[asyncio.Task[None]]) -> Emit | Done:
        """The next item; a defect in one of the tasks is raised here instead of waiting for ever."""
        getting = asyncio.create_task(self._emitted.get())
        await asyncio.wait([getting, *(t for t in tasks if not t.done())], return_when=asyncio.FIRST_COMPLETED)
        while not getting.done():
            for task in tasks:
                if task.done() and task.exception() is not None:
                    getting.cancel()
                    task.result()
            await asyncio.wait([getting], timeout=0.05)
        return getting.result()

    # --- draft ---

    async def _draft(self) -> None:
        if self._drafter is None:
            return
        while not self.machine.done:
            job = self.machine.next_job(block_tokens(self.machine.drafting_s))
            if job is None:
                self._apply(self.machine.on_idle(time.monotonic()))
                self._wake.clear()  # set by that itself; nothing else can have happened meanwhile
                await self._wake.wait()
                self._wake.clear()
                continue
            began = time.monotonic()
            try:
                proposal = await asyncio.get_running_loop().run_in_executor(self._thread, self._propose, job)
            except OutriderError as error:
                self._apply(self.machine.on_drafter_failed(error))
                return
            except Exception as error:  # a drafter may be anybody's code, and no text may fail for it
                self._apply(self.machine.on_drafter_failed(Internal(f"{type(error).__name__}: {error}")))
                return
            now = time.monotonic()
            self._journal.drafted(began, now, len(proposal.tokens))
            # All that it took counts: the thread may have been at work for other texts, and so it may be next time.
            self._apply(self.machine.on_drafted(job, proposal.tokens, proposal.q, now - began, now))

    def _propose(self, job: DraftJob) -> Proposal:
        """In the drafting thread."""
        assert self._drafter is not None  # noqa: S101 - _draft returns without one
        self._drafter.truncate(job.truncate_to)
        self._drafter.extend(job.extend_with)
        return self._drafter.propose(job.count)

    # --- send, apply commits ---

    def _apply(self, instructions: list[EdgeInstruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Send(frame):
                    if self._stream is not None:
                        self._stream.send(frame)
                        self._journal.sent(frame, time.monotonic())
                case Emit() | Done():
                    self._emitted.put_nowait(instruction)
                case Reopen():
                    self._reopen = instruction
        self._wake.set()

    async def _converse(self) -> None:
        """Streams, one after the other, until the text is done."""
        while not self.machine.done:
            self._reopen = None
            try:
                await self._one_stream()
            except OutriderError as error:
                self._apply(self.machine.on_disconnected(error, time.monotonic()))
            await self._close_stream()
            if self._reopen is not None:
                await asyncio.sleep(self._reopen.after_s)

    async def _one_stream(self) -> None:
        lease = await self._route.lease(self._session, tuple(self._lost[-3:]))
        self._address = lease.address
        stream = self._stream = self._channels.open_stream(lease.address, self.machine.statistics)
        stream.send(self.machine.open_frame(lease.token, time.monotonic()))
        frames = stream.frames()
        try:
            async with asyncio.timeout(self._open_timeout_s):
                self._handle(await anext(frames))
            self._lost.clear()
            async for frame in frames:
                self._handle(frame)
                if self.machine.done or self._reopen is not None:
                    return
        except TimeoutError as error:
            raise Unavailable(f"{lease.address} did not answer within {self._open_timeout_s:g} s") from error
        finally:
            if not self.machine.done:
                self._lost.append(lease.verifier)
                self._channels.drop(lease.address, stream)

    async def _close_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            await self._channels.close_stream(self._address, stream)

    def _handle(self, frame: CloudFrame) -> None:
        now = time.monotonic()
        self._journal.received(frame, now)
        match frame:
            case Commit():
                self._apply(self.machine.on_commit(frame, now))
            case Opened():
                self._apply(self.machine.on_opened(frame, now))
            case Goaway():
                self._apply(self.machine.on_goaway(frame, now))
