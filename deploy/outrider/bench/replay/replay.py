"""One text of a hit trace over a link: the real session machine, a virtual clock, no model and no socket."""

from __future__ import annotations

import heapq
import itertools
import math
import operator
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from outrider.bench.replay.costs import Costs
from outrider.bench.replay.traces import HitTrace
from outrider.bench.replay.wire import DOWN, UP, ShapeAt, Wire
from outrider.cloud.batching import MAX_PREFILL_ROWS_ALONE
from outrider.edge.link import GRPC_PREFIX_BYTES
from outrider.proto import codec
from outrider.proto.errors import ConfigError
from outrider.proto.policy import Measurements, StepCost, WindowPolicy
from outrider.proto.policy.selection import Selector
from outrider.proto.session import (
    CatchUpJob,
    CaughtUp,
    Done,
    Drafted,
    DraftJob,
    EdgeEvent,
    EdgeSession,
    EdgeStatistics,
    Emit,
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
    CloudFrame,
    Draft,
    DraftToken,
    EdgeFrame,
    Goal,
    Open,
    Patience,
    Report,
    Sampling,
)

__all__ = ["Outcome", "Policy", "Replay", "Rival", "ShapeAt", "replay"]

_HASH = "0" * 64
_BEYOND = 64  # tokens that a text which ended by itself could have had more; no window looks further


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How both sides decide.

    Attributes:
        window: of the edge; None: the default policy.
        patience: of the verifier; None: planned.
        goal: of the deployment.
        max_drafts: judged in a step at most.
        drafting: False: cloud streaming.
        logprobs: whether the edge asks for them; 4 bytes a token.
    """

    window: WindowPolicy | None = None
    patience: Patience | None = None
    goal: Goal = Goal.LATENCY
    max_drafts: int = 16
    drafting: bool = True
    logprobs: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it.

    Attributes:
        seconds: from Open to Done.
        first_token_s: until the first token reached the user.
        statistics: of the edge.
        arrivals: [n] seconds, when each token reached the user.
        uplink_bytes, downlink_bytes: as the link carries them.
        turns: [n] whose turn it was when the token came: 0, or 1 + the rival's index.
    """

    seconds: float
    first_token_s: float
    statistics: EdgeStatistics
    arrivals: tuple[float, ...]
    uplink_bytes: int
    downlink_bytes: int
    turns: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Rival:
    """Another drafter of the pool: its trace of the same text, and what its tokens take."""

    trace: HitTrace
    costs: Costs


@dataclass(slots=True)
class _Verifier:
    """The engine with one session.

    Attributes:
        session: None before Open.
        behind: committed tokens that the KV cache lacks; 1 while decoding: the last one.
        waiting: what came during a step, and when: the engine takes events between steps.
        alarm: when it looks at the session next, if nothing comes.
        ready_since: when it could have begun the next step.
        cost: of steps that only decode, as it has measured them.
        line: what the policies are told of that: base of a step and cost of a row, seconds.
    """

    cost: StepCost
    line: tuple[float, float]
    session: VerifierSession | None = None
    behind: int = 0
    busy: bool = False
    waiting: deque[tuple[EdgeFrame, float]] = field(default_factory=deque)
    alarm: float = math.inf
    ready_since: float = 0.0


