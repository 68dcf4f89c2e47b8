"""Texts of hit traces in the simulator, one by one or many at once: both session machines, without model and socket."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from outrider.cloud.serving.batching import Batching
from outrider.deploy.link.shape import LinkShape
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
from outrider.proto.session.both_ends import DraftingHere
from outrider.proto.session.verifier import VerifierRules, VerifierSession
from outrider.proto.types import DraftToken, Goal, Open, Patience, Sampling
from research.simulator.clock import Costs, VirtualClock
from research.simulator.local import LocalThreads
from research.simulator.simulated_verifier import SimulatedVerifier
from research.simulator.simulation import Simulation
from research.simulator.wire import ShapeAt, WireLink
from research.traces.recordings import LISTS, HitTrace

_HASH = "0" * 64
_BEYOND = 64  # tokens that a text which ended by itself could have had more; no window looks further
_ELSE = RUNNERS_UP + 2  # a drafter's own wrong token, after the right one
WARM_UP_S = 1.5  # until measurements have settled
MAX_TOKENS_A_S = 200  # of a session; no text is longer than it could become at that speed


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Policies of both sides.

    Attributes:
        window: window of the edge; None: as many drafts as pay.
        patience: patience that the edge asks for; None: the verifier plans it.
        max_drafts: most drafts that a step verifies.
        drafting: whether the edge drafts; False: cloud streaming.
        logprobs: whether the edge asks for log probabilities, 4 bytes a token.
        here: whether the verifier has a drafter of its own, the edge's.
        drafts_here: drafts that it makes before every step, none during one; None: as it prices them.
        trees: whether steps verify branches beside the chain.
    """

    window: Window | None = None
    patience: Patience | None = None
    goal: Goal = Goal.LATENCY
    max_drafts: int = 16
    drafting: bool = True
    logprobs: bool = True
    here: bool = False
    drafts_here: int | None = None
    trees: bool = False


def synchronous(length: int) -> Policy:
    """Return classical speculative decoding: draft, wait for the verdict, begin again (Leviathan et al. 2023)."""
    return Policy(window=Window(length), patience=Patience(math.inf, length))


