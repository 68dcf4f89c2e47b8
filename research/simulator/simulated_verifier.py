"""A verifier on a virtual clock: the shipped engine, a target without a model, and streams to it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from outrider.cloud.serving.batching import Batch, Batching
from outrider.cloud.serving.local_source import NoSource
from outrider.cloud.serving.slots import Outbox, Owner, Slot
from outrider.proto.errors import OutriderError
from outrider.proto.session.verifier import VerifierRules, VerifierSession
from outrider.proto.types import CloudFrame, CommittedToken, DraftToken, EdgeFrame, Open, Ping, Pong, token_ids
from research.simulator.clock import Costs, VirtualClock
from research.simulator.pages import CountedPages, toy_facts
from research.simulator.virtual_engine import TimedRunner, VirtualEngine

MANY = 1 << 40  # sessions and pages, which nothing here runs out of
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


class SimulatedSource(NoSource):
    """A drafter beside the target on a virtual clock; this one drafts nothing."""

    def recall(self) -> None:
        """End the drafting that a step has made useless."""


class SimulatedStream(Outbox):
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
        for arrival, copy in self._link.up(frame, self._clock.now):
            self._clock.at(arrival, partial(self._arrive, self._verifier.receive, copy))

    def send_down(self, frame: CloudFrame) -> None:
        for arrival, copy in self._link.down(frame, self._clock.now):
            self._clock.at(arrival, partial(self._arrive, self._received, copy))

    def put(self, item: CloudFrame | OutriderError) -> None:
        """Send a frame of the engine's down; nothing that simulated edges send is an error."""
        if isinstance(item, OutriderError):
            raise item
        self._verifier.send_down(self, item)

    def unread(self) -> int:
        return 0

    def close(self) -> None:
        """Lose what is on its way, and free what the verifier holds for it."""
        self.is_open = False
        self._verifier.release(self)

    def _arrive(self, receive: Callable[[SimulatedStream, FrameT], None], frame: FrameT) -> None:
        if self.is_open:
            receive(self, frame)


class _TargetRunner(TimedRunner):
    """Runs steps on a simulated target, which take what the costs say."""

    def __init__(self, clock: VirtualClock, target: SimulatedTarget, costs: Costs, pages: CountedPages) -> None:
        super().__init__(pages, lambda: clock.now)
        self._target = target
        self._costs = costs

    def seconds(self, batch: Batch) -> float:
        decoding = sum(share.num_rows for share in batch.shares if share.only_decodes)
        return self._costs.batch_s(decoding, batch.num_rows - decoding)

    def after(self, session: VerifierSession, block: tuple[DraftToken, ...]) -> tuple[CommittedToken, ...]:
        after = self._target.after(session.transcript, token_ids(block))
        return tuple([CommittedToken(token, -1.0) for token in after])

    def reward(self, session: VerifierSession, drafts: int) -> float | None:
        return self._target.reward(len(session.transcript), drafts)


class SimulatedVerifier(VirtualEngine):
    """A verifier without server: streams bring frames to its engine, whose target has no model."""

    def __init__(
        self,
        clock: VirtualClock,
        rules: VerifierRules,
        target: SimulatedTarget,
        costs: Costs,
        batching: Batching | None = None,
        local: SimulatedSource | None = None,
    ) -> None:
        facts = toy_facts(rules.tokenizer_sha256, rules.vocab_size, rules.context_length, rules.eos_tokens)
        pages = CountedPages(MANY, facts)
        super().__init__(
            pages,
            _TargetRunner(clock, target, costs, pages),
            rules,
            MANY,
            batching or Batching(),
            local,
            lambda: clock.now,
            lambda seconds, event: clock.at(clock.now + seconds, event),
            commit_s=costs.commit_s,
        )
        self._local = local or SimulatedSource()
        self._keys: dict[SimulatedStream, int] = {}
        self._numbers = itertools.count()
        self._stepping = False

    def receive(self, stream: SimulatedStream, frame: EdgeFrame) -> None:
        """Take a frame that has arrived, after the step that is running; answer a Ping at once."""
        if isinstance(frame, Ping):
            slot = self.slot(stream)
            stream.send_down(Pong(frame.number, slot.session.epoch if slot is not None else 0))
        elif isinstance(frame, Open):
            self._keys[stream] = number = next(self._numbers)
            self.post_open(number, frame, stream, owner=Owner(isolation=str(number)))
        elif (key := self._keys.get(stream, -1)) >= 0:
            self.post_frame(key, frame, lambda: None)

    def release(self, stream: SimulatedStream) -> None:
        if stream in self._keys:
            self.post_close(self._keys.pop(stream))

    def slot(self, stream: SimulatedStream) -> Slot | None:
        return self.sessions.get(self._keys.get(stream, -1))

    def send_down(self, stream: SimulatedStream, frame: CloudFrame) -> None:
        """Put a frame on its way to the edge, when the step that made it is over."""
        if self._stepping:
            self._after(self._commit_s, partial(stream.send_down, frame))
        else:
            stream.send_down(frame)

    def step(self, batch: Batch) -> None:
        """Make a step whose time is over, and end the drafting that it has made useless."""
        self._stepping = True
        super().step(batch)
        self._stepping = False
        self._local.recall()
