"""Merged trees: runs of idle drafters beside the active one's chain, which never change a text."""

from __future__ import annotations

import math

import pytest
from bad_link import Faults
from checked_simulation import CheckedSimulation, counts_of, open_frame, rules, take_branches_for_text
from hand_driven import committed
from oracle_drafters import drafter_of, hashing_oracle

from outrider.proto.errors import OutriderError
from outrider.proto.policy import Measurements, Window
from outrider.proto.policy.likely_branches import OtherShares
from outrider.proto.policy.selector import StaticSelector
from outrider.proto.session import Drafted, DraftJob, EdgeSession, Selection, Send, StreamReady, TeacherForced
from outrider.proto.session.tree import Beside, DraftTree
from outrider.proto.types import Branches, Commit, Draft, DraftToken, Opened, Sampling, Timing, token_ids

TREES = rules(trees=True)
LINKS = {
    "near": Faults(delay_s=0.005),
    "a step": Faults(delay_s=0.015, jitter_s=0.004),
    "bad": Faults(delay_s=0.005, jitter_s=0.02, duplicated=0.2, reordered=0.2, breaks_every_s=0.7, goaway_every_s=1.5),
}


# === shares of misses ===============================================================================================


def test_a_share_follows_the_hits_of_its_confidence_alone() -> None:
    shares = OtherShares()
    before = shares.of(0.5)
    for _ in range(100):
        shares.add(0.95, hit=True)
        shares.add(0.1, hit=False)
    assert shares.of(0.99) > 0.8
    assert shares.of(0.2) < 0.05
    assert shares.of(0.5) == before
    shares.add(math.nan, hit=True)
    assert 0 < shares.of(math.nan) < 1


def test_another_subject_is_noticed() -> None:
    shares = OtherShares()
    for _ in range(300):
        shares.add(0.95, hit=True)
    for _ in range(100):
        shares.add(0.95, hit=False)
    assert shares.of(0.95) < 0.2


# === the edge, by hand ==============================================================================================


class Driven:
    """An edge of two drafters on a verifier that has timed one step."""

    def __init__(self, *, trees: bool = True) -> None:
        frame = open_frame(sampling=Sampling(max_tokens=100), trees=True)
        selection = Selection(StaticSelector(), ("first", "second"))
        self.machine = EdgeSession(frame, Window(3), selection=selection, job_tokens=lambda _: 3)
        self.machine.handle(StreamReady(b""), 0.0)
        self.out = self.machine.handle(Opened(0, 64, 100, "v", 512, branches=True, trees=trees), 0.0)
        self.propose(1, 1, 1)
        commit = Commit(3, committed(5), 0, 64, chain=0, verified=1, timing=Timing(verify_s=0.03))
        self.out = self.machine.handle(commit, 0.1)

    @property
    def job(self) -> DraftJob:
        (job,) = [instruction for instruction in self.out if isinstance(instruction, DraftJob)]
        return job

    @property
    def frames(self) -> list:
        return [instruction.frame for instruction in self.out if isinstance(instruction, Send)]

    def propose(self, *tokens: int, now: float = 0.1001) -> None:
        drafts = tuple(DraftToken(token, 0.5) for token in tokens)
        self.out = self.machine.handle(Drafted(self.job, drafts, 0.0001), now)

    def read(self, *tokens: int, seconds: float = 0.0001) -> None:
        """The second drafter reads text and chain, and would have proposed these in place of the chain's end."""
        job = self.job
        assert (job.drafter, job.count) == (1, 0)
        missing = job.teacher_forced - len(tokens)
        forced = (*(DraftToken(1, 0.5),) * missing, *(DraftToken(token, 0.95) for token in tokens))
        self.out = self.machine.handle(Drafted(job, (), seconds, TeacherForced(forced)), 0.1002)


def test_an_idle_drafter_reads_the_chain_and_sends_what_it_would_have_proposed() -> None:
    edge = Driven()
    for _ in range(40):
        edge.machine.measurements.of("second").beside.add(0.95, hit=True)
    edge.propose(4, 5, 6)
    assert [token_ids(frame.tokens) for frame in edge.frames] == [(4, 5, 6)]
    edge.read(4, 7, 2)
    (frame,) = edge.frames
    assert isinstance(frame, Branches)
    assert {(branch.start, branch.tokens) for branch in frame.branches} == {(5, (7,)), (6, (2,))}
    assert all(0 < branch.chance <= 0.5 for branch in frame.branches)
    before = edge.machine.measurements.of("second").beside.misses[-1]
    edge.out = edge.machine.handle(Commit(4, committed(4, 7), 1, 64, chain=0, verified=2), 0.13)
    assert edge.machine.transcript == [3, 1, 2, 5, 4, 7]
    assert edge.machine.measurements.of("second").beside.misses[-1] > before, "it had the token of this miss"


def test_what_is_not_worth_a_message_is_not_sent() -> None:
    edge = Driven()
    for _ in range(200):
        edge.machine.measurements.of("second").beside.add(0.95, hit=False)
    edge.propose(4, 5, 6)
    edge.read(4, 7, 2)
    assert edge.frames == []


def test_a_drafter_that_reads_slowly_does_not_read_chains() -> None:
    edge = Driven()
    edge.propose(4, 5, 6)
    edge.read(4, 7, 2, seconds=0.01)
    edge.out = edge.machine.handle(Commit(4, committed(4, 5), 2, 64, chain=0, verified=2), 0.13)
    edge.propose(1, 2, now=0.1301)
    assert not any(isinstance(instruction, DraftJob) and instruction.count == 0 for instruction in edge.out)