def colocated(length: int) -> Policy:
    """Return drafting beside the target: so many drafts before every step, none during one, and none at the edge."""
    return Policy(drafting=False, here=True, drafts_here=length)


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """Result of a replayed text.

    Attributes:
        seconds: time from Open to Done.
        arrivals: [n] seconds until each token reached the user.
        uplink_bytes, downlink_bytes: bytes that the link carried.
        active: [n] index of the active drafter when the token came; 0: the first one.
    """

    seconds: float
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
        self._leader = 0  # whose chain it is

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
        if not job.count:  # an idle drafter reads the chain
            seconds = costs.propose_s(len(job.extend_with) + 1, 0)
            return Drafted(job, (), seconds, self._read_chain(job)), costs.job_s + seconds
        self._leader = job.drafter if job.branch < 0 else self._leader
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

    def _read_chain(self, job: DraftJob) -> TeacherForced:
        """Return an idle drafter's proposals in place of the tokens of text and chain.

        Where the chain has left the text, it differs from the leader as it does on the text.
        """
        trace, proposals = self._arms[job.drafter].trace, list[DraftToken]()
        for position in range(job.truncate_to + job.skip, job.start):
            i, draft = position - self.first, job.extend_with[position - job.truncate_to]
            if position >= len(self.tokens) or (trace.silent and trace.silent[i]):
                proposals.append(DraftToken(-1))
                continue
            on_text = position <= self._right[job.drafter]
            token = self.tokens[position] if on_text and trace.hits[i] else self._other_token(job.drafter, i, draft)
            perturbed = trace.perturbed_probability[i] if trace.perturbed_probability else math.nan
            proposals.append(DraftToken(token, trace.confidence[i], perturbed_probability=perturbed))
        return TeacherForced(tuple(proposals))

    def _other_token(self, drafter: int, i: int, draft: int) -> int:
        """Return the token that a drafter proposes in place of the leader's `draft`, where it is not the target's."""
        token, known = self.tokens[self.first + i], [arm.trace.choices[i : i + 1] for arm in self._arms]
        mine, leaders = known[drafter], known[self._leader]
        if not (mine and mine[0] and leaders and leaders[0]):
            return token + 1
        rank = leaders[0].index(mine[0][0]) if mine[0][0] in leaders[0] else _ELSE - 1 + drafter
        return draft if rank == 0 and draft != token else token + 1 + rank

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
        here: DraftingHere | None = None,
        first: bool = True,
    ) -> None:
        """Set both sides up. The arguments are those of `replay`, for one text.

        `measurements` are the edge's of earlier texts; `batching` and `here` have the verifier's. Drafts may follow the
        Open at once unless the text is the `first` of the edge.

        Raises:
            ConfigError: others on another text, or without a selector.
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
        frame = _open_frame(text, policy, sampling)
        rules = _rules((text,), policy, trace.tokens[-1:] if trace.ended else ())
        edge = EdgeSession(
            frame,
            policy.window,
            measurements=measurements,
            send_q=bool(others),
            selection=Selection(selector, names) if selector is not None else None,
        )
        local = None
        if here is not None:
            beside = TracedText((DrafterArm(trace, costs.here),))
            local = LocalThreads(clock, here, lambda _: beside)
        verifier = SimulatedVerifier(clock, rules, text, costs, batching, local)
        opened = None if first else VerifierSession(frame, rules, 0.0).opened()
        self._wires = WireLink(clock, shape_at, costs, edge.statistics, random.Random(seed))
        super().__init__(clock, edge, verifier, text, lambda _: self._wires, opened)

    def outcome(self) -> ReplayOutcome:
        """Run the whole text."""
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


def _open_frame(text: TracedText, policy: Policy, sampling: Sampling, session: str = "0" * 32) -> Open:
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


def _rules(texts: Sequence[TracedText], policy: Policy, eos_tokens: Sequence[int] = ()) -> VerifierRules:
    return VerifierRules(
        name="verifier",
        model="reference",
        tokenizer_sha256=_HASH,
        # A miss is the right token plus one, other wrong ones more.
        vocab_size=max(max(text.tokens) for text in texts) + _ELSE + 64,
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
    """
    session = partial(
        Replay,
        shape_at=shape_at,
        costs=costs,
        policy=policy,
        measurements=Measurements(),
        batching=Batching(),
        seed=seed,
        here=DraftingHere("here") if policy.here else None,
    )

    def one(trace: HitTrace, others: Sequence[DrafterArm], *, first: bool) -> ReplayOutcome:
        return session(trace, others=others, selector=selector() if selector else None, first=first).outcome()

    all_others = others or [()] * len(traces)
    if warm_up_tokens and traces:
        few = [DrafterArm(arm.trace.first(warm_up_tokens), arm.costs) for arm in all_others[0]]
        one(traces[0].first(warm_up_tokens), few, first=True)
    return [
        one(trace, others, first=not (i or warm_up_tokens))
        for i, (trace, others) in enumerate(zip(traces, all_others, strict=True))
    ]


def tokens_per_second(outcomes: Sequence[ReplayOutcome]) -> float:
    """Return tokens a second over all texts, from the request to the last token.

    Raises:
        ConfigError: there is no text.
    """
    if not outcomes:
        raise ConfigError("are none; record some with a drafter first", field="traces")
    return sum(len(o.arrivals) for o in outcomes) / sum(o.seconds for o in outcomes)


@dataclass(frozen=True, slots=True)
class Load:
    """Gaps and work of all sessions together.

    Attributes:
        gap_p95_s: 95th percentile of the time between tokens that reach users, in seconds; those of one commit come
            at once.
        tokens_per_second: rate of a session, on average.
        of_sessions: [sessions] rate of each, in tokens a second.
        steps_per_token: sessions' shares of target steps a token.
        rows_per_token: rows of these steps a token.
        cloud_drafting_s: drafting of the verifier's threads a token, in seconds.
        edge_drafting_s: drafting of the edges a token, in seconds.
    """

    gap_p95_s: float
    tokens_per_second: float
    of_sessions: tuple[float, ...]
    steps_per_token: float
    rows_per_token: float
    cloud_drafting_s: float
    edge_drafting_s: float


class ManyTexts:
    """A target that goes on with the text of each session; the first token of a prompt is the session's number."""

    def __init__(self, texts: Sequence[TracedText]) -> None:
        self._texts = texts

    def after(self, transcript: Sequence[int], block: tuple[int, ...]) -> tuple[int, ...]:
        """Return [k + 1] tokens of the session's text."""
        return self._texts[transcript[0]].after(transcript, block)

    def reward(self, start: int, drafts: int) -> None:
        """Return None: the reward is not known."""