class Replay:
    """From Open to Done."""

    def __init__(
        self,
        trace: HitTrace,
        shape_at: ShapeAt,
        costs: Costs,
        policy: Policy,
        *,
        measurements: Measurements | None = None,
        cost: StepCost | None = None,
        seed: int = 0,
        rivals: Sequence[Rival] = (),
        selector: Selector | None = None,
    ) -> None:
        if any((r.trace.tokens, r.trace.prompt_tokens) != (trace.tokens, trace.prompt_tokens) for r in rivals):
            raise ConfigError("must be on the text of the first drafter", field="rivals")
        if bool(rivals) != (selector is not None):
            raise ConfigError("comes with rivals, and these with it", field="selector")
        self._trace = trace
        self._drafters = (Rival(trace, costs), *rivals)
        self._costs = costs
        self._now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._first = trace.prompt_tokens
        # What the prompt says matters to nobody here but for its bytes.
        self._truth = (*itertools.islice(itertools.cycle(trace.tokens), self._first), *trace.tokens)
        sampling = Sampling(
            temperature=trace.temperature,
            max_tokens=len(trace.tokens) + _BEYOND * trace.ended,
            ignore_eos=not trace.ended,
        )
        frame = Open(
            model="reference",
            tokenizer_sha256=_HASH,
            prompt=self._truth[: self._first],
            sampling=sampling,
            session="0" * 32,
            drafting=policy.drafting,
            logp=policy.logprobs,
        )
        names = tuple(drafter.trace.drafter for drafter in self._drafters)
        selection = Selection(selector, names) if selector is not None else None
        self._edge = EdgeSession(frame, policy.window, measurements=measurements, selection=selection)
        self._rules = VerifierRules(
            name="verifier",
            model=frame.model,
            tokenizer_sha256=_HASH,
            vocab_size=max(self._truth) + 2,  # a miss is the right token plus one
            context_length=self._first + sampling.max_tokens + _BEYOND,
            eos_tokens=frozenset(trace.tokens[-1:]) if trace.ended else frozenset(),
            max_drafts=policy.max_drafts,
            patience=policy.patience,
            goal=policy.goal,
        )
        cost = cost or StepCost()
        self._verifier = _Verifier(cost, cost.line(1))
        rng = random.Random(seed)
        self._up = Wire(operator.attrgetter("up"), shape_at, UP, rng)
        self._down = Wire(operator.attrgetter("down"), shape_at, DOWN, rng)
        self._right = [0] * len(self._drafters)  # so much of each one's prefix is as the target has it
        self._arrivals: list[float] = []
        self._turns: list[int] = []
        self._done = False

    def run(self) -> Outcome:
        """The whole text."""
        self._tell_edge(Started())
        self._tell_edge(StreamReady(b""))
        while not self._done:
            if not self._heap:
                raise RuntimeError(f"nothing will ever happen again after {len(self._arrivals)} tokens")
            self._now, _, event = heapq.heappop(self._heap)
            event()
        self._up.end()
        self._down.end()
        return Outcome(
            self._now,
            self._arrivals[0],
            self._edge.statistics,
            tuple(self._arrivals),
            self._up.bytes,
            self._down.bytes,
            tuple(self._turns),
        )

    def _at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (time, next(self._order), event))

    # --- the link ---

    def _send_up(self, frame: EdgeFrame) -> None:
        size = len(codec.encode_edge_frame(frame))
        self._edge.statistics.uplink_bytes += size + GRPC_PREFIX_BYTES
        arrival = self._up.send(self._now, size) + self._costs.cloud_event_s
        self._at(arrival, lambda: self._arrive_up(frame))

    def _send_down(self, frame: CloudFrame) -> None:
        size = len(codec.encode_cloud_frame(frame))
        self._edge.statistics.downlink_bytes += size + GRPC_PREFIX_BYTES
        arrival = self._down.send(self._now, size) + self._costs.edge_event_s
        self._at(arrival, lambda: self._arrive_down(frame))

    # --- the edge ---

    def _tell_edge(self, event: EdgeEvent) -> None:
        active = self._edge.drafter  # the next one may be chosen with the same event
        for instruction in self._edge.handle(event, self._now):
            match instruction:
                case Send(frame):
                    self._send_up(frame)
                case Emit():
                    self._arrivals.extend([self._now] * len(instruction.tokens))
                    self._turns.extend([active] * len(instruction.tokens))
                case DraftJob():
                    self._draft(instruction)
                case CatchUpJob():
                    self._catch_up(instruction)
                case Done(_, error):
                    if error is not None:
                        raise error
                    self._done = True

    def _arrive_down(self, frame: CloudFrame) -> None:
        self._up.hear()
        self._tell_edge(frame)

    def _draft(self, job: DraftJob) -> None:
        proposal = self._propose(job)
        seconds = self._drafters[job.drafter].costs.propose_s(len(job.extend_with), len(proposal))
        forced = self._teacher_force(job.drafter, job.truncate_to + job.skip, job.teacher_forced)
        drafted = Drafted(job, proposal, seconds, forced)
        self._at(self._now + self._costs.job_s + seconds, lambda: self._tell_edge(drafted))

    def _catch_up(self, job: CatchUpJob) -> None:
        end = job.truncate_to + len(job.tokens)
        self._right[job.drafter] = end
        seconds = self._drafters[job.drafter].costs.propose_s(len(job.tokens) + 1, 0)
        forced = self._teacher_force(job.drafter, job.start, end - job.start)
        log_q = self._drafters[job.drafter].trace.prompt_log_q
        if not math.isnan(log_q):
            forced = replace(forced, log_q=(log_q,) * job.score)
        caught_up = CaughtUp(job, forced, seconds)
        self._at(self._now + self._costs.job_s + seconds, lambda: self._tell_edge(caught_up))

    def _propose(self, job: DraftJob) -> tuple[DraftToken, ...]:
        trace, end = self._drafters[job.drafter].trace, len(self._truth)
        right = min(self._right[job.drafter], job.truncate_to)
        if right == job.truncate_to:
            known = self._truth[right : job.start]
            agreed = (mine == own for mine, own in zip(job.extend_with, known, strict=False))
            right += sum(itertools.takewhile(bool, agreed))
        drafts: list[DraftToken] = []
        for position in range(job.start, job.start + job.count):
            i = position - self._first
            if position >= end:  # the text is over, and nobody has recorded what the drafter says then
                drafts.append(DraftToken(self._truth[-1] + 1))
                continue
            if trace.silent_at(i):
                break
            hit = right == position and trace.hits[i]
            right += hit
            unknown = (math.nan,) * len(trace.tokens)
            signs = trace.confidence[i], (trace.entropy or unknown)[i], (trace.certainty or unknown)[i]
            drafts.append(DraftToken(self._truth[position] + (not hit), *signs))
        self._right[job.drafter] = right
        return tuple(drafts)

    def _teacher_force(self, drafter: int, start: int, count: int) -> TeacherForced:
        """Return what it says in place of `count` committed tokens."""
        trace = self._drafters[drafter].trace
        drafts = []
        for position in range(start, start + count):
            i = position - self._first
            hit = not trace.silent_at(i) and trace.hits[i]
            drafts.append(DraftToken(self._truth[position] + (not hit), trace.confidence[i]))
        return TeacherForced(tuple(drafts))

    # --- the verifier ---

    def _arrive_up(self, frame: EdgeFrame) -> None:
        self._down.hear()
        self._verifier.waiting.append((frame, self._now))
        if not self._verifier.busy:
            self._run_engine()

    def _run_engine(self) -> None:
        """The engine between two steps: take what has come, then begin a step if one is due."""
        verifier = self._verifier
        while verifier.waiting:
            self._take(*verifier.waiting.popleft())
        session = verifier.session
        if session is None or session.finish is not None:
            return
        if verifier.behind > 1:
            self._begin_step(session)
            return
        due = session.ready_at(*verifier.line)
        if due <= self._now:
            self._begin_step(session)
        elif due < verifier.alarm:
            verifier.alarm = due
            self._at(due, self._on_alarm)

    def _take(self, frame: EdgeFrame, arrived: float) -> None:
        verifier = self._verifier
        match frame:
            case Open():
                verifier.session = VerifierSession(frame, self._rules, self._now)
                verifier.behind = len(frame.prompt)
                verifier.ready_since = self._now
                self._send_down(verifier.session.opened())
            case Draft() if verifier.session is not None:
                verifier.session.on_draft(frame, arrived)
            case Report() if verifier.session is not None:
                verifier.session.on_report(frame)

    def _on_alarm(self) -> None:
        self._verifier.alarm = math.inf
        if not self._verifier.busy:
            self._run_engine()

    def _begin_step(self, session: VerifierSession) -> None:
        verifier = self._verifier
        verifier.busy = True
        began = self._now
        if verifier.behind > MAX_PREFILL_ROWS_ALONE:
            self._at(began + self._costs.prefill_s(MAX_PREFILL_ROWS_ALONE), self._read)
            return
        block = session.block(*verifier.line)
        rows = verifier.behind + len(block)
        seconds = self._costs.verify_s(rows) if verifier.behind == 1 else self._costs.prefill_s(rows)
        self._at(began + seconds, lambda: self._judged(session, block, rows, began))

    def _read(self) -> None:
        """A part of a long prompt is in the KV cache."""
        self._verifier.behind -= MAX_PREFILL_ROWS_ALONE
        self._at(self._now + self._costs.commit_s, self._free)

    def _judged(self, session: VerifierSession, block: tuple[int, ...], rows: int, began: float) -> None:
        verifier, seconds = self._verifier, self._now - began
        if verifier.behind == 1:
            verifier.cost.add(rows, seconds)
            verifier.line = verifier.cost.line(1)
        at = len(session.transcript)
        tokens = self._truth[at : at + len(block) + 1]
        tokens += (0,) * (len(block) + 1 - len(tokens))  # behind the end, where nothing is settled
        logp = (-1.0,) * len(tokens)
        verified = Verified(block, tokens, logp, began - verifier.ready_since, seconds)
        session.credit = self._rules.max_credit  # as the engine does; the session lowers it where drafts do not pay
        commit = session.on_verified(verified, self._now)
        verifier.behind = 1
        verifier.ready_since = self._now
        self._at(self._now + self._costs.commit_s, lambda: self._send_down(commit))
        self._at(self._now + self._costs.commit_s, self._free)

    def _free(self) -> None:
        self._verifier.busy = False
        self._run_engine()


