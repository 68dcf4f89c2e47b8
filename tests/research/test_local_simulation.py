"""Drafts from both ends in the simulator: texts are the target's own, whatever the verifier's own drafter does."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from bad_link import Faults
from oracle_drafters import ScriptedDrafters, drafter_of
from oracle_texts import ORACLE, TOKENS, decode, own_texts

from outrider.deploy.link.shape import LinkShape
from outrider.proto.policy.patience import division_of
from outrider.proto.session import EdgeStatistics, both_ends
from outrider.proto.session.both_ends import BothEnds, DraftingHere
from research.simulator.clock import Costs, VirtualClock
from research.traces.local_threads import LocalThreads, colocated, drafting_beside
from research.traces.recordings import HitTrace
from research.traces.traced import Beside, Policy, replay, tokens_per_second


class CheckedThreads(LocalThreads):
    """Checks before each step that the local chain follows the transcript in the drafter's own prefix."""

    prefixes: dict[str, ScriptedDrafters]

    def begin(self, shares, now) -> None:
        for share in shares:
            session = share.slot.session
            if session.ends is not None and session.ends.running is None and session.ends.tokens:
                chain = [*session.transcript, *(draft.id for draft in session.ends.tokens)]
                agreed = session.ends._agreed
                assert list(self.prefixes[session.id].prefixes[0][:agreed]) == chain[:agreed]
        super().begin(shares, now)


def decoded(
    edges: int = 1,
    *,
    right: float = 0.8,
    here_s: float = 0.001,
    dies_after: int = 1 << 30,
    price: float | None = None,
    **options,
) -> tuple[list[list[int]], list[EdgeStatistics], float]:
    """Return texts of edges on a verifier with a drafter of its own, their counts, and when the last has ended."""
    rng = random.Random(5)
    drafters: dict[str, ScriptedDrafters] = defaultdict(
        lambda: ScriptedDrafters([drafter_of(ORACLE, 1, right, dies_after=dies_after)], here_s, rng)
    )

    def local(clock: VirtualClock) -> CheckedThreads:
        threads = CheckedThreads(clock, DraftingHere("here@1", price), lambda session: drafters[session].draft)
        threads.prefixes = drafters
        return threads

    simulations, ended = decode(edges, local=local, **options)
    return [each.emitted for each in simulations], [each.edge.statistics for each in simulations], ended