def load_of(
    traces: Sequence[HitTrace],
    costs: Costs,
    policy: Policy,
    *,
    sessions: int,
    links: Sequence[LinkShape],
    threads: int,
    seconds: float,
    seed: int = 0,
) -> Load:
    """Return how `sessions` at once fare.

    Prompts are left out: each session has a prompt of one token, then the recorded texts, one after the other, from
    the next one on after the session before it.

    Args:
        traces: recorded texts of one drafter.
        costs: costs of the machines.
        policy: policy of all edges and of the verifier.
        sessions: number of sessions, each on an edge of its own.
        links: links that are dealt out among the sessions.
        threads: threads of the verifier that draft, where `policy.here`.
        seconds: time that is measured after a warm-up.
        seed: seed of the first session's text, and of the moments at which sessions begin, which lie in the first half
            of the warm-up.
    """
    clock, rng, end_s = VirtualClock(), random.Random(seed), WARM_UP_S + seconds
    first = rng.randrange(len(traces))
    endless = [_endless(traces, first + number, int(end_s * MAX_TOKENS_A_S)) for number in range(sessions)]
    texts = [_text(trace, number, costs) for number, trace in enumerate(endless)]
    local = None
    if policy.here:
        beside = {str(number): _text(trace, number, costs.here) for number, trace in enumerate(endless)}
        local = LocalThreads(clock, DraftingHere("here"), beside.__getitem__, threads)
    verifier = SimulatedVerifier(clock, _rules(texts, policy), ManyTexts(texts), costs, local=local)

    def session(text: TracedText, shape: LinkShape) -> Simulation:
        sampling = Sampling(max_tokens=len(text.tokens) - 1, ignore_eos=True)
        edge = EdgeSession(_open_frame(text, policy, sampling, str(text.tokens[0])), policy.window)
        link = WireLink(clock, lambda _: shape, costs, edge.statistics, random.Random(0))
        return Simulation(clock, edge, verifier, text, lambda _: link)

    simulations = list(map(session, texts, itertools.cycle(links)))
    for simulation in simulations:
        clock.at(rng.uniform(0.0, WARM_UP_S / 2), simulation.begin)
    while clock.now < end_s:
        clock.advance()
    return _measured(simulations, local, seconds)


def _measured(simulations: Sequence[Simulation], local: LocalThreads | None, seconds: float) -> Load:
    measured = [[at for at in simulation.arrivals if at >= WARM_UP_S] for simulation in simulations]
    gaps = sorted(b - a for arrivals in measured for a, b in itertools.pairwise(arrivals))
    counts = [simulation.edge.statistics for simulation in simulations]
    tokens = max(1, sum(count.committed for count in counts))
    steps = sum(count.steps for count in counts)
    return Load(
        gap_p95_s=gaps[int(0.95 * (len(gaps) - 1))] if gaps else seconds,
        tokens_per_second=sum(map(len, measured)) / seconds / len(simulations),
        of_sessions=tuple(len(arrivals) / seconds for arrivals in measured),
        steps_per_token=steps / tokens,
        rows_per_token=(steps + sum(count.verified for count in counts)) / tokens,
        cloud_drafting_s=(local.busy_s if local is not None else 0.0) / tokens,
        edge_drafting_s=sum(count.drafting_s for count in counts) / tokens,
    )


def _endless(traces: Sequence[HitTrace], first: int, tokens: int) -> HitTrace:
    """Return the texts from the one of index `first` on, around, as one of at least `tokens`.

    A measure that one of them lacks is left out.
    """
    chosen: list[HitTrace] = []
    for trace in itertools.islice(itertools.cycle(traces), first % len(traces), None):
        chosen.append(trace)
        tokens -= len(trace.tokens)
        if tokens <= 0:
            break
    lists = {name: [getattr(trace, name) for trace in chosen] for name in LISTS}
    if any(lists["silent"]):
        lists["silent"] = [trace.silent or (False,) * len(trace.tokens) for trace in chosen]
    chained: dict[str, Any] = {name: tuple(itertools.chain(*own)) if all(own) else () for name, own in lists.items()}
    return replace(chosen[0], prompt_tokens=1, ended=False, **chained)


def _text(trace: HitTrace, number: int, costs: Costs) -> TracedText:
    text = TracedText((DrafterArm(trace, costs),))
    text.tokens = (number, *text.tokens[1:])
    return text
