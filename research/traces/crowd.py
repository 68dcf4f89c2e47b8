"""Many sessions at once on one simulated verifier, each of which goes on with text after text."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.deploy.link.shape import LinkShape
from outrider.proto.policy.likely_branches import RUNNERS_UP
from outrider.proto.session import EdgeSession, VerifierRules
from outrider.proto.session.both_ends import DraftingHere
from outrider.proto.types import Open, Sampling
from research.simulator.clock import Costs, VirtualClock
from research.simulator.local import LocalThreads
from research.simulator.simulated_verifier import SimulatedVerifier
from research.simulator.simulation import Simulation
from research.simulator.wire import WireLink
from research.traces.recordings import LISTS, HitTrace
from research.traces.traced import DrafterArm, Policy, TracedText

WARM_UP_S = 1.5  # until measurements have settled
MAX_TOKENS_A_S = 200  # of a session; no text is longer than it could become at that speed
_HASH = "0" * 64


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
    dealt_out = zip(texts, itertools.cycle(links), strict=False)
    simulations = [_simulation(clock, verifier, text, policy, costs, link) for text, link in dealt_out]
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


def _simulation(
    clock: VirtualClock, verifier: SimulatedVerifier, text: TracedText, policy: Policy, costs: Costs, shape: LinkShape
) -> Simulation:
    frame = Open(
        model="reference",
        tokenizer_sha256=_HASH,
        prompt=text.tokens[:1],
        sampling=Sampling(max_tokens=len(text.tokens) - 1, ignore_eos=True),
        session=str(text.tokens[0]),
        drafting=policy.drafting,
        patience=policy.patience,
        drafts_here=policy.drafts_here,
    )
    edge = EdgeSession(frame, policy.window)
    link = WireLink(clock, lambda _: shape, costs, edge.statistics, random.Random(0))
    return Simulation(clock, edge, verifier, text, lambda _: link)


def _rules(texts: Sequence[TracedText], policy: Policy) -> VerifierRules:
    return VerifierRules(
        name="verifier",
        model="reference",
        tokenizer_sha256=_HASH,
        # A miss is the right token plus one, a runner-up more.
        vocab_size=max(max(text.tokens) for text in texts) + 2 + RUNNERS_UP,
        context_length=max(len(text.tokens) for text in texts),
        eos_tokens=frozenset(),
        max_drafts=policy.max_drafts,
        goal=policy.goal,
    )
