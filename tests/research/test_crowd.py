"""Many sessions of one simulated verifier, which share its steps and its drafter."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from local_threads import LocalThreads, colocated

from outrider.deploy.link.shape import LinkShape
from outrider.proto.session import EdgeSession
from outrider.proto.session.both_ends import DraftingHere
from outrider.proto.types import Patience, Sampling
from research.simulator.clock import Costs, VirtualClock
from research.simulator.simulated_verifier import SimulatedVerifier
from research.simulator.simulation import Simulation
from research.simulator.wire import WireLink
from research.traces.recordings import HitTrace
from research.traces.traced import DrafterArm, Policy, TracedText, open_frame, rules_of

COSTS = Costs(step_s=0.03, row_s=0.0001, drafting_s=0.002, catch_up_s=0.0)
WARM_UP_S = 1.5  # until measurements have settled
MAX_TOKENS_A_S = 200  # of a session


def trace(seed: int, tokens: int = 120, right: float = 0.8) -> HitTrace:
    rng = random.Random(seed)
    hits = tuple(rng.random() < right for _ in range(tokens))
    text = tuple(rng.randrange(5, 500) for _ in range(tokens))
    return HitTrace(str(seed), "", "general", "1", 0.0, 20, text, hits, (0.8,) * tokens)


TRACES = [trace(seed) for seed in range(4)]


@dataclass(frozen=True)
class Load:
    """How the sessions fared together: the speed of one on average, and steps and drafting a token."""

    tokens_per_second: float
    steps_per_token: float
    cloud_drafting_s: float
    edge_drafting_s: float


class ManyTexts:
    """A target that goes on with the text of each session; the first token of a prompt is the session's number."""

    def __init__(self, texts: Sequence[TracedText]) -> None:
        self._texts = texts

    def after(self, transcript: Sequence[int], block: tuple[int, ...]) -> tuple[int, ...]:
        return self._texts[transcript[0]].after(transcript, block)

    def reward(self, start: int, drafts: int) -> None:
        pass


def endless(traces: Sequence[HitTrace], first: int, tokens: int) -> HitTrace:
    """Return the texts from the one of index `first` on, around, as one of at least `tokens`."""
    chosen: list[HitTrace] = []
    while sum(len(each.tokens) for each in chosen) < tokens:
        chosen.append(traces[(first + len(chosen)) % len(traces)])
    names = ("tokens", "hits", "confidence", "runner_up")
    chained = {name: tuple(itertools.chain(*(getattr(each, name) for each in chosen))) for name in names}
    return replace(chosen[0], prompt_tokens=1, ended=False, **chained)


def load(
    policy: Policy,
    sessions: int,
    rtt_s: float = 0.01,
    *,
    here: bool = False,
    threads: int = 1,
    costs: Costs = COSTS,
    traces: Sequence[HitTrace] = TRACES,
    seconds: float = 1.5,
) -> Load:
    """Measure `sessions` at once for some seconds after a warm-up; each goes on with one text after the other."""
    clock, rng, end_s = VirtualClock(), random.Random(0), WARM_UP_S + seconds
    first = rng.randrange(len(traces))
    whole = [endless(traces, first + number, int(end_s * MAX_TOKENS_A_S)) for number in range(sessions)]

    def text_of(number: int) -> TracedText:
        text = TracedText((DrafterArm(whole[number], costs),))
        text.tokens = (number, *text.tokens[1:])
        return text

    texts = [text_of(number) for number in range(sessions)]
    local = None
    if here or policy.drafts_here:
        beside = {str(number): text_of(number).draft for number in range(sessions)}
        local = LocalThreads(clock, DraftingHere("here"), beside.__getitem__, threads)
    verifier = SimulatedVerifier(clock, rules_of(texts, policy), ManyTexts(texts), costs, local=local)

    def session(text: TracedText) -> Simulation:
        sampling = Sampling(max_tokens=len(text.tokens) - 1, ignore_eos=True)
        edge = EdgeSession(open_frame(text, policy, sampling, str(text.tokens[0])), policy.window)
        link = WireLink(clock, lambda _: LinkShape(rtt_s), costs, edge.statistics, random.Random(0))
        return Simulation(clock, edge, verifier, text, lambda _: link)

    simulations = list(map(session, texts))
    for simulation in simulations:
        clock.at(rng.uniform(0.0, WARM_UP_S / 2), simulation.begin)
    while clock.now < end_s:
        clock.advance()
    counts = [simulation.edge.statistics for simulation in simulations]
    tokens = max(1, sum(count.committed for count in counts))
    return Load(
        sum(at >= WARM_UP_S for simulation in simulations for at in simulation.arrivals) / seconds / sessions,
        sum(count.steps for count in counts) / tokens,
        (local.busy_s if local is not None else 0.0) / tokens,
        sum(count.drafting_s for count in counts) / tokens,
    )


