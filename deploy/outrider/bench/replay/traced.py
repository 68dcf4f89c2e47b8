"""Texts of hit traces in the simulator: both session machines on a link, without model and socket."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from outrider.bench.replay.traces import HitTrace
from outrider.bench.simulator.clock import Costs, VirtualClock
from outrider.bench.simulator.simulation import Simulation
from outrider.bench.simulator.verifier import PREFILL_CHUNK, SimulatedVerifier
from outrider.bench.simulator.wire import ShapeAt, WireLink
from outrider.cloud.batching import Batching
from outrider.proto.errors import ConfigError
from outrider.proto.policy import Measurements, WindowPolicy
from outrider.proto.policy.selection import Selector
from outrider.proto.session import (
    CatchUpJob,
    CaughtUp,
    Drafted,
    DraftJob,
    EdgeSession,
    EdgeStatistics,
    Selection,
    TeacherForced,
    VerifierRules,
)
from outrider.proto.types import DraftToken, Goal, Open, Patience, Sampling

_HASH = "0" * 64
_BEYOND = 64  # tokens that a text which ended by itself could have had more; no window looks further


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Policies of both sides.

    Attributes:
        window: window policy of the edge; None: the default policy.
        patience: patience that the edge asks for; None: the verifier plans it.
        goal: goal of the deployment.
        max_drafts: most drafts that a step verifies.
        drafting: whether the edge drafts; False: cloud streaming.
        logprobs: whether the edge asks for log probabilities, 4 bytes a token.
    """

    window: WindowPolicy | None = None
    patience: Patience | None = None
    goal: Goal = Goal.LATENCY
    max_drafts: int = 16
    drafting: bool = True
    logprobs: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a replayed text.

    Attributes:
        seconds: time from Open to Done.
        first_token_s: seconds until the first token reached the user.
        statistics: counts of the edge.
        arrivals: [n] seconds until each token reached the user.
        uplink_bytes, downlink_bytes: bytes that the link carried.
        active: [n] index of the active drafter when the token came; 0: the first one.
    """

    seconds: float
    first_token_s: float
    statistics: EdgeStatistics
    arrivals: tuple[float, ...]
    uplink_bytes: int
    downlink_bytes: int
    active: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DrafterArm:
    """A drafter of the pool: its trace of the text, and the costs of its tokens."""

    trace: HitTrace
    costs: Costs


class Truth:
    """Target of a trace, which commits the recorded text whatever is drafted.

    Attributes:
        first: position of the first token of text.
        tokens: prompt and text; only the size of the prompt matters here.
        agreement: by position, min(1, p / q) of the last draft there; NaN: not known.
    """

    def __init__(self, trace: HitTrace) -> None:
        self.first = trace.prompt_tokens
        self.tokens = (*itertools.islice(itertools.cycle(trace.tokens), self.first), *trace.tokens)
        self.agreement = [math.nan] * len(self.tokens)

    def after(self, transcript: Sequence[int], block: tuple[int, ...]) -> tuple[int, ...]:
        """Return [k + 1] tokens from the transcript's end on; 0 after the text's end, where nothing is accepted."""
        start = len(transcript)
        tokens = self.tokens[start : start + len(block) + 1]
        return tokens + (0,) * (len(block) + 1 - len(tokens))

    def reward(self, start: int, drafts: int) -> float | None:
        """Return the mean agreement of the drafts; drafts after a miss count as those on the right text."""
        known = [agreement for agreement in self.agreement[start : start + drafts] if not math.isnan(agreement)]
        return sum(known) / len(known) if known else None


class TraceDrafters:
    """Drafters that propose what their traces say after a right prefix, and something wrong after a wrong one."""

    def __init__(self, drafters: Sequence[DrafterArm], truth: Truth) -> None:
        self._drafters = drafters
        self._truth = truth.tokens
        self._agreement = truth.agreement
        self._first = truth.first
        self._right = [0] * len(drafters)  # tokens at the beginning of each one's prefix that are the target's

    def draft(self, job: DraftJob) -> tuple[Drafted, float]:
        """Propose tokens."""
        costs = self._drafters[job.drafter].costs
        proposal = self._propose(job)
        seconds = costs.propose_s(len(job.extend_with), len(proposal))
        forced = self._teacher_force(job.drafter, job.truncate_to + job.skip, job.teacher_forced)
        return Drafted(job, proposal, seconds, forced), costs.job_s + seconds

    def catch_up(self, job: CatchUpJob) -> tuple[CaughtUp, float]:
        """Read committed tokens."""
        costs, end = self._drafters[job.drafter].costs, job.truncate_to + len(job.tokens)
        self._right[job.drafter] = end
        seconds = costs.propose_s(len(job.tokens) + 1, 0)
        forced = self._teacher_force(job.drafter, job.start, end - job.start)
        log_q = self._drafters[job.drafter].trace.prompt_log_q
        if not math.isnan(log_q):
            forced = replace(forced, log_q=(log_q,) * job.score)
        return CaughtUp(job, forced, seconds), costs.job_s + seconds

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
            if position >= end:  # the text is over, and what the drafter proposes then is not recorded
                drafts.append(DraftToken(self._truth[-1] + 1))
                continue
            if trace.silent_at(i):
                break
            hit = right == position and trace.hits[i]
            right += hit
            self._agreement[position] = trace.agreement[i] if trace.agreement else math.nan
            unknown = (math.nan,) * len(trace.tokens)
            signs = trace.confidence[i], (trace.entropy or unknown)[i], (trace.perturbed_probability or unknown)[i]
            drafts.append(DraftToken(self._truth[position] + (not hit), *signs))
        self._right[job.drafter] = right
        return tuple(drafts)

    def _teacher_force(self, drafter: int, start: int, count: int) -> TeacherForced:
        trace = self._drafters[drafter].trace
        drafts = []
        for position in range(start, start + count):
            i = position - self._first
            hit = not trace.silent_at(i) and trace.hits[i]
            drafts.append(DraftToken(self._truth[position] + (not hit), trace.confidence[i]))
        return TeacherForced(tuple(drafts))


class Replay(Simulation):
    """The text of one trace, from Open to Done."""

    def __init__(
        self,
        trace: HitTrace,
        shape_at: ShapeAt,
        costs: Costs,
        policy: Policy,
        *,
        measurements: Measurements | None = None,
        batching: Batching | None = None,
        seed: int = 0,
        others: Sequence[DrafterArm] = (),
        selector: Selector | None = None,
    ) -> None:
        """Set both sides up. The arguments are those of `replay`, for one text.

        `measurements` are the edge's of earlier texts; `batching` has the verifier's.

        Raises:
            ConfigError: others on another text, or without a selector.
        """
        if any((r.trace.tokens, r.trace.prompt_tokens) != (trace.tokens, trace.prompt_tokens) for r in others):
            raise ConfigError("must be on the text of the first drafter", field="others")
        if bool(others) != (selector is not None):
            raise ConfigError("must be given together with others", field="selector")
        drafters, truth, clock = (DrafterArm(trace, costs), *others), Truth(trace), VirtualClock()
        frame = _open_frame(trace, truth, policy)
        names = tuple(drafter.trace.drafter for drafter in drafters)
        selection = Selection(selector, names) if selector is not None else None
        machine = EdgeSession(frame, policy.window, measurements=measurements, send_q=bool(others), selection=selection)
        verifier = SimulatedVerifier(clock, _rules(trace, truth, policy), truth, costs, batching)
        self._wires = WireLink(clock, shape_at, costs, machine.statistics, random.Random(seed))
        super().__init__(clock, machine, verifier, TraceDrafters(drafters, truth), lambda _: self._wires)

    def outcome(self) -> Outcome:
        """Run the whole text."""
        self.run()
        assert self.done is not None  # noqa: S101 - `run` ends with it
        if self.done.error is not None:
            raise self.done.error
        self._wires.end()
        return Outcome(
            self.clock.now,
            self.arrivals[0],
            self.edge.statistics,
            tuple(self.arrivals),
            self._wires.wire_up.bytes,
            self._wires.wire_down.bytes,
            tuple(self.active),
        )


def _open_frame(trace: HitTrace, truth: Truth, policy: Policy) -> Open:
    return Open(
        model="reference",
        tokenizer_sha256=_HASH,
        prompt=truth.tokens[: truth.first],
        sampling=Sampling(
            temperature=trace.temperature,
            max_tokens=len(trace.tokens) + _BEYOND * trace.ended,
            ignore_eos=not trace.ended,
        ),
        session="0" * 32,
        drafting=policy.drafting,
        logp=policy.logprobs,
        patience=policy.patience,
    )


def _rules(trace: HitTrace, truth: Truth, policy: Policy) -> VerifierRules:
    return VerifierRules(
        name="verifier",
        model="reference",
        tokenizer_sha256=_HASH,
        vocab_size=max(truth.tokens) + 2,  # a miss is the right token plus one
        context_length=len(truth.tokens) + _BEYOND * (1 + trace.ended),
        eos_tokens=frozenset(trace.tokens[-1:]) if trace.ended else frozenset(),
        max_drafts=policy.max_drafts,
        goal=policy.goal,
    )


def replay(
    traces: Sequence[HitTrace],
    shape_at: ShapeAt,
    costs: Costs,
    policy: Policy,
    *,
    warm_up_tokens: int = 0,
    seed: int = 0,
    others: Sequence[Sequence[DrafterArm]] = (),
    selector: Callable[[], Selector] | None = None,
) -> list[Outcome]:
    """Replay texts one after the other, by one edge on one verifier, which keep their measurements.

    Args:
        traces: traces of the first drafter, one for each text.
        shape_at: link, whose clock starts at 0 with each text.
        costs: costs of the machines, and of the first drafter.
        policy: policy of both sides.
        warm_up_tokens: tokens of the first text that are decoded before and not counted, as benchmarks do.
        seed: seed of the jitter.
        others: [texts] the other drafters of each text, always in the same order; empty: there are none.
        selector: factory of the selector among all of them, called once for each text; None: there are no others.
    """
    session = partial(
        Replay,
        shape_at=shape_at,
        costs=costs,
        policy=policy,
        measurements=Measurements(),
        batching=Batching(PREFILL_CHUNK),
        seed=seed,
    )

    def one(trace: HitTrace, others: Sequence[DrafterArm]) -> Outcome:
        return session(trace, others=others, selector=selector() if selector else None).outcome()

    all_others = others or [()] * len(traces)
    if warm_up_tokens and traces:
        few = [DrafterArm(arm.trace.first(warm_up_tokens), arm.costs) for arm in all_others[0]]
        one(traces[0].first(warm_up_tokens), few)
    return [one(trace, others) for trace, others in zip(traces, all_others, strict=True)]