def test_a_verifier_without_trees_gets_no_branch_and_no_idle_drafter_reads() -> None:
    edge = Driven(trees=False)
    edge.propose(4, 5, 6)
    assert all(not isinstance(instruction, DraftJob) or instruction.drafter == 0 for instruction in edge.out)
    assert all(frame.branches == () for frame in edge.frames if isinstance(frame, Draft))


# === both, over links ===============================================================================================


def simulated(
    seed: int, link: Faults, *, other: float = 0.8, verifier=TREES, runners_up: int = 0, **changes
) -> CheckedSimulation:
    """A text whose first drafter names no runners-up, so that all branches are the second one's."""
    oracle = hashing_oracle(seed, eos_odds=0.0)
    frame = open_frame(sampling=Sampling(max_tokens=60, ignore_eos=True), trees=True)
    first = drafter_of(oracle, seed, 0.6, confidence="telling", runners_up=runners_up)
    others = [drafter_of(oracle, seed + 1, other, confidence="telling")]
    given = {"selector": StaticSelector(), "others": others, "drafting_s": 0.0002, "max_per_job": 4} | changes
    return CheckedSimulation(frame, oracle, first, link=link, seed=seed, verifier=verifier, **given)


def decode_all(link: Faults, seeds: int = 10, **changes) -> tuple[int, int]:
    """Return drafts verified beside chains, and steps; every text must be the target's."""
    counts = counts_of(simulated(seed, link, **changes) for seed in range(seeds))
    return sum(each.verified_beside for each in counts), sum(each.steps for each in counts)


@pytest.mark.parametrize("delay_s", [0.002, 0.01])
def test_an_edge_goes_on_with_the_run_of_a_branch_that_it_has_sent(delay_s) -> None:
    """The simulation checks that no chain contradicts what its verifier has, and leaves nothing out."""
    texts = (simulated(seed, Faults(delay_s=delay_s), other=0.9, runners_up=2) for seed in range(25))
    assert sum(counts.branches_taken for counts in counts_of(texts)) > 25


def test_a_run_in_place_of_one_that_was_sent_is_found(monkeypatch) -> None:
    """Nothing counts as sent, and a branch that has a run gets another drafter's."""

    def likeliest_other(self: DraftTree) -> tuple[float, int, int, int] | None:
        others = ((key, each) for key, each in self.branches.items() if each.other >= 0 and not each.asked)
        return max(((each.worth, *key, each.other) for key, each in others), default=None)

    monkeypatch.setattr(Beside, "sent", property(lambda _: False, lambda *_: None))
    monkeypatch.setattr(DraftTree, "likeliest_other", likeliest_other)
    with pytest.raises(AssertionError, match="leaves drafts out"):
        simulated(24, Faults(delay_s=0.002), other=0.9, runners_up=2).run()


@pytest.mark.parametrize("runners_up", [0, 1])
def test_no_branch_repeats_another_or_the_chain_and_each_is_worth_its_bytes(runners_up) -> None:
    frames: list[Draft | Branches] = []
    for seed in range(6):
        simulation = simulated(seed, LINKS["near"], runners_up=runners_up)
        really = simulation.send

        def send(frame, simulation=simulation, really=really) -> None:
            if isinstance(frame, Draft | Branches):
                frames.append(frame)
                chain = dict(enumerate(simulation.edge._tree.tokens, len(simulation.edge.transcript)))
                assert all(chain[branch.start] != branch.tokens[0] for branch in frame.branches)
            really(frame)

        simulation.send = send
        simulation.run()
    branches = [branch for frame in frames for branch in frame.branches]
    assert len(branches) > 50
    assert runners_up or all(branch.chance >= 0.02 for branch in branches), "less is not worth a row, nor its bytes"
    assert any(len(branch.tokens) > 1 for branch in branches), "runs of what is likely are drafted"
    for frame in frames:
        keys = [(branch.start, branch.tokens[0]) for branch in frame.branches]
        assert len(keys) == len(set(keys))


@pytest.mark.parametrize("link", LINKS)
def test_texts_are_the_targets_with_branches_of_another_drafter(link) -> None:
    beside, _ = decode_all(LINKS[link])
    assert beside >= 12


def test_merged_trees_take_fewer_steps_than_the_chain_alone() -> None:
    _, merged = decode_all(LINKS["near"])
    beside, alone = decode_all(LINKS["near"], verifier=rules())
    assert beside == 0
    assert merged < 0.9 * alone


def never_right(oracle):
    """A drafter that is sure, and always wrong."""

    def propose(prefix, count):
        drafts = ()
        for _ in range(count):
            drafts += (DraftToken(1 + oracle(prefix) % 7, 0.95),)
            prefix += (drafts[-1].id,)
        return drafts

    return propose


def test_a_drafter_that_never_hits_soon_sends_nothing() -> None:
    measurements = Measurements()
    sent = []
    for seed in range(6):
        others = [never_right(hashing_oracle(seed, eos_odds=0.0))]
        simulation = simulated(seed, LINKS["near"], others=others, measurements=measurements)
        simulation.run()
        measurements = simulation.edge.measurements
        sent.append(simulation.edge.statistics.verified_beside)
    assert sum(sent[3:]) <= 2


def test_the_text_goes_on_when_the_other_drafter_breaks() -> None:
    for seed in range(6):
        broken = drafter_of(hashing_oracle(seed, eos_odds=0.0), seed, 0.8, dies_after=5)
        counts_of([simulated(seed, LINKS["near"], others=[broken])])


def test_a_verifier_that_takes_another_drafters_token_for_text_is_found(monkeypatch) -> None:
    """The negative control: a branch is followed only where it is the target's token."""
    take_branches_for_text(monkeypatch)
    with pytest.raises((AssertionError, OutriderError)):
        decode_all(LINKS["near"], 3)
