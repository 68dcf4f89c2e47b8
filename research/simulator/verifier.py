"""A verifier on a virtual clock, with its session machines and the engine's rules of a batch, and streams to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from outrider.cloud.serving.batching import Batch, Batching, Share, credit_of
from outrider.cloud.serving.inbox import Inbox
from outrider.cloud.serving.stream_state import expects, pass_frame
from outrider.proto.session import Drafted, DrafterFailed, Verified, VerifierRules, VerifierSession
from outrider.proto.session.acceptance import branch_taken
from outrider.proto.types import (
    BlockBranch,
    CloudFrame,
    Commit,
    CommittedToken,
    Continue,
    DraftToken,
    EdgeFrame,
    Open,
    Ping,
    Pong,
    token_ids,
)
from research.simulator.clock import Costs, VirtualClock
from research.simulator.local import LocalThreads

FrameT = TypeVar("FrameT", EdgeFrame, CloudFrame)


class SimulatedTarget(Protocol):
    """A target without a model."""

    def after(self, transcript: Sequence[int], block: tuple[int, ...]) -> tuple[int, ...]:
        """Return the target's [k + 1] tokens after the transcript and after each of the drafts `block` [k]."""
        ...

    def reward(self, start: int, drafts: int) -> float | None:
        """Return the mean of min(1, p / q) over `drafts` drafts from position `start` on; None: not known."""
        ...


class Link(Protocol):
    """Carries the frames of one stream."""

    def up(self, frame: EdgeFrame, now: float) -> Iterable[tuple[float, EdgeFrame]]:
        """Return the arrivals at the verifier of a frame that is sent now: one, or more on a bad link."""
        ...

    def down(self, frame: CloudFrame, now: float) -> Iterable[tuple[float, CloudFrame]]:
        """Return the arrivals at the edge of a frame that is sent now."""
        ...


class SimulatedStream:
    """A stream over a link, until its edge leaves it."""

    def __init__(
        self,
        clock: VirtualClock,
        link: Link,
        verifier: SimulatedVerifier,
        received: Callable[[SimulatedStream, CloudFrame], None],
    ) -> None:
        self.is_open = True
        self._clock = clock
        self._link = link
        self._verifier = verifier
        self._received = received

    def send_up(self, frame: EdgeFrame) -> None:
        """Put a frame on its way to the verifier."""
        for arrival, copy in self._link.up(frame, self._clock.now):
            self._clock.at(arrival, partial(self._arrive, self._verifier.receive, copy))

    def send_down(self, frame: CloudFrame) -> None:
        """Put a frame on its way to the edge."""
        for arrival, copy in self._link.down(frame, self._clock.now):
            self._clock.at(arrival, partial(self._arrive, self._received, copy))

    def close(self) -> None:
        """Lose what is on its way, and free what the verifier holds for it."""
        self.is_open = False
        self._verifier.release(self)

    def _arrive(self, receive: Callable[[SimulatedStream, FrameT], None], frame: FrameT) -> None:
        if self.is_open:
            receive(self, frame)


@dataclass(slots=True, eq=False)
class SimulatedSlot:
    """A session of the verifier.

    Attributes:
        stream: stream that takes its frames to the edge.
        session: the session machine.
        num_computed_tokens: tokens of its transcript in the KV cache.
        ready_since: time from which it could have begun its next step, in seconds.
    """

    stream: SimulatedStream
    session: VerifierSession
    num_computed_tokens: int
    ready_since: float

    @property
    def num_uncomputed_tokens(self) -> int:
        """Committed tokens that the KV cache lacks; 1 while decoding: the last one."""
        return len(self.session.transcript) - self.num_computed_tokens


