"""Trees: branches that a step verifies beside its chain, chosen by their chances and the price of a row."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from bad_link import Faults
from checked_simulation import CheckedSimulation, counts_of, open_frame, rules, take_branches_for_text
from hand_driven import HandDrivenEdge, committed
from oracle_drafters import drafter_of, hashing_oracle

from outrider.proto.errors import InvalidArgument, OutriderError, ResourceExhausted, UnknownToken
from outrider.proto.policy.likely_branches import MAX_BRANCHES, MAX_LEAVES, MissShares, likely_leaves
from outrider.proto.policy.measurements import Acceptance
from outrider.proto.policy.trees import Run, Tree, best_tree
from outrider.proto.session import Drafted
from outrider.proto.session.acceptance import branch_taken
from outrider.proto.session.both_ends import DraftingHere
from outrider.proto.session.verifier import Verified, VerifierRules, VerifierSession
from outrider.proto.types import Branch, Commit, Draft, DraftToken, Opened, Sampling, token_ids

TREES = rules(trees=True)


def drafts(*ids: int) -> tuple[DraftToken, ...]:
    return tuple(map(DraftToken, ids))


# === which drafts are worth a row ===================================================================================


def expected(chances, runs, follows: float, tree: Tree) -> float:
    """Expected tokens of a step that verifies a tree, by enumeration of what the target may say of the chain."""
    total = 0.0
    for agreed in range(len(chances) + 1):
        chance = math.prod(chances[:agreed]) * (1 - chances[agreed] if agreed < len(chances) else 1.0)
        along_chain = min(agreed, tree.chain)
        total += chance * (1 + along_chain)
        # Where the chain agrees to a run's index and no further (or ends), the run is taken with its own share.
        for run, kept in zip(runs, tree.runs, strict=True):
            at_miss = agreed == run.index and agreed < len(chances)
            if at_miss and kept and run.index <= tree.chain:
                taken = run.chance / (1 - chances[agreed])
                total += chance * taken * sum(follows**i for i in range(kept))
    return total


def some_tree(rng: random.Random) -> tuple[list[float], list[Run]]:
    chances = [rng.uniform(0.1, 0.95) for _ in range(rng.randrange(1, 5))]
    runs = []
    for index, chance in enumerate(chances):
        left = 1 - chance
        for _ in range(rng.randrange(3)):
            share = rng.uniform(0.0, left)
            left -= share
            runs.append(Run(index, share, rng.randrange(1, 4)))
    return chances, runs


@pytest.mark.parametrize("room", [1, 2, 3, 5])
def test_no_tree_of_so_many_drafts_commits_more(room) -> None:
    rng = random.Random(room)
    for _ in range(60):
        chances, runs = some_tree(rng)
        follows = rng.uniform(0.1, 0.95)
        found = best_tree(chances, runs, follows=follows, room=room)
        assert found.chain + sum(found.runs) <= room
        every = (
            Tree(chain, kept)
            for chain in range(len(chances) + 1)
            for kept in itertools.product(*(range(run.length + 1) for run in runs))
            if chain + sum(kept) <= room
            and all(run.index <= chain or not rows for run, rows in zip(runs, kept, strict=True))
        )
        most = max(expected(chances, runs, follows, tree) for tree in every)
        # What has a chance below a hundredth is left out.
        assert expected(chances, runs, follows, found) == pytest.approx(most, abs=0.01 * room)


def test_where_rows_are_dear_a_chain_is_left_and_then_nothing() -> None:
    chances, runs = [0.8, 0.6, 0.5, 0.4], [Run(0, 0.12, 1), Run(1, 0.25, 2), Run(2, 0.2, 1)]
    sizes = []
    for row_share in (0.0, 0.05, 0.2, 1.0, 5.0):
        tree = best_tree(chances, runs, follows=0.6, room=16, row_share=row_share)
        sizes.append((tree.chain, sum(tree.runs)))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == (4, 4)
    assert sizes[-2][0] >= 1
    assert sizes[-2][1] == 0
    assert sizes[-1] == (0, 0)


def test_leaves_are_the_likeliest_and_no_more_than_a_message_holds() -> None:
    chances, shares = [0.5] * 20, MissShares()
    runners_up = [(2 * i, 2 * i + 1) for i in range(20)]
    found = likely_leaves(chances, runners_up, shares, 0, 1e-9)
    assert len(found) == MAX_LEAVES
    index, token, chance = found[0]
    assert (index, token) == (0, 0)
    assert chance == pytest.approx(0.5 * shares.of(0))
    later = likely_leaves(chances, runners_up, shares, 3, 0.02)
    assert min(index for index, _, _ in later) == 3, "those of earlier drafts went with them"
    assert all(0.5**index * chance >= 0.02 for index, _, chance in later)


# === the verifier ===================================================================================================


def session_with(chain: tuple[int, ...], *branches: Branch, frame=None, verifier=TREES) -> VerifierSession:
    session = VerifierSession(frame or open_frame(sampling=Sampling(max_tokens=100), trees=True), verifier, 0.0)
    session.on_draft(Draft(0, 3, drafts(*chain), branches=branches), 0.0)
    return session


def verify(session: VerifierSession, oracle) -> Commit:
    """Commit what a target says that goes on from any text by `oracle`."""
    block, branches = session.block(), session.branches
    text = tuple(session.transcript)

    def after(path: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(oracle(text + path[:n]) for n in range(len(path) + 1))

    branch = branch_taken(block, branches, after(token_ids(block)))
    num = len(block) + sum(len(each.drafts) for each in branches)
    path = block if branch is None else (*block[: branch.index], *branch.drafts)
    verified = Verified(path, committed(*after(token_ids(path))), beside=num - len(path))
    return session.on_verified(verified, 1.0)


def spelling(*text: int):
    """Return an oracle that says this text after the prompt, and then 1 for ever."""
    return lambda prefix: (*text, *(1,) * 99)[len(prefix) - 3]


def test_a_step_verifies_likely_misses_and_the_token_after_one_comes_with_it() -> None:
    session = session_with((4, 5, 6), Branch(3, (7,), 0.1), Branch(4, (2,), 0.3))
    session.block()
    assert {(b.index, token_ids(b.drafts)) for b in session.branches} == {(0, (7,)), (1, (2,))}
    commit = verify(session, spelling(4, 2, 3))
    assert token_ids(commit.tokens) == (4, 2, 3)
    assert (commit.accepted, commit.verified, commit.verified_beside) == (2, 2, 3)
    assert commit.accepted_here == 0
    assert commit.chain == 0, "a branch of one token is no chain to go on with"
    assert session.block() == ()


def test_what_is_left_of_a_verified_branch_is_the_next_chain() -> None:
    session = session_with((4, 5, 6), Branch(4, (2, 3, 7, 1), 0.3))
    session.block()
    commit = verify(session, spelling(4, 2, 3, 7, 1, 1))
    assert token_ids(commit.tokens) == (4, 2, 3, 7, 1, 1)
    assert commit.chain == 1
    session = session_with((4, 5), Branch(4, (2, 3, 7), 0.3), verifier=rules(trees=True, max_drafts=4))
    session.block()
    assert [token_ids(branch.drafts) for branch in session.branches] == [(2, 3)]
    commit = verify(session, spelling(4, 2, 3, 7, 6))
    assert token_ids(commit.tokens) == (4, 2, 3, 7)
    assert commit.chain == 1
    assert session.block() == (), "its last draft was the target's own token"


@pytest.mark.parametrize(
    ("trees", "allowed"), [(False, True), (True, False), (False, False)], ids=["edge", "verifier", "neither"]
)
def test_trees_need_both_sides(trees, allowed) -> None:
    frame = open_frame(sampling=Sampling(max_tokens=100), trees=allowed)
    session = session_with((4, 5), Branch(3, (7,), 0.5), frame=frame, verifier=rules(trees=trees))
    assert token_ids(session.block()) == (4, 5)
    assert session.branches == ()
    assert session.opened().trees is trees


def test_no_draft_of_a_tree_lies_beyond_the_end_of_the_text() -> None:
    frame = open_frame(sampling=Sampling(max_tokens=3), trees=True)
    session = session_with((4, 5, 6), Branch(4, (2, 3, 3), 0.3), Branch(5, (2,), 0.3), frame=frame)
    assert token_ids(session.block()) == (4, 5)
    assert all(branch.index + len(branch.drafts) <= 2 for branch in session.branches)
    commit = verify(session, spelling(4, 2, 3, 3))
    assert token_ids(commit.tokens) == (4, 2, 3)
    assert commit.finish is not None


def test_a_branch_of_both_ends_is_there_once_with_the_longer_run() -> None:
    here = DraftingHere("own@1")
    for _ in range(60):
        here.calibration.acceptance.add(True)
    session = VerifierSession(open_frame(sampling=Sampling(max_tokens=100), trees=True), TREES, 0.0, here)
    session.received.acceptance = Acceptance(0.3 * 40, 40.0)  # so that the verifier's own chain leads
    session.on_draft(Draft(0, 3, drafts(1, 5), branches=(Branch(3, (4, 6, 7), 0.02),)), 0.0)
    job = session.ends.propose([], 2, 0.0).job
    proposed = (DraftToken(2, 0.9, 0.5, (4, 3)), DraftToken(3, 0.9, 0.5, (4, 5)))
    session.ends.take(Drafted(job, proposed, 0.001))
    assert token_ids(session.block()) == (2, 3)
    found = [(branch.index, token_ids(branch.drafts)) for branch in session.branches]
    assert sorted(found) == [(0, (3,)), (0, (4, 6)), (1, (4,)), (1, (5,))]
    assert [token_ids(branch.drafts) for branch in session.branches if not branch.drafts[0].other] == [(4, 6)]


@pytest.mark.parametrize(
    ("branches", "error", "field"),
    [
        ((Branch(2, (1, 2)),), InvalidArgument, "draft.branches.starts"),
        ((Branch(3, (8,)),), UnknownToken, "draft.branches.tokens"),
        ((Branch(3, (1,) * 65),), ResourceExhausted, "draft.branches.lengths"),
        (tuple(Branch(3 + i, (1, 2)) for i in range(MAX_BRANCHES + 1)), ResourceExhausted, "draft.branches.starts"),
    ],
)
def test_branches_of_a_draft_that_no_honest_edge_sends_are_refused(branches, error, field) -> None:
    with pytest.raises(error) as caught:
        session_with((4, 5, 6), *branches)
    assert caught.value.field == field


# === exact, whatever the tree =======================================================================================


def every_tree():
    """Yield all chains of one or two tokens of a vocabulary of three, with all sets of up to two runs beside them."""
    runs = [(index, run) for index in (0, 1) for n in (1, 2) for run in itertools.product(range(1, 4), repeat=n)]
    for chain in itertools.product(range(1, 4), repeat=2):
        beside = [(index, run) for index, run in runs if run[0] != chain[index]]
        for count in (0, 1, 2):
            for some in itertools.combinations(beside, count):
                if len({(index, run[0]) for index, run in some}) == count:
                    yield chain, some


def test_every_tree_gives_the_targets_tokens_as_far_as_a_path_agrees() -> None:
    """All 3 ** 3 continuations of the target are tried, each with 150 of all small trees."""
    trees = list(every_tree())
    assert len(trees) > 1000
    rng = random.Random(5)
    for text in itertools.product(range(1, 4), repeat=3):
        oracle, said = spelling(*text), (*text, 1, 1)
        for chain, runs in rng.sample(trees, 150):
            branches = tuple(Branch(3 + index, run, 0.3) for index, run in runs)
            session = session_with(chain, *branches)
            commit = verify(session, oracle)
            paths = [chain, *((*chain[:index], *run) for index, run in runs)]
            longest = max(
                sum(itertools.takewhile(bool, (own == said for own, said in zip(path, said, strict=False))))
                for path in paths
            )
            assert token_ids(commit.tokens) == said[: longest + 1], (chain, runs)
            assert commit.accepted == longest
            assert session.transcript == [3, 1, 2, *said[: longest + 1]]


# === both, over links ===============================================================================================

LINKS = {
    "near": Faults(delay_s=0.001),
    "a step": Faults(delay_s=0.015, jitter_s=0.004),
    "bad": Faults(delay_s=0.005, jitter_s=0.02, duplicated=0.2, reordered=0.2, breaks_every_s=0.7, goaway_every_s=1.5),
}


def simulated(seed: int, link: Faults, verifier: VerifierRules = TREES) -> CheckedSimulation:
    oracle = hashing_oracle(seed, eos_odds=0.0)
    frame = open_frame(sampling=Sampling(max_tokens=60, ignore_eos=True), trees=True)
    drafter = drafter_of(oracle, seed, 0.6, confidence="telling", runners_up=2, silent=0.1 * (seed % 2))
    return CheckedSimulation(frame, oracle, drafter, link=link, seed=seed, max_per_job=4, verifier=verifier)


def decode_all(link: Faults, seeds: int = 12, verifier: VerifierRules = TREES) -> tuple[int, int]:
    """Return drafts verified beside chains, and steps; every text must be the target's."""
    counts = counts_of(simulated(seed, link, verifier) for seed in range(seeds))
    return sum(each.verified_beside for each in counts), sum(each.steps for each in counts)


