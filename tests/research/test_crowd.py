"""Many sessions of one simulated verifier, which share its steps and its drafter."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from outrider.deploy.link.shape import LinkShape
from outrider.proto.types import Patience
from research.simulator.clock import Costs
from research.traces.recordings import HitTrace
from research.traces.traced import Load, Policy, colocated, load_of

COSTS = Costs(step_s=0.03, row_s=0.0001, drafting_s=0.002, drafting_here_s=0.002, catch_up_s=0.0)


def trace(seed: int, tokens: int = 120, right: float = 0.8) -> HitTrace:
    rng = random.Random(seed)
    hits = tuple(rng.random() < right for _ in range(tokens))
    text = tuple(rng.randrange(5, 500) for _ in range(tokens))
    return HitTrace(str(seed), "", "general", "1", 0.0, 20, text, hits, (0.8,) * tokens)


TRACES = [trace(seed) for seed in range(4)]
BOTH = Policy(here=True)


def load(policy: Policy, sessions: int, rtt_s: float = 0.01, threads: int = 1, costs: Costs = COSTS):
    return load_of(TRACES, costs, policy, sessions=sessions, links=(LinkShape(rtt_s),), threads=threads, seconds=1.5)


def test_cloud_streaming_gives_each_session_a_token_a_step() -> None:
    alone = load(Policy(drafting=False), 1)
    step_s = COSTS.step_s + COSTS.row_s + COSTS.commit_s
    assert alone.gap_p95_s == pytest.approx(step_s, rel=0.02)
    assert alone.tokens_per_second == pytest.approx(1 / step_s, rel=0.05)
    assert (alone.steps_per_token, alone.rows_per_token) == (1.0, 1.0)
    assert alone.cloud_drafting_s == alone.edge_drafting_s == 0.0
    many = load(Policy(drafting=False), 20)
    assert many.gap_p95_s == pytest.approx(step_s + 19 * COSTS.row_s, rel=0.05), "they share their steps"


@pytest.mark.parametrize("sessions", [2, 4])
def test_sessions_that_share_steps_get_as_much_of_their_drafts_as_one_alone(sessions: int) -> None:
    """A step that waits for the drafts of several must not begin a moment before they come."""
    costs = Costs(step_s=0.012, row_s=0.001, min_step_s=0.05, drafting_s=0.001)
    traces = [trace(seed, right=0.6) for seed in range(12)]

    def found(sessions: int, **policy: object) -> Load:
        links = (LinkShape(0.01),)
        return load_of(traces, costs, Policy(**policy), sessions=sessions, links=links, threads=1, seconds=6.0)

    one, several, ahead = found(1), found(sessions), found(sessions, patience=Patience(0.0, 1))
    assert several.steps_per_token < 1.1 * one.steps_per_token
    assert several.tokens_per_second > 0.9 * one.tokens_per_second
    assert several.tokens_per_second > 1.1 * ahead.tokens_per_second, "else it should not wait"


def test_edges_draft_at_once_and_drafters_beside_the_target_wait_for_a_thread() -> None:
    slow = {"drafting_s": 0.01, "drafting_here_s": 0.01}
    costs = Costs(step_s=0.03, row_s=0.0001, catch_up_s=0.0, **slow)
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
    found = load_of([one], COSTS, Policy(), sessions=2, links=(LinkShape(0.01),), threads=1, seconds=1.5)
    assert found.edge_drafting_s > 0


def test_sessions_have_the_links_that_are_dealt_out() -> None:
    links = (LinkShape(0.002), LinkShape(0.2))
    found = load_of(TRACES, COSTS, Policy(), sessions=4, links=links, threads=1, seconds=1.5)
    assert found.tokens_per_second == pytest.approx(sum(found.of_sessions) / 4)
    assert min(found.of_sessions[::2]) > max(found.of_sessions[1::2])


@pytest.mark.parametrize("row_ms", [0.1, 0.5, 1.0])
def test_both_ends_are_not_slowed_by_the_rows_of_each_other(row_ms) -> None:
    """A draft that pays in a step of its own may not pay where 16 sessions wait for its row."""
    costs = replace(COSTS, step_s=0.012, row_s=row_ms / 1e3, min_step_s=0.03, drafting_s=4e-4, drafting_here_s=4e-4)
    cloud, edge, both = (
        load(policy, 16, costs=costs).tokens_per_second for policy in (Policy(drafting=False), Policy(), BOTH)
    )
    beside = max(load(colocated(length), 16, costs=costs).tokens_per_second for length in (1, 2, 4))
    assert both > 1.05 * max(cloud, beside)
    # A step waits out the margin of drafts from afar, and not yet that of a wait of both ends: 0.91 with cheap rows.
    assert both > 0.9 * edge


def test_another_seed_gives_sessions_other_texts_and_beginnings() -> None:
    one, same, other = (
        load_of(
            TRACES, COSTS, Policy(here=True), sessions=3, links=(LinkShape(0.01),), threads=1, seconds=1.5, seed=seed
        )
        for seed in (0, 0, 1)
    )
    assert one == same
    assert one != other
