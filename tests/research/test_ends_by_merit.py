"""Which end drafts where one hits more: the edge's personal drafter, or the verifier's own."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from bad_link import Faults
from oracle_drafters import Proposer, ScriptedDrafters, hashing_oracle
from oracle_texts import HASH, decode, own_texts

from outrider.proto.policy.measurements import Acceptance
from outrider.proto.session import EdgeStatistics, Selection
from outrider.proto.session.both_ends import DraftingHere
from outrider.proto.session.edge import VerifierArm
from outrider.proto.session.stream import EdgeStream
from outrider.proto.session.verifier import VerifierRules, VerifierSession
from outrider.proto.types import Commit, CommittedToken, DraftToken, FinishReason, Open, Report, Sampling
from research.simulator.clock import Costs
from research.traces.local_threads import LocalThreads

VOCABULARY = 64
ORACLE = hashing_oracle(7, vocab=VOCABULARY, eos_odds=0.0)
RULES = VerifierRules("v", "m", HASH, VOCABULARY, 4096, frozenset({0}))
Right = Callable[[int], float]  # chance of the oracle's token, by the length of the prefix


def hitting(right: Right, seed: int) -> Proposer:
    """A drafter whose hits change within the text."""

    def propose(prefix: tuple[int, ...], count: int) -> tuple[DraftToken, ...]:
        drafts: tuple[DraftToken, ...] = ()
        for _ in range(count):
            wanted = ORACLE(prefix)
            hit = random.Random(f"{seed} {len(prefix)}").random() < right(len(prefix))  # a fixed bit of the position
            prefix += (wanted if hit else 1 + wanted % (VOCABULARY - 1),)
            drafts += (DraftToken(prefix[-1]),)
        return drafts

    return propose


def decoded(
    edge: Right, here: Right, *, delay_s: float, drafting: bool = True, tokens: int = 400
) -> tuple[EdgeStatistics, float, list[float]]:
    """Decode one text; return its counts, its seconds, and the arrival of each token."""
    beside = ScriptedDrafters([hitting(here, 1)], 0.002, random.Random(2))
    [simulation], seconds = decode(
        1,
        faults=Faults(delay_s=delay_s),
        rules=RULES,
        tokens=tokens,
        costs=Costs(min_step_s=0.03),
        local=lambda clock: LocalThreads(clock, DraftingHere("here@1"), lambda _: beside.draft),
        oracle=ORACLE,
        proposer=lambda _: hitting(edge, 3),
        drafting_s=0.0005,
        drafting=drafting,
    )
    assert [simulation.emitted] == own_texts(1, oracle=ORACLE, tokens=tokens), "the text is the target's own"
    return simulation.edge.statistics, seconds, simulation.arrivals


@pytest.mark.parametrize("delay_s", [0.001, 0.005, 0.03, 0.1])
def test_where_the_verifiers_own_drafter_hits_more_the_edge_rests(delay_s) -> None:
    counts, seconds, _ = decoded(lambda _: 0.3, lambda _: 0.85, delay_s=delay_s)
    assert counts.drafted < 0.15 * 400, "but for the first drafts and a few probes"
    assert counts.accepted_cloud > 0.95 * counts.accepted
    _, alone_s, _ = decoded(lambda _: 0.3, lambda _: 0.85, delay_s=delay_s, drafting=False)
    assert seconds < 1.03 * alone_s, "as fast as beside an edge that has no drafter"
    equal, _, _ = decoded(lambda _: 0.85, lambda _: 0.85, delay_s=delay_s)
    assert equal.drafted > 1.2 * counts.drafted, "one that hits as much does not rest for its merit"


@pytest.mark.parametrize("delay_s", [0.001, 0.005, 0.03])
def test_where_the_edges_drafter_hits_more_its_chain_leads(delay_s) -> None:
    counts, _, _ = decoded(lambda _: 0.97, lambda _: 0.5, delay_s=delay_s)
    assert counts.accepted - counts.accepted_cloud > 0.95 * counts.accepted > 0.85 * 400
    assert counts.verified_cloud < 0.1 * counts.verified


@pytest.mark.parametrize("delay_s", [0.001, 0.005, 0.03, 0.1])
def test_a_resting_drafter_that_comes_to_hit_more_takes_the_lead(monkeypatch, delay_s) -> None:
    """Text that the edge has: from token 150 on its drafter copies a local document."""

    def second_half() -> tuple[EdgeStatistics, float]:
        counts, _, arrivals = decoded(lambda n: 0.3 if n < 150 else 0.98, lambda _: 0.7, delay_s=delay_s)
        return counts, arrivals[-1] - arrivals[200]

    counts, seconds = second_half()
    assert counts.accepted - counts.accepted_cloud > 70, "of 250 that it would hit"
    assert counts.verified_cloud < 560
    monkeypatch.setattr(EdgeStream, "changed", lambda self, report, **_: changed(self, report, hits_more=False))
    monkeypatch.setattr(Selection, "catch_up_active", lambda *_: None)
    quiet, slow_s = second_half()
    if delay_s >= 0.03:
        assert seconds < 0.75 * slow_s, "an edge that neither reads nor says so is found by rare probes alone"
        assert quiet.accepted_cloud > counts.accepted_cloud


changed = EdgeStream.changed


def commit_of(edge: int, here: int, accepted: int, finish: FinishReason | None = None) -> Commit:
    """A commit of a step with `edge` drafts of the edge and then `here` of the verifier."""
    tokens = tuple(CommittedToken(1, -1.0) for _ in range(accepted + 1))
    return Commit(9, tokens, accepted, 8, verified=edge + here, verified_here=here, finish=finish)


@pytest.mark.parametrize(
    ("edge", "here", "accepted", "finish", "hits", "trials"),
    [
        (0, 4, 4, None, 4, 4),
        (0, 4, 2, None, 2, 3),
        (3, 4, 5, None, 2, 3),
        (3, 4, 3, None, 0, 1),
        (3, 4, 2, None, 0, 0),
        (3, 0, 3, None, 0, 0),
        (0, 4, 1, FinishReason.LENGTH, 1, 1),
    ],
)
def test_the_verifiers_drafts_count_up_to_their_first_miss(edge, here, accepted, finish, hits, trials) -> None:
    arm, wanted = VerifierArm(), Acceptance()
    arm.take(commit_of(edge, here, accepted, finish))
    for i in range(trials):
        wanted.add(i < hits)
    assert arm.acceptance == wanted


def rated(rate: float, trials: float = 50.0) -> Acceptance:
    return Acceptance(rate * trials, trials)


def test_the_verifier_is_better_only_surely_and_while_it_drafts() -> None:
    arm = VerifierArm()
    assert not arm.is_better_than(rated(0.1)), "nothing is known of it"
    for _ in range(20):
        arm.take(commit_of(0, 4, 4))
    assert arm.is_better_than(rated(0.5))
    assert not arm.is_better_than(rated(0.9)), "that is no difference"
    assert not arm.is_better_than(rated(0.5, 3.0)), "few tokens show little"
    assert not rated(0.98).surely_exceeds(arm.acceptance)
    for _ in range(20):
        arm.take(commit_of(0, 4, 0))
    assert rated(0.98).surely_exceeds(arm.acceptance)
    assert not rated(0.7).surely_exceeds(arm.acceptance)
    better = VerifierArm()
    for _ in range(20):
        better.take(commit_of(0, 4, 4))
    for _ in range(8):
        assert better.is_better_than(rated(0.5))
        better.take(commit_of(3, 0, 3))
    assert not better.is_better_than(rated(0.5)), "it drafts no more, for its price perhaps"


def test_a_resting_edges_word_counts_and_a_drafting_ones_is_checked() -> None:
    frame = Open("m", HASH, (1, 2, 2), Sampling(max_tokens=40, ignore_eos=True), "s")
    for rests, rate in ((True, 0.9), (False, 0.5)):
        session = VerifierSession(frame, RULES, 0.0, DraftingHere("here@1"))
        assert session.ends is not None
        session.ends.edge_rests = rests
        received = session.received.acceptance
        received.restate(0.5)
        session.on_report(Report(True, 0.001, 0.01, 0.9))
        assert received.rate == pytest.approx(rate)