@pytest.mark.parametrize("link", LINKS)
def test_texts_are_the_targets_and_branches_are_verified(link) -> None:
    beside, _ = decode_all(LINKS[link])
    assert beside >= 12


def test_trees_take_fewer_steps_than_chains() -> None:
    _, with_trees = decode_all(LINKS["near"])
    beside, steps = decode_all(LINKS["near"], verifier=rules())
    assert beside == 0
    assert with_trees < 0.95 * steps


def test_a_verifier_that_takes_a_branch_for_text_is_found(monkeypatch) -> None:
    """The negative control: a branch is followed only where it is the target's token."""
    take_branches_for_text(monkeypatch)
    with pytest.raises((AssertionError, OutriderError)):
        decode_all(LINKS["near"], 3)


# === the edge =======================================================================================================


def edge(*, verifies: bool = True) -> HandDrivenEdge:
    return HandDrivenEdge(open_frame(sampling=Sampling(max_tokens=100), trees=True)).opened(
        Opened(0, 64, 100, "v", 512, branches=True, trees=verifies)
    )


@pytest.mark.parametrize("verifies", [True, False])
def test_an_edge_sends_runners_up_with_its_drafts(verifies) -> None:
    machine = edge(verifies=verifies)
    job = machine.next_job(3)
    proposals = tuple(DraftToken(i, 0.5, runners_up=(7, 2)) for i in (4, 5, 6))
    sends = machine.handle(Drafted(job, proposals, 0.003), 0.1)
    (frame,) = [send.frame for send in sends if isinstance(getattr(send, "frame", None), Draft)]
    assert token_ids(frame.tokens) == (4, 5, 6)
    if not verifies:
        assert frame.branches == ()
        return
    assert {(branch.start, branch.tokens) for branch in frame.branches} >= {(3, (7,)), (3, (2,)), (4, (7,))}
    first = next(branch for branch in frame.branches if branch.tokens == (7,) and branch.start == 3)
    assert 0 < first.chance < 0.5
