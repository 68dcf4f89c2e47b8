"""Many sessions at once on simulated verifiers, which go on with one recorded text after the other."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.proto.session import EdgeSession, EdgeStatistics
from outrider.proto.types import Sampling
from research.fleet.prices import Device, VerifierPrices
from research.fleet.schemes import Scheme
from research.simulator.clock import Costs, VirtualClock
from research.simulator.simulated_verifier import SimulatedVerifier
from research.simulator.simulation import Simulation
from research.simulator.wire import ShapeAt, WireLink
from research.traces.recordings import HitTrace
from research.traces.traced import DrafterArm, TracedText, open_frame, rules_of

WARM_UP_S = 1.5  # until measurements have settled
MAX_TOKENS_A_S = 200  # of a session
CHAINED = ("tokens", "hits", "confidence", "runner_up")


@dataclass(frozen=True, slots=True)
class Load:
    """How sessions fared together, after a warm-up.

    Attributes:
        seconds: time that was measured.
        gap_p50_s, gap_p99_s: quantiles of the time between tokens that reach users, in seconds; those of one commit
            come at once.
        tokens: [sessions] tokens of each.
        rates: [sessions] tokens a second of each while it went on.
        gaps_p99_s: [sessions] the same quantile of each alone.
        steps_per_token: sessions' shares of target steps a token.
        rows_per_token: rows of these steps a token.
        cloud_drafting_s: drafting of the verifiers' cores a token, in seconds.
        edge_drafting_s: drafting of the edges a token, in seconds.
        edge_joules: energy of that drafting a token.
        bytes_per_token: bytes that links carried a token, both ways.
    """

    seconds: float
    gap_p50_s: float
    gap_p99_s: float
    tokens: tuple[int, ...]
    rates: tuple[float, ...]
    gaps_p99_s: tuple[float, ...]
    steps_per_token: float
    rows_per_token: float
    cloud_drafting_s: float
    edge_drafting_s: float
    edge_joules: float
    bytes_per_token: float

    @property
    def tokens_per_second(self) -> float:
        return sum(self.tokens) / self.seconds

    def goodput(self, gap_s: float, pace_s: float) -> float:
        """Return the tokens a second of sessions that keep a gap and a mean time a token."""
        fared = zip(self.tokens, self.rates, self.gaps_p99_s, strict=True)
        return sum(tokens for tokens, rate, gap in fared if gap <= gap_s and rate * pace_s >= 1) / self.seconds


@dataclass(frozen=True, slots=True)
class Observed:
    """One session: when its tokens reached the user, from and until when it went on, and what it took."""

    arrivals: Sequence[float]
    began_s: float
    ended_s: float
    statistics: EdgeStatistics
    link: WireLink
    device: Device


class ManyTexts:
    """A target that goes on with the text of each session; the first token of a prompt is the session's number."""

    def __init__(self, texts: Mapping[int, TracedText] | Sequence[TracedText]) -> None:
        self._texts = texts

    def after(self, transcript: Sequence[int], block: tuple[int, ...]) -> tuple[int, ...]:
        return self._texts[transcript[0]].after(transcript, block)

    def reward(self, start: int, drafts: int) -> None:
        pass


def endless(traces: Sequence[HitTrace], first: int, tokens: int) -> HitTrace:
    """Return the texts from the one of index `first` on, around, as one of at least `tokens` after one of prompt."""
    chosen, length = list[HitTrace](), 0
    while length < tokens:
        chosen.append(traces[(first + len(chosen)) % len(traces)])
        length += len(chosen[-1].tokens)
    chained: dict[str, Any] = {
        name: tuple(itertools.chain(*(getattr(each, name) for each in chosen))) for name in CHAINED
    }
    bare: dict[str, Any] = dict.fromkeys(("silent", "perturbed_probability", "agreement"), ())
    return replace(chosen[0], prompt_tokens=1, ended=False, **bare, **chained)


def numbered(trace: HitTrace, number: int, costs: Costs) -> TracedText:
    """Return the text of a session, whose prompt begins with its number, with a drafter of these costs."""
    text = TracedText((DrafterArm(trace, costs),))
    text.tokens = (number, *text.tokens[1:])
    return text


