"""Many sessions of one simulated verifier, which share its steps and its drafter."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from outrider.deploy.link.shape import LinkShape
from outrider.proto.types import Patience
from research.fleet.many_sessions import Load, load
from research.fleet.prices import Device, VerifierPrices
from research.fleet.schemes import Scheme, centralised, cloud_streaming, edges_alone
from research.simulator.clock import Costs
from research.traces.recordings import HitTrace
from research.traces.traced import Policy

PRICES = VerifierPrices(name="test", step_s=0.03, row_s=0.0001, source="made up")


def trace(seed: int, tokens: int = 120, right: float = 0.8) -> HitTrace:
    rng = random.Random(seed)
    hits = tuple(rng.random() < right for _ in range(tokens))
    text = tuple(rng.randrange(5, 500) for _ in range(tokens))
    return HitTrace(str(seed), "", "general", "1", 0.0, 20, text, hits, (0.8,) * tokens)


TRACES = [trace(seed) for seed in range(4)]


def crowd(
    scheme: Scheme,
    sessions: int,
    rtt_s: float = 0.01,
    *,
    prices: VerifierPrices = PRICES,
    drafting_s: float = 0.002,
    traces: Sequence[HitTrace] = TRACES,
    seconds: float = 1.5,
) -> Load:
    device, shape = Device("test", drafting_s, 10.0), LinkShape(rtt_s)
    return load(traces, scheme, prices, sessions=sessions, devices=(device,), links=(lambda _: shape,), seconds=seconds)


def speed(found: Load) -> float:
    """Return tokens a second of a session."""
    return found.tokens_per_second / len(found.tokens)


def beside(length: int, threads: int = 1, core_draft_s: float = 0.002) -> Scheme:
    return replace(centralised(replace(PRICES, threads=threads), length), core_draft_s=core_draft_s)


def test_cloud_streaming_gives_each_session_a_token_a_step() -> None:
    alone, many = (crowd(cloud_streaming(), sessions) for sessions in (1, 20))
    step_s = PRICES.step_s + PRICES.row_s + Costs().commit_s
    assert speed(alone) == pytest.approx(1 / step_s, rel=0.05)
    assert alone.steps_per_token == 1.0
    assert alone.cloud_drafting_s == alone.edge_drafting_s == alone.edge_joules == 0.0
    assert speed(many) == pytest.approx(1 / (step_s + 19 * PRICES.row_s), rel=0.05), "they share their steps"
    assert alone.gap_p99_s == pytest.approx(step_s, rel=0.05)


@pytest.mark.parametrize("sessions", [2, 4])
def test_sessions_that_share_steps_get_as_much_of_their_drafts_as_one_alone(sessions: int) -> None:
    """A step that waits for the drafts of several must not begin a moment before they come."""
    prices = VerifierPrices(name="test", step_s=0.012, row_s=0.001, min_step_s=0.05, source="made up")
    long = {"prices": prices, "drafting_s": 0.001, "traces": [trace(seed, right=0.6) for seed in range(12)]}
    one, several = (crowd(edges_alone(), number, seconds=6.0, **long) for number in (1, sessions))
    ahead = crowd(Scheme(name="", policy=Policy(patience=Patience(0.0, 1))), sessions, seconds=6.0, **long)
    assert several.steps_per_token < 1.1 * one.steps_per_token
    assert speed(several) > 0.9 * speed(one)
    assert speed(several) > 1.1 * speed(ahead), "else it should not wait"


def test_edges_draft_at_once_and_drafters_beside_the_target_wait_for_a_thread() -> None:
    one, eight = (crowd(beside(3, core_draft_s=0.01), n) for n in (1, 8))
    assert one.cloud_drafting_s > 0
    assert one.edge_drafting_s == 0
    assert speed(eight) < 0.6 * speed(one)
    assert speed(crowd(beside(3, threads=8, core_draft_s=0.01), 8)) > 1.3 * speed(eight)
    at_edges = [crowd(edges_alone(), n, drafting_s=0.01) for n in (1, 8)]
    assert speed(at_edges[1]) > 0.8 * speed(at_edges[0])
    assert at_edges[1].cloud_drafting_s == 0
    assert at_edges[1].edge_drafting_s > 0
    assert at_edges[1].edge_joules == pytest.approx(10.0 * at_edges[1].edge_drafting_s)


def test_a_drafter_beside_the_target_makes_the_round_trip_unimportant() -> None:
    near, far = (speed(crowd(beside(4), 1, rtt_s)) for rtt_s in (0.002, 0.2))
    assert far == pytest.approx(near, rel=0.1)
    near, far = (speed(crowd(edges_alone(), 1, rtt_s)) for rtt_s in (0.002, 0.2))
    assert far < 0.7 * near


def test_edges_draft_for_likely_misses_within_the_vocabulary() -> None:
    tokens = 120
    hits = tuple(i % 3 > 0 for i in range(tokens))
    one = HitTrace("0", "", "general", "1", 0.0, 20, (7,) * tokens, hits, (0.5,) * tokens, runner_up=(0,) * tokens)
    assert crowd(edges_alone(), 2, traces=[one]).edge_drafting_s > 0


@pytest.mark.parametrize("row_ms", [0.1, 1.0])
def test_both_ends_are_not_slowed_by_the_rows_of_each_other(row_ms) -> None:
    """A draft that pays in a step of its own may not pay where 16 sessions wait for its row."""
    prices = VerifierPrices(name="test", step_s=0.012, row_s=row_ms / 1e3, min_step_s=0.03, source="made up")
    core = {"threads": 1, "core_draft_s": 4e-4}
    cloud, edge, both = (
        speed(crowd(scheme, 16, prices=prices, drafting_s=4e-4))
        for scheme in (cloud_streaming(), edges_alone(), replace(edges_alone(), **core))
    )
    colocated = max(
        speed(crowd(beside(length, core_draft_s=4e-4), 16, prices=prices, drafting_s=4e-4)) for length in (1, 2, 4)
    )
    assert both > 1.05 * max(cloud, colocated)
    # A step waits out the margin of drafts from afar, and not yet that of a wait of both ends: 0.91 with cheap rows.
    assert both > 0.9 * edge


def test_a_verifier_of_a_crowd_leaves_the_drafting_to_quick_edges() -> None:
    """An edge's drafts are weighed by the rows that a step takes of them, not by all that it could."""
    prices = VerifierPrices(name="test", step_s=0.0186, row_s=0.0001, source="made up")
    edge, both = (
        crowd(scheme, 64, 0.014, prices=prices) for scheme in (edges_alone(), replace(edges_alone(), threads=8))
    )
    assert speed(both) > 0.97 * speed(edge)
    assert both.cloud_drafting_s < 0.001