@pytest.mark.parametrize("right", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("here_s", [0.0002, 0.02])
@pytest.mark.parametrize("drafts_here", [None, 0, 1, 7, 100])
def test_texts_are_the_targets_own(right, here_s, drafts_here) -> None:
    texts, _, _ = decoded(3, right=right, here_s=here_s, drafts_here=drafts_here)
    assert texts == own_texts(3)


@pytest.mark.parametrize("price", [0.0, None, 20.0])
def test_texts_are_the_targets_own_on_a_bad_link(price) -> None:
    faults = Faults(jitter_s=0.03, duplicated=0.2, reordered=0.2, breaks_every_s=0.7, goaway_every_s=1.5)
    texts, _, _ = decoded(3, faults=faults, price=price)
    assert texts == own_texts(3)


@pytest.mark.parametrize("here_s", [0.0002, 0.005])
def test_texts_are_the_targets_own_where_sixteen_share_steps_and_thread(here_s) -> None:
    texts, counts, _ = decoded(16, here_s=here_s)
    assert texts == own_texts(16)
    assert sum(each.verified_cloud for each in counts) > 0


def test_a_division_is_kept_for_some_tokens(monkeypatch) -> None:
    """Each takes milliseconds of the engine's thread, and what many sessions measure never rests."""
    made = []
    monkeypatch.setattr(both_ends, "division_of", lambda view: made.append(view) or division_of(view))
    texts, _, _ = decoded(16)
    assert texts == own_texts(16)
    changes = 4  # of an edge that begins to draft, or is found to be worse or no worse
    assert len(made) <= 16 * (TOKENS / both_ends.KEPT_TOKENS + changes)


@pytest.mark.parametrize("dies_after", [0, 1, 20])
def test_a_broken_drafter_costs_no_text(dies_after) -> None:
    texts, counts, _ = decoded(2, dies_after=dies_after)
    assert texts == own_texts(2)
    assert all(each.verified_cloud <= 16 * dies_after for each in counts)


def test_a_verifier_that_drafts_serves_edges_that_do_not() -> None:
    texts, (counts,), seconds = decoded(drafting=False)
    _, (without,), slow_s = decoded(drafting=False, drafts_here=0)
    assert texts == own_texts(1)
    assert (counts.drafted, without.verified) == (0, 0)
    assert counts.verified_cloud == counts.verified > 0
    assert counts.accepted_cloud == counts.accepted
    assert (counts.steps, seconds) < (0.5 * without.steps, 0.7 * slow_s)


def test_a_fixed_number_of_drafts_is_made_before_every_step() -> None:
    _, (counts,), _ = decoded(drafting=False, drafts_here=3)
    assert 3 * (counts.steps - 3) <= counts.verified <= 3 * counts.steps, "less where the text begins and ends"


def test_prefixes_that_are_not_cut_back_at_a_miss_are_found(monkeypatch) -> None:
    """A planted defect: the drafter goes on after tokens that the target has contradicted."""

    def miss(self: BothEnds, position: int) -> None:
        self._missed = True
        agreed = self._agreed
        self._abandon(0)
        self._agreed = agreed

    monkeypatch.setattr(BothEnds, "_miss", miss)
    with pytest.raises(AssertionError):
        decoded()


# === replays ====================================================================================================

COSTS = Costs(step_s=0.01, row_s=0.0004, min_step_s=0.03, drafting_s=0.001)


def traces(acceptance: float = 0.8, texts: int = 2, tokens: int = 160) -> list[HitTrace]:
    rng = random.Random(3)
    found = []
    for i in range(texts):
        hits = tuple(rng.random() < acceptance for _ in range(tokens))
        confidence = tuple(rng.uniform(0.6, 1.0) if hit else rng.uniform(0.2, 0.9) for hit in hits)
        ids = tuple(rng.randrange(90) for _ in range(tokens))
        found.append(HitTrace(f"p{i}", "", "d", "1", 0.0, 12, ids, hits, confidence))
    return found


def speed(policy: Policy, round_trip_s: float, beside: Beside | None = None) -> float:
    shape = LinkShape(rtt_s=round_trip_s)
    return tokens_per_second(replay(traces(), lambda _: shape, COSTS, policy, warm_up_tokens=24, beside=beside))


@pytest.mark.parametrize("round_trip_s", [0.002, 0.06])
@pytest.mark.parametrize("here_s", [0.0005, 0.004])
def test_both_ends_are_hardly_slower_than_a_drafter_beside_the_target(round_trip_s, here_s) -> None:
    beside = max(speed(colocated(n), round_trip_s, drafting_beside(here_s)) for n in (2, 3, 4, 6, 8, 12))
    assert speed(Policy(), round_trip_s, drafting_beside(here_s)) > 0.94 * beside


def test_a_near_edge_takes_work_from_the_verifier() -> None:
    shape = LinkShape(rtt_s=0.002)

    def drafted_here(policy: Policy) -> float:
        outcomes = replay(traces(), lambda _: shape, COSTS, policy, beside=drafting_beside(0.004))
        return sum(outcome.statistics.cloud_drafting_s for outcome in outcomes)

    assert drafted_here(Policy()) < 0.3 * drafted_here(Policy(drafting=False))


def test_without_a_drafter_at_the_verifier_nothing_changes() -> None:
    assert speed(Policy(), 0.03) == speed(Policy(drafts_here=0), 0.03, drafting_beside())