def test_cloud_streaming_gives_each_session_a_token_a_step() -> None:
    alone, many = (load(Policy(drafting=False), sessions) for sessions in (1, 20))
    step_s = COSTS.step_s + COSTS.row_s + COSTS.commit_s
    assert alone.tokens_per_second == pytest.approx(1 / step_s, rel=0.05)
    assert alone.steps_per_token == 1.0
    assert alone.cloud_drafting_s == alone.edge_drafting_s == 0.0
    assert many.tokens_per_second == pytest.approx(1 / (step_s + 19 * COSTS.row_s), rel=0.05), "they share their steps"


@pytest.mark.parametrize("sessions", [2, 4])
def test_sessions_that_share_steps_get_as_much_of_their_drafts_as_one_alone(sessions: int) -> None:
    """A step that waits for the drafts of several must not begin a moment before they come."""
    costs = Costs(step_s=0.012, row_s=0.001, min_step_s=0.05, drafting_s=0.001)
    long = {"costs": costs, "traces": [trace(seed, right=0.6) for seed in range(12)], "seconds": 6.0}
    one, several = (load(Policy(), number, **long) for number in (1, sessions))
    ahead = load(Policy(patience=Patience(0.0, 1)), sessions, **long)
    assert several.steps_per_token < 1.1 * one.steps_per_token
    assert several.tokens_per_second > 0.9 * one.tokens_per_second
    assert several.tokens_per_second > 1.1 * ahead.tokens_per_second, "else it should not wait"


def test_edges_draft_at_once_and_drafters_beside_the_target_wait_for_a_thread() -> None:
    costs = Costs(step_s=0.03, row_s=0.0001, drafting_s=0.01, catch_up_s=0.0)
    one, eight = (load(colocated(3), n, costs=costs) for n in (1, 8))
    assert one.cloud_drafting_s > 0
    assert one.edge_drafting_s == 0
    assert eight.tokens_per_second < 0.6 * one.tokens_per_second
    more_threads = load(colocated(3), 8, threads=8, costs=costs)
    assert more_threads.tokens_per_second > 1.3 * eight.tokens_per_second
    at_edges = [load(Policy(), n, costs=costs) for n in (1, 8)]
    assert at_edges[1].tokens_per_second > 0.8 * at_edges[0].tokens_per_second
    assert at_edges[1].cloud_drafting_s == 0
    assert at_edges[1].edge_drafting_s > 0


def test_a_drafter_beside_the_target_makes_the_round_trip_unimportant() -> None:
    near, far = (load(colocated(4), 1, rtt_s).tokens_per_second for rtt_s in (0.002, 0.2))
    assert far == pytest.approx(near, rel=0.1)
    near, far = (load(Policy(), 1, rtt_s).tokens_per_second for rtt_s in (0.002, 0.2))
    assert far < 0.7 * near


def test_edges_draft_for_likely_misses_within_the_vocabulary() -> None:
    tokens = 120
    hits = tuple(i % 3 > 0 for i in range(tokens))
    one = HitTrace("0", "", "general", "1", 0.0, 20, (7,) * tokens, hits, (0.5,) * tokens, runner_up=(0,) * tokens)
    assert load(Policy(), 2, traces=[one]).edge_drafting_s > 0


@pytest.mark.parametrize("row_ms", [0.1, 1.0])
def test_both_ends_are_not_slowed_by_the_rows_of_each_other(row_ms) -> None:
    """A draft that pays in a step of its own may not pay where 16 sessions wait for its row."""
    costs = replace(COSTS, step_s=0.012, row_s=row_ms / 1e3, min_step_s=0.03, drafting_s=4e-4)
    cloud, edge, both = (
        load(policy, 16, costs=costs, here=here).tokens_per_second
        for policy, here in ((Policy(drafting=False), False), (Policy(), False), (Policy(), True))
    )
    beside = max(load(colocated(length), 16, costs=costs).tokens_per_second for length in (1, 2, 4))
    assert both > 1.05 * max(cloud, beside)
    # A step waits out the margin of drafts from afar, and not yet that of a wait of both ends: 0.91 with cheap rows.
    assert both > 0.9 * edge
