"""An edge on a virtual clock: its session machine, and what carries instructions out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

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
from outrider.proto.types import CloudFrame, EdgeFrame, Goaway, Opened, token_ids
from research.simulator.clock import VirtualClock
from research.simulator.simulated_verifier import Link, SimulatedStream, SimulatedVerifier


class Drafters(Protocol):
    """The drafters of an edge. A job gives its result, and the seconds until it is there."""

    def draft(self, job: DraftJob) -> tuple[Drafted | DrafterFailed, float]: ...

    def catch_up(self, job: CatchUpJob) -> tuple[CaughtUp | DrafterFailed, float]: ...


class Simulation:
    """One text from Open to Done, and further turns on the same session.

    Attributes:
        emitted: [n] tokens of the turn that the user got.
        arrivals: [n] time of each, in seconds.
        active: [n] the active drafter when the token came.
    """

    def __init__(
        self,
        clock: VirtualClock,
        edge: EdgeSession,
        verifier: SimulatedVerifier,
        drafters: Drafters,
        new_link: Callable[[float], Link],
        opened: Opened | None = None,
    ) -> None:
        """Join an edge that no event has reached yet and a verifier, perhaps of other edges too.

        `new_link` makes the link of a stream that opens at a time; `opened` is the verifier's answer to another text.
        """
        self.clock = clock
        self.edge = edge
        self.verifier = verifier
        self.emitted: list[int] = []
        self.arrivals: list[float] = []
        self.active: list[int] = []
        self.done: Done | None = None
        self.num_streams = 0
        self.stream: SimulatedStream | None = None
        self._drafters = drafters
        self._new_link = new_link
        self._opened = opened
        self._reopening = False

    def run(self) -> Done:
        """Run until the text is done."""
        self.begin()
        while self.done is None:
            self.clock.advance()
        return self.done

    def begin(self) -> None:
        self.handle(Started())
        self.open_stream()

    def handle(self, event: EdgeEvent) -> None:
        active = self.edge.drafter  # the next one may be chosen with the same event
        for instruction in self.edge.handle(event, self.clock.now):
            if isinstance(instruction, Emit):
                self.emitted += token_ids(instruction.tokens)
                self.arrivals += [self.clock.now] * len(instruction.tokens)
                self.active += [active] * len(instruction.tokens)
            self.follow(instruction)

    def follow(self, instruction: EdgeInstruction) -> None:
        match instruction:
            case Send(frame):
                self.send(frame)
            case DraftJob():
                self._later(*self._drafters.draft(instruction))
            case CatchUpJob():
                self._later(*self._drafters.catch_up(instruction))
            case Reopen(after_s, _):
                self._leave_stream()
                if not self._reopening:
                    self._reopening = True
                    self.clock.at(self.clock.now + after_s, self._reopen)
            case Done():
                self.done = instruction
                if not self.edge.connected:
                    self._leave_stream()

    def send(self, frame: EdgeFrame) -> None:
        if self.stream is not None:
            self.stream.send_up(frame)

    def open_stream(self) -> SimulatedStream:
        self.num_streams += 1
        self.stream = stream = SimulatedStream(self.clock, self._new_link(self.clock.now), self.verifier, self.receive)
        self.handle(StreamReady(b"", self._opened))
        return stream

    def lose_stream(self, stream: SimulatedStream, error: OutriderError) -> None:
        """Let a stream break, unless it was left before."""
        if stream.is_open and stream is self.stream:
            stream.close()
            self.handle(Disconnected(error))

    def receive(self, stream: SimulatedStream, frame: CloudFrame) -> None:
        """Take a frame that has arrived at the edge, unless its stream was left."""
        if stream is self.stream:
            if isinstance(frame, Goaway):
                stream.close()
            elif isinstance(frame, Opened):
                self._opened = frame
            self.handle(frame)

    def _leave_stream(self) -> None:
        if self.stream is not None:
            self.stream.close()

    def _reopen(self) -> None:
        self._reopening = False
        if self.done is None:
            self.open_stream()

    def _later(self, event: EdgeEvent, seconds: float) -> None:
        self.clock.at(self.clock.now + seconds, lambda: self.handle(event))