def replay(
    traces: Sequence[HitTrace],
    shape_at: ShapeAt,
    costs: Costs,
    policy: Policy,
    *,
    warm_up_tokens: int = 0,
    seed: int = 0,
    rivals: Sequence[Sequence[Rival]] = (),
    selector: Callable[[], Selector] | None = None,
) -> list[Outcome]:
    """Replay texts one after the other, by one edge on one verifier, which keep what they have measured.

    Args:
        traces: what the target says and where the drafter hits.
        shape_at: the link; its clock starts anew with each text.
        costs: of the machines.
        policy: of both sides.
        warm_up_tokens: of the first text, decoded beforehand and not counted, as benchmarks do.
        seed: of the jitter.
        rivals: [texts] the other drafters of each text, always in the same order; empty: there are none.
        selector: makes the one that chooses among them, for each text anew; None: nothing is chosen.
    """
    measurements, cost = Measurements(), StepCost()

    def one(trace: HitTrace, others: Sequence[Rival]) -> Outcome:
        return Replay(
            trace,
            shape_at,
            costs,
            policy,
            measurements=measurements,
            cost=cost,
            seed=seed,
            rivals=others,
            selector=selector() if selector is not None else None,
        ).run()

    all_rivals = rivals or [()] * len(traces)
    if warm_up_tokens and traces:
        few = [Rival(rival.trace.first(warm_up_tokens), rival.costs) for rival in all_rivals[0]]
        one(traces[0].first(warm_up_tokens), few)
    return [one(trace, others) for trace, others in zip(traces, all_rivals, strict=True)]
