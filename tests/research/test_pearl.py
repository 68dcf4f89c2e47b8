"""PEARL as a policy of window and patience: its messages on the virtual clock, its steps, and where it stands."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from test_replay import CLOUD, FREE, LINK, Written, at, random_traces, trace_of

from outrider.deploy.link.shape import LinkShape
from outrider.edge.policies.length.rules import PearlWindow
from outrider.proto.types import Commit, Draft, Patience
from research.replay.optimum import pearl, pearl_length, synchronous, tokens_per_second
from research.replay.traced import Policy, replay
from research.simulator.clock import Costs
from research.traces.sweep import noted, policy_of

BLOCK = 4
ONE_MISS = [1] * 7 + [0] + [1] * 20


def written(hits, policy: Policy, **changes) -> Written:
    """Return the replay of one text, in which drafts may follow the Open at once, after its end."""
    replayed = Written(trace_of(hits, **changes), at(LINK), FREE, policy, first=False)
    replayed.outcome()
    return replayed


def frames(replayed: Written, kind: type, event: str) -> list[tuple[float, Draft | Commit]]:
    """Return the frames of a kind with the times in ms at which they were sent, or arrived."""
    return [(round(1e3 * t), frame) for t, _, what, frame in replayed.log if what == event and isinstance(frame, kind)]


def test_the_first_draft_leaves_alone_and_the_rest_of_its_block_when_it_is_whole() -> None:
    sent = frames(written(ONE_MISS, pearl(BLOCK)), Draft, "sent")
    assert [(at_ms, draft.chain, draft.start, len(draft.tokens)) for at_ms, draft in sent[:3]] == [
        (1, 0, 30, 1),  # a draft takes 1 ms
        (4, 0, 31, 3),
        (8, 0, 34, 4),  # while the target reads the prompt
    ]
    # The miss is at 37, and known at 70 ms; the chain after it begins in the same way.
    later = [(at_ms, draft.start, len(draft.tokens)) for at_ms, draft in sent if draft.chain == 1]
    assert later[:3] == [(71, 38, 1), (74, 39, 3), (78, 42, 4)]


def test_the_next_block_is_sent_while_the_one_before_it_is_verified() -> None:
    def overlap(policy: Policy) -> list[bool]:
        """Return of each message but the first whether it left before the verdict on the one before it came."""
        replayed, found = written([1] * 40, policy), []
        sent, verdicts = frames(replayed, Draft, "sent"), frames(replayed, Commit, "arrived")
        for (_, before), (at_ms, _) in pairwise(sent):
            end = before.start + len(before.tokens)
            came = (came_ms for came_ms, commit in verdicts if commit.start + len(commit.tokens) >= end)
            found.append(at_ms < next(came))
        return found

    assert all(overlap(pearl(BLOCK)))
    assert not any(overlap(synchronous(BLOCK))[1:])  # the first follows the token of the prompt's step


def test_right_after_a_miss_the_target_decodes_at_once_and_then_waits() -> None:
    def after_the_miss(policy: Policy) -> list[tuple[int, int]]:
        commits = frames(written(ONE_MISS, policy), Commit, "sent")
        return [(at_ms, commit.verified) for at_ms, commit in commits if commit.start >= 38][:2]

    # The miss is committed at 50 ms. The token after it needs no draft; the next step waits for the drafts after that.
    assert after_the_miss(pearl(BLOCK)) == [(60, 0), (104, 3)]
    waiting = replace(pearl(BLOCK), patience=Patience(math.inf))
    assert after_the_miss(waiting) == [(101, 1), (111, 4)]
    ahead = replace(pearl(BLOCK), patience=Patience(0.0))
    assert after_the_miss(ahead) == [(60, 0), (70, 0)]


def test_a_first_draft_that_is_wrong_is_never_a_row_of_a_step() -> None:
    commits = frames(written([0] * 12, pearl(BLOCK)), Commit, "sent")
    assert [(len(commit.tokens), commit.verified) for _, commit in commits] == [(1, 0)] * 12


def test_a_step_verifies_one_block_and_two_are_in_flight_at_most() -> None:
    replayed = written([1] * 60, pearl(BLOCK))
    assert max(commit.verified for _, commit in frames(replayed, Commit, "sent")) == BLOCK
    met, sent = 30, 0
    for _, _, what, frame in replayed.log:
        if isinstance(frame, Draft) and what == "sent":
            sent = max(sent, frame.start + len(frame.tokens))
            assert sent - met <= 2 * BLOCK
        elif isinstance(frame, Commit) and what == "arrived":
            met = frame.start + len(frame.tokens)


def test_blocks_bring_no_branches() -> None:
    runner_up = tuple(0 if hit else 1 for hit in ONE_MISS)
    slow = replace(FREE, step_s=0.1)

    def branches(policy: Policy) -> int:
        traces = [trace_of(ONE_MISS, runner_up=runner_up)] * 3
        return sum(outcome.statistics.branched for outcome in replay(traces, at(LINK), slow, policy))

    assert branches(pearl(BLOCK)) == 0
    assert branches(Policy()) > 0


@pytest.mark.parametrize(
    ("costs", "length"),
    [
        (Costs(min_step_s=0.030, drafting_s=0.004), 8),
        (Costs(min_step_s=0.030, drafting_s=0.001), 16),  # more than a step verifies
        (Costs(min_step_s=0.030, drafting_s=0.100), 1),
        (Costs(min_step_s=0.030, drafting_s=0.0), 16),
    ],
)
def test_a_block_has_as_many_drafts_as_are_made_in_a_step(costs: Costs, length: int) -> None:
    assert pearl_length(costs) == length


def test_it_beats_rounds_without_a_link_and_loses_to_cloud_streaming_on_a_long_one() -> None:
    traces, costs = random_traces(6, tokens=96, share=0.8), Costs(min_step_s=0.030, drafting_s=0.004)

    def speed(rtt_ms: float, policy: Policy) -> float:
        return tokens_per_second(replay(traces, at(LinkShape.of(rtt_ms=rtt_ms)), costs, policy, warm_up_tokens=24))

    overlap = pearl(pearl_length(costs))
    assert speed(0, overlap) > 1.1 * max(speed(0, synchronous(length)) for length in (2, 4, 8))
    assert speed(200, overlap) < speed(200, CLOUD)
    assert speed(200, Policy()) > 0.99 * speed(200, CLOUD)


def test_a_sweep_of_recorded_hits_has_it_with_its_waits() -> None:
    assert policy_of("pearl:8") == pearl(8)
    watched = noted(PearlWindow(8))
    traces = random_traces(3)
    plain, seen = (replay(traces, at(LINK), FREE, replace(pearl(8), window=w)) for w in (PearlWindow(8), watched))
    assert [outcome.arrivals for outcome in seen] == [outcome.arrivals for outcome in plain]
    assert watched.mean > 0
