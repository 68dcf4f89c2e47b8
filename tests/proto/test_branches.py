"""Branches: drafts for likely misses, which the verifier has before it knows of the miss."""

from __future__ import annotations

import itertools
import random

import pytest
from bad_link import Faults
from checked_simulation import CheckedSimulation, counts_of, open_frame, rules
from hand_driven import HandDrivenEdge, committed
from oracle_drafters import drafter_of, hashing_oracle

from outrider.cloud.serving.engine import Inbox
from outrider.proto.errors import InvalidArgument, OutriderError, ResourceExhausted, UnknownToken
from outrider.proto.policy.likely_branches import MAX_BRANCHES, RUNNERS_UP, MissShares, likely_branches
from outrider.proto.session import Drafted, DraftJob
from outrider.proto.session import verifier as verifier_module
from outrider.proto.session.tree import DraftTree
from outrider.proto.session.verifier import Verified, VerifierSession
from outrider.proto.types import (
    Branch,
    Branches,
    Cancel,
    Commit,
    CommittedToken,
    Draft,
    DraftToken,
    Opened,
    Report,
    Sampling,
    token_ids,
)


def drafts(*ids: int) -> tuple[DraftToken, ...]:
    return tuple(map(DraftToken, ids))


# === which branches are worth drafting ==============================================================================


def test_the_chance_of_a_branch_is_that_of_its_runs_by_enumeration() -> None:
    chances, shares, acceptance = (0.9, 0.6, 0.7), MissShares(), 0.5
    runners_up = ((10, 11), (20, 21), (30, 31))
    found = {(b.index, b.token): b for b in likely_branches(chances, runners_up, shares, acceptance, 1e-6)}
    wanted: dict[tuple[int, int], float] = {}
    for outcome in itertools.product((True, False), repeat=3):
        chance = 1.0
        for agrees, likely in zip(outcome, chances, strict=True):
            chance *= likely if agrees else 1 - likely
        if False in outcome:
            first = outcome.index(False)
            for rank in range(RUNNERS_UP):
                key = first, runners_up[first][rank]
                wanted[key] = wanted.get(key, 0.0) + chance * shares.of(rank)
    assert found.keys() == wanted.keys()
    for key, chance in wanted.items():
        assert found[key].chance == pytest.approx(chance)


def test_every_draft_of_a_branch_is_worth_its_time_and_the_next_is_not() -> None:
    rng = random.Random(3)
    for _ in range(200):
        chances = [rng.uniform(0.2, 0.98) for _ in range(rng.randrange(1, 10))]
        acceptance, least = rng.uniform(0.2, 0.95), rng.choice((0.005, 0.02, 0.1))
        for branch in likely_branches(chances, [(1, 2)] * len(chances), MissShares(), acceptance, least):
            assert branch.chance * acceptance**branch.drafts >= least * 0.999
            assert branch.drafts == 10 or branch.chance * acceptance ** (branch.drafts + 1) < least


def test_shares_of_misses_follow_what_came() -> None:
    shares = MissShares()
    for _ in range(400):
        shares.add((5, 6), 6)
    assert shares.of(1) > 0.95
    assert shares.of(0) < 0.02
    for _ in range(400):
        shares.add((), 6)  # of a drafter that names none
    assert shares.of(1) < 0.02


# === the verifier ===================================================================================================


def session_with(chain: tuple[int, ...], *branches: Branch) -> VerifierSession:
    session = VerifierSession(open_frame(sampling=Sampling(max_tokens=100)), rules(), 0.0)
    session.on_draft(Draft(0, 3, drafts(*chain)), 0.0)
    session.on_branches(Branches(0, branches))
    return session


def verified(session: VerifierSession, *target: int, now: float = 1.0) -> Commit:
    """Commit what a target says that would have gone on with these tokens."""
    block = session.block()
    return session.on_verified(Verified(block, committed(*target[: len(block) + 1])), now)


def test_the_branch_of_a_miss_is_the_next_chain() -> None:
    session = session_with((4, 5, 6), Branch(4, (7, 1, 2)), Branch(4, (6, 3, 3)), Branch(3, (7, 1, 1)))
    commit = verified(session, 4, 7, 9, 9)
    assert token_ids(commit.tokens) == (4, 7)
    assert commit.chain == 1, "so the edge learns of it"
    assert token_ids(session.block()) == (1, 2)
    session.on_draft(Draft(1, 5, drafts(1, 2, 3)), 2.0)  # the edge goes on with it
    assert token_ids(session.block()) == (1, 2, 3)
    assert token_ids(verified(session, 1, 2, 3, 4).tokens) == (1, 2, 3, 4)


@pytest.mark.parametrize(
    ("branches", "error", "field"),
    [
        ((Branch(2, (1, 2)),), InvalidArgument, "branches.starts"),
        ((Branch(600, (1, 2)),), InvalidArgument, "branches.starts"),
        ((Branch(3, (1, 8)),), UnknownToken, "branches.tokens"),
        ((Branch(3, (1,) * 65),), ResourceExhausted, "branches.lengths"),
        (tuple(Branch(3 + i, (1, 2)) for i in range(MAX_BRANCHES + 1)), ResourceExhausted, "branches.starts"),
    ],
)
def test_branches_that_no_honest_edge_sends_are_refused(branches, error, field) -> None:
    with pytest.raises(error) as caught:
        session_with((4, 5, 6), *branches)
    assert caught.value.field == field


