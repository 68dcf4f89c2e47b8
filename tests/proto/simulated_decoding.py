"""An edge and verifiers joined by a bad link, on a virtual clock: events in a heap, no thread, no waiting.

Everything that crosses the link goes through the codec. `Simulation.run` fails where the text can never go on (nothing
is scheduled any more), and checks after every event what must always hold.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from hand_driven import drafts_of

from outrider.proto import codec
from outrider.proto.errors import Internal, OutriderError, Unavailable
from outrider.proto.policy import Measurements, WindowPolicy
from outrider.proto.policy.selection import Selector
from outrider.proto.session import (
    Cancelled,
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
    Selection,
    Send,
    Started,
    StreamReady,
    TeacherForced,
    Verified,
    VerifierRules,
    VerifierSession,
)
from outrider.proto.types import (
    Cancel,
    CloudFrame,
    Commit,
    Draft,
    DraftToken,
    EdgeFrame,
    Goaway,
    Open,
    Opened,
    Report,
    Sampling,
)

Oracle = Callable[[tuple[int, ...]], int]
# After a prefix, at most so many tokens, and the confidence in each (NaN: not known).
Drafter = Callable[[tuple[int, ...], int], tuple[tuple[int, ...], tuple[float, ...]]]

HASH = "ab" * 32
MOST_EVENTS = 60_000


def rules(**changes) -> VerifierRules:
    defaults = {
        "name": "v",
        "model": "m",
        "tokenizer_sha256": HASH,
        "vocab_size": 8,
        "context_length": 512,
        "eos_tokens": frozenset({0}),
    }
    return VerifierRules(**(defaults | changes))


def open_frame(**changes) -> Open:
    defaults = {
        "model": "m",
        "tokenizer_sha256": HASH,
        "prompt": (3, 1, 2),
        "sampling": Sampling(max_tokens=40),
        "session": "s",
    }
    return Open(**(defaults | changes))


def hashing_oracle(seed: int, vocab: int = 8, eos_odds: float = 0.01) -> Oracle:
    """A target whose next token is a fixed, unpredictable function of everything before."""

    def next_token(prefix: tuple[int, ...]) -> int:
        rng = random.Random(f"{seed} {prefix}")
        return 0 if rng.random() < eos_odds else rng.randrange(1, vocab)

    return next_token


def own_text(oracle: Oracle, frame: Open, verifier: VerifierRules) -> tuple[int, ...]:
    """What plain decoding gives."""
    sampling, text = frame.sampling, ()
    most = min(sampling.max_tokens, verifier.context_length - len(frame.prompt))
    while len(text) < most:
        text += (oracle(frame.prompt + text),)
        ended = text[-1] in verifier.eos_tokens and not sampling.ignore_eos
        if ended or text[-1] in sampling.stop_tokens:
            break
    return text


def drafter_of(
    oracle: Oracle,
    seed: int,
    right: float,
    silent: float = 0.0,
    dies_after: int = 1 << 30,
    confidence: str = "none",
) -> Drafter:
    """Proposes the oracle's token with chance `right`, fewer than asked with chance `silent`, and may die.

    Its confidence may be `none`, `telling` (high where it is right) or `false` (the other way round).
    """
    rng, calls = random.Random(seed), itertools.count()

    def believed(hit: bool) -> float:
        if confidence == "none":
            return math.nan
        return rng.uniform(0.7, 1.0) if hit == (confidence == "telling") else rng.uniform(0.0, 0.6)

    def propose(prefix: tuple[int, ...], count: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        if next(calls) >= dies_after:
            raise Internal("the drafter has died")
        if rng.random() < silent:
            count = rng.randrange(count)
        tokens: tuple[int, ...] = ()
        q: tuple[float, ...] = ()
        for _ in range(count):
            right_one = oracle(prefix + tokens)
            tokens += (right_one if rng.random() < right else rng.randrange(8),)
            q += (believed(tokens[-1] == right_one),)
        return tokens, q

    return propose


@dataclass(frozen=True, kw_only=True)
class Link:
    """How bad the way between them is. Chances are a frame's; gaps are seconds, 0: never."""

    delay_s: float = 0.02
    jitter_s: float = 0.0
    duplicated: float = 0.0
    reordered: float = 0.0  # of Draft frames
    breaks_every_s: float = 0.0
    goaway_every_s: float = 0.0


