"""Texts of hit traces in the simulator: both session machines, without model and socket."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outrider.cloud.serving.batching import Batching
from outrider.proto.errors import ConfigError
from outrider.proto.policy import Measurements, Window
from outrider.proto.policy.likely_branches import RUNNERS_UP
from outrider.proto.policy.selector import Selector
from outrider.proto.session import (
    CatchUpJob,
    CaughtUp,
    Drafted,
    DraftJob,
    EdgeSession,
    EdgeStatistics,
    Selection,
    TeacherForced,
)
from outrider.proto.session.verifier import VerifierRules, VerifierSession
from outrider.proto.types import DraftToken, Goal, Open, Patience, Sampling
from research.simulator.clock import Costs, VirtualClock
from research.simulator.simulated_verifier import SimulatedSource, SimulatedVerifier
from research.simulator.simulation import Simulation
from research.simulator.wire import ShapeAt, WireLink
from research.traces.recordings import HitTrace

Beside = Callable[[VirtualClock, HitTrace, Costs], SimulatedSource]
_HASH = "0" * 64
_BEYOND = 64  # tokens that a text which ended by itself could have had more; no window looks further


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Policies of both sides.

    Attributes:
        window: window of the edge; None: as many drafts as pay.
        patience: patience that the edge asks for; None: the verifier plans it.
        max_drafts: most drafts that a step verifies.
        drafting: whether the edge drafts; False: cloud streaming.
        logprobs: whether the edge asks for log probabilities, 4 bytes a token.
        drafts_here: drafts that the verifier's own drafter makes before every step, none during one; None: as it prices
            them.
        trees: whether steps verify branches beside the chain.
    """

    window: Window | None = None
    patience: Patience | None = None
    goal: Goal = Goal.LATENCY
    max_drafts: int = 16
    drafting: bool = True
    logprobs: bool = True
    drafts_here: int | None = None
    trees: bool = False


def synchronous(length: int) -> Policy:
    """Return classical speculative decoding: draft, wait for the verdict, begin again (Leviathan et al. 2023)."""
    return Policy(window=Window(length), patience=Patience(math.inf, length))


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """Result of a replayed text, on a clock that starts with its Open.

    Attributes:
        seconds: time until the last token.
        arrivals: [n] time at which each token reached the user, in seconds.
        uplink_bytes, downlink_bytes: bytes that the link carried.
        active: [n] index of the active drafter when the token came.
    """

    seconds: float
    statistics: EdgeStatistics
    arrivals: tuple[float, ...]
    uplink_bytes: int
    downlink_bytes: int
    active: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DrafterArm:
    """A drafter of the pool: its trace of the text, and the costs of its tokens."""

    trace: HitTrace
    costs: Costs