def load(
    traces: Sequence[HitTrace],
    scheme: Scheme,
    prices: VerifierPrices,
    *,
    sessions: int,
    devices: Sequence[Device],
    links: Sequence[ShapeAt],
    seconds: float = 1.5,
    seed: int = 0,
) -> Load:
    """Return how `sessions` of one verifier fare, each on an edge of its own, with text after text.

    Args:
        traces: recorded texts of one drafter.
        scheme: way to decode.
        prices: prices of the verifier.
        sessions: number of sessions.
        devices: devices that are dealt out among the sessions.
        links: links that are dealt out among the sessions, as shapes by time.
        seconds: time that is measured after a warm-up.
        seed: seed of the first session's text, and of the moments at which sessions begin, which lie in the first half
            of the warm-up.
    """
    clock, rng, end_s = VirtualClock(), random.Random(seed), WARM_UP_S + seconds
    first = rng.randrange(len(traces))
    whole = [endless(traces, first + number, int(end_s * MAX_TOKENS_A_S)) for number in range(sessions)]

    of_session = list(itertools.islice(itertools.cycle(devices), sessions))
    texts = [
        numbered(trace, number, scheme.costs(prices, device.drafting_s))
        for number, (trace, device) in enumerate(zip(whole, of_session, strict=True))
    ]
    here = scheme.costs_here(prices)
    beside = {str(number): numbered(trace, number, here).draft for number, trace in enumerate(whole)}
    local = scheme.beside(clock, beside.__getitem__)
    costs = scheme.costs(prices, devices[0].drafting_s)
    rules = rules_of(texts, scheme.policy)
    verifier = SimulatedVerifier(clock, rules, ManyTexts(texts), costs, scheme.new_batching(), local)

    def session(text: TracedText, shape_at: ShapeAt) -> tuple[Simulation, WireLink]:
        sampling = Sampling(max_tokens=len(text.tokens) - 1, ignore_eos=True)
        edge = EdgeSession(open_frame(text, scheme.policy, sampling, str(text.tokens[0])), scheme.policy.window)
        link = WireLink(clock, shape_at, costs, edge.statistics, random.Random(text.tokens[0]))
        return Simulation(clock, edge, verifier, text, lambda _: link), link

    pairs = [session(text, shape_at) for text, shape_at in zip(texts, itertools.cycle(links), strict=False)]
    for simulation, _ in pairs:
        clock.at(rng.uniform(0.0, WARM_UP_S / 2), simulation.begin)
    while clock.now < end_s:
        clock.advance()
    observed = [
        Observed(simulation.arrivals, 0.0, end_s, simulation.edge.statistics, link, device)
        for (simulation, link), device in zip(pairs, of_session, strict=True)
    ]
    return measured(observed, seconds, local.busy_s if local is not None else 0.0)


def measured(sessions: Sequence[Observed], seconds: float, busy_s: float) -> Load:
    """Return what sessions show in `seconds` after the warm-up; `busy_s`: drafting of the verifiers' cores."""
    end_s = WARM_UP_S + seconds
    times = [[at for at in one.arrivals if WARM_UP_S <= at < end_s] for one in sessions]
    active_s = [max(1e-9, min(end_s, one.ended_s) - max(WARM_UP_S, one.began_s)) for one in sessions]
    gaps = [sorted(b - a for a, b in itertools.pairwise(own)) for own in times]
    together = sorted(itertools.chain(*gaps))
    counts = [one.statistics for one in sessions]
    tokens = max(1, sum(count.committed for count in counts))
    steps = sum(count.steps for count in counts)
    drafting = [count.drafting_s + count.reading_s for count in counts]
    return Load(
        seconds=seconds,
        gap_p50_s=quantile(together, 0.5, seconds),
        gap_p99_s=quantile(together, 0.99, seconds),
        tokens=tuple(map(len, times)),
        rates=tuple(len(own) / active for own, active in zip(times, active_s, strict=True)),
        gaps_p99_s=tuple(quantile(own, 0.99, 0.0) for own in gaps),
        steps_per_token=steps / tokens,
        rows_per_token=(steps + sum(count.verified for count in counts)) / tokens,
        cloud_drafting_s=busy_s / tokens,
        edge_drafting_s=sum(drafting) / tokens,
        edge_joules=sum(s * one.device.watts for s, one in zip(drafting, sessions, strict=True)) / tokens,
        bytes_per_token=sum(one.link.wire_up.bytes + one.link.wire_down.bytes for one in sessions) / tokens,
    )


def quantile(ordered: Sequence[float], share: float, empty: float) -> float:
    """Return the entry of rank `share` of sorted numbers; `empty` where there is none."""
    return ordered[round(share * (len(ordered) - 1))] if ordered else empty