def test_many_messages_of_branches_are_refused_too() -> None:
    session = session_with((4, 5, 6), Branch(4, (7, 1)))
    messages = [Branches(0, tuple(Branch(5 + i, (first, 1)) for i in range(16))) for first in range(4)]
    for message in messages[:3]:
        session.on_branches(message)
    with pytest.raises(ResourceExhausted):
        session.on_branches(messages[3])


def test_drafts_of_a_running_step_are_met_by_its_commit() -> None:
    """They were taken after the commit, where a branch is of no use any more."""
    events, said = Inbox(lambda: None), []

    def add(what: str, session: int, frame=None) -> None:
        events.post(lambda: said.append(what), session, frame)

    add("draft", 1, Draft(0, 3, drafts(4)))
    add("report", 1, Report(True))
    add("draft after a report", 1, Draft(0, 4, drafts(4)))
    add("cancel", 2, Cancel())
    add("draft after a cancel", 2, Draft(0, 3, drafts(4)))
    add("branches", 3, Branches(0, (Branch(3, (1, 2)),)))
    for event in events.take_drafts():
        event()
    assert said == ["draft", "branches"]
    for event in events.take():
        event()
    assert said[2:] == ["report", "draft after a report", "cancel", "draft after a cancel"]
    assert not len(events)


# === the edge =======================================================================================================


def test_the_edge_follows_a_run_whose_token_was_no_runner_up_of_the_chain() -> None:
    """An idle drafter's run comes back after the edge has forgotten, with a stream, who proposed its token."""
    edge = HandDrivenEdge(open_frame(sampling=Sampling(max_tokens=100), trees=True)).opened(
        Opened(0, 64, 100, "v", 512, branches=True, trees=True)
    )
    chain = tuple(DraftToken(token, 0.5, runners_up=(7,)) for token in (4, 5, 6))
    edge.handle(Drafted(edge.next_job(3), chain, 0.003), 0.1)
    edge.handle(Drafted(DraftJob(4, (9,), 2, 0, branch=4), drafts(1, 2), 0.001), 0.15)
    sends = edge.on_commit(Commit(3, committed(4, 9), 1, 64, chain=0, verified=3), 0.3)
    frames = [send.frame for send in sends if isinstance(getattr(send, "frame", None), Draft)]
    assert [token_ids(frame.tokens) for frame in frames] == [(1, 2)]


def test_no_branches_go_to_a_verifier_that_does_not_take_them() -> None:
    (counts,) = counts_of([simulated(5, takes=False)])
    assert counts.branched == 0


# === both, over links ===============================================================================================

LINKS = {
    "near": Faults(delay_s=0.001),
    "a third of a step": Faults(delay_s=0.005),
    "a step": Faults(delay_s=0.015, jitter_s=0.004),
    "bad": Faults(delay_s=0.005, jitter_s=0.02, duplicated=0.2, reordered=0.2, breaks_every_s=0.7, goaway_every_s=1.5),
}


def simulated(seed: int, link: Faults = LINKS["near"], *, takes: bool = True, **options) -> CheckedSimulation:
    oracle = hashing_oracle(seed, eos_odds=0.0)
    frame = open_frame(sampling=Sampling(max_tokens=60, ignore_eos=True))
    drafter = drafter_of(oracle, seed, 0.7, confidence="telling", runners_up=2, **options)
    simulation = CheckedSimulation(frame, oracle, drafter, link=link, seed=seed, max_per_job=4)
    if not takes:
        receive = simulation.receive

        def receive_old(stream, answer) -> None:
            if isinstance(answer, Opened):
                answer = Opened(**{name: getattr(answer, name) for name in answer.__slots__ if name != "branches"})
            receive(stream, answer)

        simulation.receive = receive_old
    return simulation


def decode_all(link: Faults, seeds: int = 12) -> int:
    """Return the branches taken; every text must be the target's."""
    texts = (simulated(seed, link, silent=0.1 * (seed % 2)) for seed in range(seeds))
    return sum(counts.branches_taken for counts in counts_of(texts))


@pytest.mark.parametrize("link", LINKS)
def test_texts_are_the_targets_and_branches_are_taken(link) -> None:
    assert decode_all(LINKS[link]) >= 12


def test_a_verifier_that_takes_a_branch_for_text_is_found(monkeypatch) -> None:
    """The negative control: what follows a likely miss is a draft and no more."""
    right = verifier_module.accept_drafts

    def accept(block, tokens, **rest):
        taken = tuple(CommittedToken(token, -1.0) for token in token_ids(block))
        said, _, finish = right(block, (*taken, tokens[-1]), **rest)
        return said, len(block), finish

    monkeypatch.setattr(verifier_module, "accept_drafts", accept)
    with pytest.raises((AssertionError, OutriderError)):
        decode_all(LINKS["near"])


def test_an_edge_that_forgets_whose_number_is_whose_is_found(monkeypatch) -> None:
    """A chain of a number that the verifier has given a branch contradicts it."""

    def resend(self: DraftTree) -> None:
        self.sent, self.said_complete = 0, False
        self.number += self._number_used
        self._number_used = self.branched = False

    monkeypatch.setattr(DraftTree, "resend", resend)
    monkeypatch.setattr(DraftTree, "follow", lambda self, tokens, number: None)
    with pytest.raises((AssertionError, OutriderError)):
        decode_all(LINKS["near"])