class TracedText:
    """One text in the simulator: its target commits the recorded text, and its drafters propose by their traces.

    A drafter follows its trace after a right prefix; after a wrong one it misses.

    Attributes:
        first: position of the first token of text.
        tokens: prompt and text; only the size of the prompt matters here.
    """

    def __init__(self, arms: Sequence[DrafterArm]) -> None:
        trace = arms[0].trace
        self.first = trace.prompt_tokens
        self.tokens = (*itertools.islice(itertools.cycle(trace.tokens), self.first), *trace.tokens)
        self._arms = arms
        self._right = [0] * len(arms)  # tokens at the beginning of each drafter's prefix that are the target's
        self._agreement = [math.nan] * len(self.tokens)  # min(1, p / q) of the last draft at each position

    def after(self, transcript: Sequence[int], block: tuple[int, ...]) -> tuple[int, ...]:
        """Return [k + 1] tokens from the transcript's end on; 0 after the text's end, where nothing is accepted."""
        start = len(transcript)
        tokens = self.tokens[start : start + len(block) + 1]
        return tokens + (0,) * (len(block) + 1 - len(tokens))

    def reward(self, start: int, drafts: int) -> float | None:
        """Return the mean agreement of the drafts; drafts after a miss count as those on the right text."""
        known = [agreement for agreement in self._agreement[start : start + drafts] if not math.isnan(agreement)]
        return sum(known) / len(known) if known else None

    def draft(self, job: DraftJob) -> tuple[Drafted, float]:
        costs, proposal = self._arms[job.drafter].costs, self._propose(job)
        seconds = costs.propose_s(len(job.extend_with), len(proposal))
        forced = self._teacher_force(job.drafter, job.truncate_to + job.skip, job.teacher_forced)
        return Drafted(job, proposal, seconds, forced), costs.job_s + seconds

    def catch_up(self, job: CatchUpJob) -> tuple[CaughtUp, float]:
        arm, end = self._arms[job.drafter], job.truncate_to + len(job.tokens)
        self._right[job.drafter] = end
        seconds = arm.costs.propose_s(len(job.tokens) + 1, 0)
        forced = self._teacher_force(job.drafter, job.start, end - job.start)
        if not math.isnan(arm.trace.prompt_log_q):
            forced = replace(forced, log_q=(arm.trace.prompt_log_q,) * job.score)
        return CaughtUp(job, forced, seconds), arm.costs.job_s + seconds

    def _propose(self, job: DraftJob) -> tuple[DraftToken, ...]:
        trace = self._arms[job.drafter].trace
        right = min(self._right[job.drafter], job.truncate_to)
        if right == job.truncate_to:
            known = self.tokens[right : job.start]
            agreed = (mine == own for mine, own in zip(job.extend_with, known, strict=False))
            right += sum(itertools.takewhile(bool, agreed))
        drafts: list[DraftToken] = []
        for position in range(job.start, job.start + job.count):
            i = position - self.first
            if position >= len(self.tokens):  # the text is over, and what the drafter proposes then is not recorded
                drafts.append(DraftToken(self.tokens[-1] + 1))
                continue
            if trace.silent and trace.silent[i]:
                break
            before, hit = right, right == position and trace.hits[i]
            right += hit
            perturbed, self._agreement[position] = (
                measure[i] if measure else math.nan for measure in (trace.perturbed_probability, trace.agreement)
            )
            token = self.tokens[position]
            runners_up = self._runners_up(trace, i, on_text=before == position)
            drafts.append(DraftToken(token + (not hit), trace.confidence[i], perturbed, runners_up))
        self._right[job.drafter] = right
        return tuple(drafts)

    def _runners_up(self, trace: HitTrace, i: int, *, on_text: bool) -> tuple[int, ...]:
        """Return the runners-up of a proposal; `on_text`: it follows the text, so one of them may be the target's."""
        if not trace.runner_up:
            return ()
        token, rank = trace.tokens[i], trace.runner_up[i] if on_text else 0
        return tuple(token if rank == place else token + 1 + place for place in range(1, RUNNERS_UP + 1))

    def _teacher_force(self, drafter: int, start: int, count: int) -> TeacherForced:
        trace = self._arms[drafter].trace
        places = range(start - self.first, start - self.first + count)
        perturbed = trace.perturbed_probability or trace.confidence
        return TeacherForced(
            tuple(
                DraftToken(
                    trace.tokens[i] + (not trace.hits[i]), trace.confidence[i], perturbed_probability=perturbed[i]
                )
                for i in places
            )
        )


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
        beside: Beside | None = None,
        first: bool = True,
    ) -> None:
        """Set both sides up. The arguments are those of `replay`, for one text.

        `measurements` are the edge's of earlier texts; `batching` has the verifier's. Drafts may follow the
        Open at once unless the text is the `first` of the edge. Raises `ConfigError` where others are on another text,
        or without a selector.
        """
        if any((arm.trace.tokens, arm.trace.prompt_tokens) != (trace.tokens, trace.prompt_tokens) for arm in others):
            raise ConfigError("must be on the text of the first drafter", field="others")
        if bool(others) != (selector is not None):
            raise ConfigError("must be given together with others", field="selector")
        text, clock = TracedText((DrafterArm(trace, costs), *others)), VirtualClock()
        names = (trace.drafter, *(arm.trace.drafter for arm in others))
        sampling = Sampling(
            temperature=trace.temperature,
            max_tokens=len(trace.tokens) + _BEYOND * trace.ended,
            ignore_eos=not trace.ended,
        )
        frame = open_frame(text, policy, sampling)
        rules = rules_of((text,), policy, trace.tokens[-1:] if trace.ended else ())
        edge = EdgeSession(
            frame,
            policy.window,
            measurements=measurements,
            send_q=bool(others),
            selection=Selection(selector, names) if selector is not None else None,
        )
        local = beside(clock, trace, costs) if beside is not None else None
        verifier = SimulatedVerifier(clock, rules, text, costs, batching, local)
        opened = None if first else VerifierSession(frame, rules, 0.0).opened()
        self._wires = WireLink(clock, shape_at, costs, edge.statistics, random.Random(seed))
        super().__init__(clock, edge, verifier, text, lambda _: self._wires, opened)

    def outcome(self) -> ReplayOutcome:
        done = self.run()
        if done.error is not None:
            raise done.error
        self._wires.end()
        return ReplayOutcome(
            self.clock.now,
            self.edge.statistics,
            tuple(self.arrivals),
            self._wires.wire_up.bytes,
            self._wires.wire_down.bytes,
            tuple(self.active),
        )


