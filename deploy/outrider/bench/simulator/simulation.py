"""An edge and its verifier on a virtual clock: both session machines, and what carries instructions out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from outrider.bench.simulator.clock import VirtualClock
from outrider.bench.simulator.verifier import SimulatedVerifier
from outrider.proto.errors import OutriderError
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
    Send,
    Started,
    StreamReady,
)
from outrider.proto.types import CloudFrame, EdgeFrame, Goaway, token_ids


class Link(Protocol):
    """Carries the frames of one stream."""

    def up(self, frame: EdgeFrame, now: float) -> Iterable[tuple[float, EdgeFrame]]:
        """Return when a frame sent now arrives, and as what: once, or more often on a bad link."""
        ...

    def down(self, frame: CloudFrame, now: float) -> Iterable[tuple[float, CloudFrame]]:
        """Return the same for a frame from the verifier."""
        ...

    def arrived_up(self) -> None:
        """Note that a frame has arrived at the verifier."""

    def arrived_down(self) -> None:
        """Note that a frame has arrived at the edge."""


class Drafters(Protocol):
    """The drafters of an edge: what each makes of its jobs, and how many seconds later."""

    def draft(self, job: DraftJob) -> tuple[Drafted | DrafterFailed, float]:
        """Propose."""
        ...

    def catch_up(self, job: CatchUpJob) -> tuple[CaughtUp | DrafterFailed, float]:
        """Read what others have committed."""
        ...


class Stream:
    """A stream over a link, until its edge leaves it."""

    def __init__(
        self,
        clock: VirtualClock,
        link: Link,
        verifier: SimulatedVerifier,
        received: Callable[[Stream, CloudFrame], None],
    ) -> None:
        self.is_open = True
        self._clock = clock
        self._link = link
        self._verifier = verifier
        self._received = received

    def send_up(self, frame: EdgeFrame) -> None:
        """Put a frame on its way to the verifier."""
        for arrival, copy in self._link.up(frame, self._clock.now):
            self._clock.at(arrival, lambda copy=copy: self._arrive_up(copy))  # type: ignore[misc]

    def send_down(self, frame: CloudFrame) -> None:
        """Put a frame on its way to the edge."""
        for arrival, copy in self._link.down(frame, self._clock.now):
            self._clock.at(arrival, lambda copy=copy: self._arrive_down(copy))  # type: ignore[misc]

    def close(self) -> None:
        """Lose what is on its way, and free what the verifier holds for it."""
        self.is_open = False
        self._verifier.release(self)

    def _arrive_up(self, frame: EdgeFrame) -> None:
        if self.is_open:
            self._link.arrived_up()
            self._verifier.receive(self, frame)

    def _arrive_down(self, frame: CloudFrame) -> None:
        if self.is_open:
            self._link.arrived_down()
            self._received(self, frame)


class Simulation:
    """One text from Open to Done, and further turns on the same session.

    Attributes:
        edge: the session machine of the edge.
        emitted: [n] tokens of the turn, as the user got them.
        arrivals: [n] seconds, when each came.
        active: [n] the active drafter when the token came.
        done: how the turn ended; None: it runs.
        num_streams: opened so far.
        stream: the newest.
    """

    def __init__(
        self,
        clock: VirtualClock,
        edge: EdgeSession,
        verifier: SimulatedVerifier,
        drafters: Drafters,
        new_link: Callable[[float], Link],
    ) -> None:
        """Join both sides.

        Args:
            clock: of the verifier.
            edge: that has begun a text and has not been told of anything yet.
            verifier: may have other edges.
            drafters: of the edge.
            new_link: makes that of a stream which opens at a time.
        """
        self.clock = clock
        self.edge = edge
        self.verifier = verifier
        self.emitted: list[int] = []
        self.arrivals: list[float] = []
        self.active: list[int] = []
        self.done: Done | None = None
        self.num_streams = 0
        self.stream: Stream | None = None
        self._drafters = drafters
        self._new_link = new_link
        self._reopening = False

    def run(self) -> None:
        """Run until the text is done.

        Raises:
            RuntimeError: nothing will ever happen again.
        """
        self.begin()
        while self.done is None:
            self.clock.advance()

    def begin(self) -> None:
        """Open the first stream."""
        self.handle(Started())
        self.open_stream()

    def handle(self, event: EdgeEvent) -> None:
        """Tell the edge's machine of an event, and do what it says."""
        active = self.edge.drafter  # the next one may be chosen with the same event
        for instruction in self.edge.handle(event, self.clock.now):
            if isinstance(instruction, Emit):
                self.emitted += token_ids(instruction.tokens)
                self.arrivals += [self.clock.now] * len(instruction.tokens)
                self.active += [active] * len(instruction.tokens)
            self.follow(instruction)

    def follow(self, instruction: EdgeInstruction) -> None:
        """Do what the edge's machine says."""
        match instruction:
            case Send(frame):
                self.send(frame)
            case DraftJob():
                self._later(*self._drafters.draft(instruction))
            case CatchUpJob():
                self._later(*self._drafters.catch_up(instruction))
            case Reopen(after_s, _):
                self.leave_stream()
                if not self._reopening:
                    self._reopening = True
                    self.clock.at(self.clock.now + after_s, self._reopen)
            case Done():
                self.done = instruction
                if not self.edge.connected:
                    self.leave_stream()

    def send(self, frame: EdgeFrame) -> None:
        """Put a frame on the stream."""
        if self.stream is not None:
            self.stream.send_up(frame)

    def open_stream(self) -> None:
        """Open a stream and send the machine's Open over it."""
        self.num_streams += 1
        self.stream = Stream(self.clock, self._new_link(self.clock.now), self.verifier, self.receive)
        self.handle(StreamReady(b""))

    def leave_stream(self) -> None:
        """Close the stream, if there is one."""
        if self.stream is not None:
            self.stream.close()

    def lose_stream(self, stream: Stream, error: OutriderError) -> None:
        """Let a stream break; nothing happens where it was left before."""
        if stream.is_open and stream is self.stream:
            stream.close()
            self.handle(Disconnected(error))

    def receive(self, stream: Stream, frame: CloudFrame) -> None:
        """Take a frame that has arrived at the edge; one of a stream that was left is lost."""
        if stream is self.stream:
            if isinstance(frame, Goaway):
                stream.close()
            self.handle(frame)

    def _reopen(self) -> None:
        self._reopening = False
        if self.done is None:
            self.open_stream()

    def _later(self, event: EdgeEvent, seconds: float) -> None:
        self.clock.at(self.clock.now + seconds, lambda: self.handle(event))