class SimulatedVerifier:
    """An engine without model or thread: it takes frames between steps, and steps as `Batching` says.

    Attributes:
        rules: rules of its sessions.
        batching: rules of a batch, with its measurements, which another verifier may continue.
    """

    def __init__(
        self,
        clock: VirtualClock,
        rules: VerifierRules,
        target: SimulatedTarget,
        costs: Costs,
        batching: Batching | None = None,
        local: LocalThreads | None = None,
    ) -> None:
        self.rules = rules
        self.batching = batching or Batching()
        self._clock = clock
        self._target = target
        self._costs = costs
        self._local = local
        self._slots: dict[SimulatedStream, SimulatedSlot] = {}
        self._waiting = Inbox(self._rung)
        self._busy = False
        self._alarm = math.inf

    def receive(self, stream: SimulatedStream, frame: EdgeFrame) -> None:
        """Take a frame that has arrived, after the step that is running; answer a Ping at once."""
        if isinstance(frame, Ping):
            slot = self._slots.get(stream)
            stream.send_down(Pong(frame.number, slot.session.epoch if slot is not None else 0))
            return
        self._post(partial(self.take, stream, frame, self._clock.now), stream, frame)

    def _post(
        self, event: Callable[[], None], stream: SimulatedStream | None = None, frame: EdgeFrame | None = None
    ) -> None:
        self._waiting.post(event, stream, frame)

    def _rung(self) -> None:
        if not self._busy:
            self._run()

    def release(self, stream: SimulatedStream) -> None:
        """Free the slot of a stream that is gone, if it has one."""
        self._slots.pop(stream, None)

    def slot(self, stream: SimulatedStream) -> SimulatedSlot | None:
        """Return the slot of a stream, if it has one."""
        return self._slots.get(stream)

    def credit(self) -> int:
        """Return how many unverified tokens each session may have in flight."""
        return credit_of(self.rules, len(self._running()))

    def take(self, stream: SimulatedStream, frame: EdgeFrame, arrived: float) -> None:
        """Pass a frame to its session."""
        if isinstance(frame, Open):
            self._open(stream, frame)
            return
        slot = self._slots.get(stream)
        if slot is None or not expects(slot.session, frame):
            return
        if isinstance(frame, Continue):
            slot.session = slot.session.continued(frame, arrived)
            slot.num_computed_tokens = min(slot.num_computed_tokens, frame.start, slot.session.prompt_length - 1)
            slot.ready_since = arrived
        elif (commit := pass_frame(slot.session, frame, arrived)) is not None:
            stream.send_down(commit)

    def verify(
        self,
        slot: SimulatedSlot,
        block: tuple[DraftToken, ...],
        began: float,
        branches: tuple[BlockBranch, ...] = (),
    ) -> Commit:
        """Let the target verify `block`, and branches beside it, in the step that `began`; commit what follows."""
        now, transcript = self._clock.now, slot.session.transcript
        num_drafts = len(block) + sum(len(branch.drafts) for branch in branches)
        after = self._target.after(transcript, token_ids(block))
        branch = branch_taken(block, branches, after)
        if branch is not None:
            block = (*block[: branch.index], *branch.drafts)
            after = self._target.after(transcript, token_ids(block))
        tokens = tuple([CommittedToken(token, -1.0) for token in after])
        sent_q = any(draft.confidence > 0 for draft in block)
        reward = self._target.reward(len(transcript), len(block)) if sent_q else None
        queue_s = max(0.0, began - slot.ready_since)
        slot.session.credit = self.credit()  # the session lowers it where drafts do not pay
        beside = num_drafts - len(block)
        verified = Verified(block, tokens, queue_s, now - began, reward=reward, beside=beside)
        return slot.session.on_verified(verified, now)

    def _running(self) -> list[SimulatedSlot]:
        return [slot for slot in self._slots.values() if slot.session.finish is None]

    def _run(self) -> None:
        """Take the frames that wait, then begin a step if one is due."""
        self._busy = False
        while self._waiting:
            for event in self._waiting.take():
                event()
        running = self._running()
        for slot in running:
            self._draft_here(slot)
        batch = self.batching.plan(running, self._clock.now)
        if batch.shares:
            self._begin(batch)
        elif batch.wake_at < self._alarm:
            self._alarm = batch.wake_at
            self._clock.at(self._alarm, self._on_alarm)

    def _draft_here(self, slot: SimulatedSlot, block: tuple[DraftToken, ...] | None = None) -> None:
        """Let the verifier's own drafter go on with a text, where the session asks for that."""
        if self._local is None:
            return
        job = slot.session.local_job(self.batching.base_s, self.batching.row_s, self._clock.now, block)
        if job is not None:
            self._local.submit(slot.session, job, self._drafted_here)

    def _drafted_here(self, session: VerifierSession, result: Drafted | DrafterFailed, waited_s: float) -> None:
        def take() -> None:
            if isinstance(result, DrafterFailed):
                session.draft_here_no_more()
            elif session.ends is not None:
                session.ends.take(result, waited_s)

        self._post(take)

    def _on_alarm(self) -> None:
        self._alarm = math.inf
        if not self._busy:
            self._run()

    def _open(self, stream: SimulatedStream, frame: Open) -> None:
        for other in [other for other, slot in self._slots.items() if slot.session.id == frame.session]:
            self.release(other)
        here = self._local.here if self._local is not None else None
        session = VerifierSession(frame, self.rules, self._clock.now, here)
        self._slots[stream] = SimulatedSlot(stream, session, 0, self._clock.now)
        stream.send_down(session.opened())

    def _begin(self, batch: Batch[SimulatedSlot]) -> None:
        self._busy = True
        began, sessions = self._clock.now, [share.slot.session for share in batch.shares]
        for share in batch.shares:
            if share.block is not None:
                self._draft_here(share.slot, share.block)
        decoding = sum(share.num_rows for share in batch.shares if share.only_decodes)
        ends = began + self._costs.batch_s(decoding, batch.num_rows - decoding)
        self._clock.at(ends, lambda: self._end(batch, sessions, began))

    def _end(self, batch: Batch[SimulatedSlot], sessions: Sequence[VerifierSession], began: float) -> None:
        now = self._clock.now
        self.batching.measure(batch, now - began, len(self._running()))
        for event in self._waiting.take_drafts():
            event()
        for share, session in zip(batch.shares, sessions, strict=True):
            if share.slot.session is session and session.finish is None:  # else it was cancelled meanwhile
                self._finish(share, began)
        if self._local is not None:
            self._local.recall()
        self._clock.at(now + self._costs.commit_s, self._run)

    def _finish(self, share: Share[SimulatedSlot], began: float) -> None:
        """Compute a share's tokens, and send the commit if it has one."""
        slot, now = share.slot, self._clock.now
        slot.num_computed_tokens += share.num_tokens
        if share.block is not None:
            commit = self.verify(slot, share.block, began, share.branches)
            slot.num_computed_tokens = len(slot.session.transcript) - 1
            slot.ready_since = now
            self._clock.at(now + self._costs.commit_s, lambda: slot.stream.send_down(commit))