@dataclass(eq=False)
class Stream:
    """One stream: its verifier's half, and when each direction delivers its newest frame."""

    session: VerifierSession | None = None
    open: bool = True
    busy: bool = False
    up_until: float = 0.0
    down_until: float = 0.0
    waiting: list[tuple[EdgeFrame, float]] = field(default_factory=list)


class Simulation:
    """One text from Open to Done."""

    def __init__(
        self,
        frame: Open,
        oracle: Oracle,
        drafter: Drafter | None,
        *,
        verifier: VerifierRules | None = None,
        window: WindowPolicy | None = None,
        link: Link | None = None,
        seed: int = 0,
        step_s: float = 0.03,
        row_s: float = 0.0,
        drafting_s: float = 0.002,
        most_per_job: int = 8,
        cancel_at: float = math.inf,
        fickle_credit: bool = False,
        queues_while_busy: bool = True,
        measurements: Measurements | None = None,
        send_q: bool = False,
        rivals: Sequence[Drafter] = (),
        selector: Selector | None = None,
    ) -> None:
        self.now = 0.0
        selection = Selection(selector, tuple("abcdef"[: 1 + len(rivals)])) if selector is not None else None
        self.edge = EdgeSession(
            frame if drafter is not None else replace(frame, drafting=False),
            window,
            measurements=measurements,
            send_q=send_q,
            selection=selection,
            job_tokens=lambda _: most_per_job,
        )
        self.emitted: list[int] = []
        self.draft_frames = 0
        self.done: Done | None = None
        self.streams = 0
        self._frame = frame
        self._oracle = oracle
        self._drafters = {} if drafter is None else dict(enumerate((drafter, *rivals)))
        self._rules = verifier or rules()
        self._link = link or Link()
        self._rng = random.Random(seed)
        self._step_s, self._row_s = step_s, row_s
        self._drafting_s = drafting_s
        self._fickle_credit = fickle_credit
        self._queues_while_busy = queues_while_busy
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._counter = itertools.count()
        self._stream = Stream(open=False)
        self._granted = 0
        self._prefixes = dict.fromkeys(self._drafters, ())
        self.failed: list[int] = []
        self._reopening = False
        if cancel_at < math.inf:
            self._at(cancel_at, lambda: self._handle(Cancelled()))

    def run(self, limit_s: float = 10_000.0) -> tuple[int, ...]:
        """The emitted text."""
        self._begin_text()
        for _ in range(MOST_EVENTS):
            if self.done is not None:
                break
            assert self._heap, f"deadlock at {self.now:.3f} s after {len(self.emitted)} tokens"
            self.now, _, event = heapq.heappop(self._heap)
            assert self.now < limit_s, "no end in sight"
            event()
            assert self.emitted == self.edge.transcript[self.edge.prompt_length :], "emitted is not the transcript"
        assert self.done is not None, "too many events"
        late = Commit(self.edge.prompt_length, (7,), 0, 1)
        assert not self.edge.handle(late, self.now), "speaks after Done"
        return tuple(self.emitted)

    def _at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (time, next(self._counter), event))

    # --- the edge's shell ---

    def _begin_text(self) -> None:
        self._handle(Started())
        self._reopen()

    def _handle(self, event: EdgeEvent) -> None:
        self._apply(self.edge.handle(event, self.now))

    def _apply(self, instructions: list[EdgeInstruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Send(frame):
                    self._send_up(self._stream, frame)
                case Emit(start, tokens, drafted, _):
                    assert start == self.edge.prompt_length + len(self.emitted), "emitted out of order"
                    assert len(drafted) == len(tokens)
                    self.emitted += tokens
                case Reopen(after_s, _):
                    assert self.done is None
                    self._stream.open = False
                    if not self._reopening:
                        self._reopening = True
                        self._at(self.now + after_s, self._reopen)
                case Done():
                    assert self.done is None, "Done twice"
                    self.done = instruction
                    self._stream.open = False
                case DraftJob():
                    self._draft(instruction)
                case CatchUpJob():
                    self._catch_up(instruction)

    def _reopen(self) -> None:
        self._reopening = False
        if self.done is not None:
            return
        self._stream = Stream(up_until=self.now, down_until=self.now)
        self.streams += 1
        stream, link = self._stream, self._link
        self._handle(StreamReady(b"lease"))
        if link.breaks_every_s:
            self._at(self.now + self._rng.expovariate(1 / link.breaks_every_s), lambda: self._break(stream))
        if link.goaway_every_s:
            after_s = self._rng.expovariate(1 / link.goaway_every_s)
            self._at(self.now + after_s, lambda: self._send_down(stream, Goaway("drains")))

    def _break(self, stream: Stream) -> None:
        if stream.open and stream is self._stream:
            stream.open = False
            self._handle(Disconnected(Unavailable("the link broke")))

    def _draft(self, job: DraftJob) -> None:
        prefix = self._prefixes[job.drafter][: job.truncate_to] + job.extend_with
        assert len(prefix) == job.start
        wanted = tuple(self.edge.transcript) + self.edge._chain.tokens
        assert prefix == wanted, "the drafter would continue another text"
        forced_from = job.truncate_to + job.skip
        if job.teacher_forced:
            assert forced_from + job.teacher_forced <= len(self.edge.transcript), "only committed tokens are forced"
        try:
            forced = self._teacher_force(job.drafter, prefix, forced_from, forced_from + job.teacher_forced)
            tokens, q = self._drafters[job.drafter](prefix, job.count)
        except OutriderError as error:
            self._fail(job.drafter, error)
            return
        self._prefixes[job.drafter] = prefix + tokens
        seconds = self._drafting_s * max(1, len(tokens)) * self._rng.uniform(0.5, 2)
        drafted = Drafted(job, drafts_of(tokens, q), seconds, forced)
        self._at(self.now + seconds, lambda: self._handle(drafted))

    def _catch_up(self, job: CatchUpJob) -> None:
        prefix = self._prefixes[job.drafter][: job.truncate_to] + job.tokens
        assert job.drafter != self.edge.drafter or not self.emitted, "whose turn it is drafts, and need not read"
        assert job.drafter not in self.failed, "it is broken"
        assert prefix == tuple(self.edge.transcript[: len(prefix)]), "the drafter would read another text"
        try:
            forced = self._teacher_force(job.drafter, prefix, job.start, len(prefix))
            forced = replace(forced, log_q=(-1.0 - job.drafter,) * job.score)
        except OutriderError as error:
            self._fail(job.drafter, error)
            return
        self._prefixes[job.drafter] = prefix
        self._at(self.now + self._drafting_s, lambda: self._handle(CaughtUp(job, forced, 0.001)))

    def _teacher_force(self, drafter: int, prefix: tuple[int, ...], start: int, end: int) -> TeacherForced:
        said = [self._drafters[drafter](prefix[:position], 1) for position in range(start, end)]
        return TeacherForced(
            tuple(DraftToken(tokens[0], q[0] if q else math.nan) if tokens else DraftToken(-1) for tokens, q in said)
        )

    def _fail(self, drafter: int, error: OutriderError) -> None:
        def fail() -> None:
            self.failed.append(drafter)
            self._handle(DrafterFailed(error, drafter))

        self._at(self.now + self._drafting_s, fail)

    # --- the link ---

    def _delay(self) -> float:
        return self._link.delay_s + self._rng.uniform(0, self._link.jitter_s)

    def _send_up(self, stream: Stream, frame: EdgeFrame) -> None:
        self.draft_frames += isinstance(frame, Draft)
        if isinstance(frame, Draft) and frame.tokens:
            unverified = frame.start + len(frame.tokens) - len(self.edge.transcript)
            assert unverified <= self._granted, f"{unverified} unverified tokens on {self._granted} of credit"
        data = codec.encode_edge_frame(frame)
        arrival = stream.up_until = max(stream.up_until, self.now + self._delay())
        if isinstance(frame, Draft) and self._rng.random() < self._link.reordered:
            arrival += self._rng.uniform(0, 3 * self._link.delay_s)
        self._at(arrival, lambda: self._arrive_up(stream, data))
        if isinstance(frame, Draft) and self._rng.random() < self._link.duplicated:
            self._at(arrival + self._delay(), lambda: self._arrive_up(stream, data))

    def _send_down(self, stream: Stream, frame: CloudFrame) -> None:
        data = codec.encode_cloud_frame(frame)
        arrival = stream.down_until = max(stream.down_until, self.now + self._delay())
        self._at(arrival, lambda: self._arrive_down(stream, data))
        if isinstance(frame, Commit | Opened) and self._rng.random() < self._link.duplicated:
            self._at(arrival + self._delay(), lambda: self._arrive_down(stream, data))

    def _arrive_down(self, stream: Stream, data: bytes) -> None:
        if not stream.open or stream is not self._stream:
            return
        match codec.decode_cloud_frame(data):
            case Opened() as opened:
                self._granted = opened.credit
                self._handle(opened)
            case Commit() as commit:
                if commit.start + len(commit.tokens) > len(self.edge.transcript):
                    self._granted = commit.credit
                self._handle(commit)
            case Goaway() as goaway:
                stream.open = False
                self._handle(goaway)

    # --- the verifier's shell ---

    def _arrive_up(self, stream: Stream, data: bytes) -> None:
        if not stream.open:
            return
        if stream.busy and self._queues_while_busy:
            stream.waiting.append((codec.decode_edge_frame(data), self.now))
            return
        self._take(stream, codec.decode_edge_frame(data), self.now)
        self._consider_step(stream)

    def _take(self, stream: Stream, frame: EdgeFrame, arrived: float) -> None:
        session = stream.session
        match frame:
            case Open():
                stream.session = VerifierSession(frame, self._rules, self.now)
                self._send_down(stream, stream.session.opened())
            case Draft() if session is not None and session.finish is None:
                session.on_draft(frame, arrived)
            case Report() if session is not None:
                session.on_report(frame)
            case Cancel() if session is not None and session.finish is None:
                self._send_down(stream, session.on_cancel())

    def _consider_step(self, stream: Stream) -> None:
        session = stream.session
        if session is None or session.finish is not None or stream.busy or not stream.open:
            return
        ready = session.ready_at(self._step_s, self._row_s)
        if ready <= self.now:
            stream.busy = True
            block = session.block(self._step_s, self._row_s)
            before, lasts_s = tuple(session.transcript), self._step_s + self._row_s * (len(block) + 1)
            self._at(self.now + lasts_s, lambda: self._stepped(stream, before, block, lasts_s))
        elif ready < math.inf:
            self._at(ready, lambda: self._consider_step(stream))

    def _stepped(self, stream: Stream, before: tuple[int, ...], block: tuple[int, ...], lasted_s: float) -> None:
        session = stream.session
        assert session is not None
        stream.busy = False
        if session.finish is not None:
            return
        if self._fickle_credit:
            session.credit = self._rng.randint(1, self._rules.max_credit)
        tokens = tuple(self._oracle(before + block[:j]) for j in range(len(block) + 1))
        verified = Verified(block, tokens, (0.0,) * len(tokens), 0.0, lasted_s)
        commit = session.on_verified(verified, self.now)
        assert tuple(session.transcript) == before + commit.tokens, "a commit appends and nothing else"
        self._send_down(stream, commit)
        waiting, stream.waiting = stream.waiting, []
        for frame, arrived in waiting:
            self._take(stream, frame, arrived)
        self._consider_step(stream)