def open_frame(text: TracedText, policy: Policy, sampling: Sampling, session: str = "0" * 32) -> Open:
    """Return the Open of a text."""
    return Open(
        model="reference",
        tokenizer_sha256=_HASH,
        prompt=text.tokens[: text.first],
        sampling=sampling,
        session=session,
        drafting=policy.drafting,
        logp=policy.logprobs,
        patience=policy.patience,
        drafts_here=policy.drafts_here,
        trees=policy.trees,
    )


def rules_of(texts: Sequence[TracedText], policy: Policy, eos_tokens: Sequence[int] = ()) -> VerifierRules:
    """Return the rules of a verifier that has room for the texts."""
    return VerifierRules(
        name="verifier",
        model="reference",
        tokenizer_sha256=_HASH,
        # A miss is the right token plus one, a wrong runner-up one or two more.
        vocab_size=max(max(text.tokens) for text in texts) + RUNNERS_UP + 2,
        context_length=max(len(text.tokens) for text in texts) + 2 * _BEYOND,
        eos_tokens=frozenset(eos_tokens),
        max_drafts=policy.max_drafts,
        goal=policy.goal,
        trees=policy.trees,
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
    beside: Beside | None = None,
    measurements: Measurements | None = None,
) -> list[ReplayOutcome]:
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
        beside: factory of the verifier's own drafter, called once for each text; None: it has none.
        measurements: the edge's, which the texts go on with; None: it has none yet.
    """
    measurements, batching = measurements or Measurements(), Batching()
    texts = list(zip(traces, others or [()] * len(traces), strict=True))
    warms_up = bool(warm_up_tokens and texts)
    if warms_up:
        trace, arms = texts[0]
        few = [DrafterArm(arm.trace.first(warm_up_tokens), arm.costs) for arm in arms]
        texts.insert(0, (trace.first(warm_up_tokens), few))
    outcomes = [
        Replay(
            trace,
            shape_at,
            costs,
            policy,
            measurements=measurements,
            batching=batching,
            seed=seed,
            others=arms,
            selector=selector() if selector else None,
            beside=beside,
            first=not i,
        ).outcome()
        for i, (trace, arms) in enumerate(texts)
    ]
    return outcomes[warms_up:]


def tokens_per_second(outcomes: Sequence[ReplayOutcome]) -> float:
    """Return tokens a second over all texts, from the request to the last token."""
    if not outcomes:
        raise ConfigError("are none; record some with a drafter first", field="traces")
    return sum(len(o.arrivals) for o in outcomes) / sum(o.seconds for o in outcomes)
