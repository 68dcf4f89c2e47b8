"""Every interleaving of a small world: the text is the target's, it ends, and nothing is left."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import small_states
from small_rules import Rules, still_measurements
from small_states import Interned, clone
from small_world import Parts, World
from state_search import Found, Search

from outrider.cloud.serving.sessions import Sessions
from outrider.proto.errors import InvalidArgument
from outrider.proto.session import received, stream, tree, verifier

__all__ = ["still_measurements"]

pytestmark = pytest.mark.usefixtures("still_measurements")

# Worlds of which every run is seen.
WHOLE = {
    "plain decoding": Rules(drafters=0, tokens=2, deaths=1, drains=1, jumps=1, stops=1),
    "a minute alone": Rules(drafters=0, tokens=2, losses=2, jumps=1),
    "own drafts": Rules(drafters=1, window=1, verifiers=1, own=1, tokens=2),
}
WHOLE_AND_LARGE = {
    "two minutes alone": Rules(drafters=0, losses=3, jumps=2),
    "one draft ahead": Rules(drafters=1, window=1, verifiers=1),
    "two drafters and trees": Rules(window=1, verifiers=1, switches=True, trees=True, tokens=3),
    "drafts before the answer": Rules(
        drafters=1, window=1, verifiers=1, early=True, tokens=2, losses=1, doubles=1, swaps=1
    ),
    "two turns": Rules(drafters=1, window=1, verifiers=1, tokens=2, turns=1, losses=1),
}
# Worlds of which all runs of few detours are seen: always, and in a long test.
EACH_FAULT_ONCE = dict.fromkeys(Rules.FAULTS, 1)
EVERYTHING = Rules(
    own=1, trees=True, grammar=True, early=True, switches=True, idles=True, stalls=True, **EACH_FAULT_ONCE
)
FAULTS = Rules(drafters=1, window=1, tokens=2, stalls=True, **EACH_FAULT_ONCE)
GRAMMAR = Rules(drafters=1, window=1, verifiers=1, own=1, trees=True, ends=True, grammar=True)
RUNS = Rules(drafters=1, job=2, verifiers=1, trees=True, quick=True)
RUNS_OF_TWO = Rules(window=1, verifiers=1, trees=True, idles=True, quick=True)
BOUNDED = {
    "everything": (EVERYTHING, 1, 2),
    "every fault": (FAULTS, 1, 3),
    "a grammar and both ends": (GRAMMAR, 1, 3),
    "runs of branches": (RUNS, 2, 4),
    "two drafters' runs": (RUNS_OF_TWO, 2, 5),
}


def check(found: Found) -> None:
    """Say how much was seen; fail with the violation and the way to it."""
    print(found)
    assert found.violation is None, "\n".join([str(found.violation), *map(str, found.path)])


def check_documented(found: Found, root: Path) -> None:
    """Fail where the table of docs/faults.md has no row with as many states."""
    table = (root / "docs" / "faults.md").read_text(encoding="utf-8")
    assert f"| {found.states:,} |\n" in table, "write the number of states into the table"


@pytest.mark.parametrize("name", WHOLE)
def test_no_run_breaks_a_small_world(name, root):
    found = Search(WHOLE[name]).run()
    check(found)
    assert found.complete
    assert found.ended
    check_documented(found, root)


@pytest.mark.parametrize("name", BOUNDED)
def test_no_run_of_few_detours_breaks_a_small_world(name):
    rules, detours, _ = BOUNDED[name]
    check(Search(rules).run(detours))


@pytest.mark.soak
@pytest.mark.parametrize("name", WHOLE_AND_LARGE)
def test_no_run_breaks_a_larger_small_world(name, root):
    found = Search(WHOLE_AND_LARGE[name]).run()
    check(found)
    assert found.complete
    check_documented(found, root)


@pytest.mark.soak
@pytest.mark.parametrize("name", BOUNDED)
def test_no_run_of_more_detours_breaks_a_small_world(name, root):
    rules, _, detours = BOUNDED[name]
    found = Search(rules).run(detours)
    check(found)
    check_documented(found, root)


# --- planted defects, each of which is found ---


def twins_stay(monkeypatch) -> Rules:
    """Wrong: a step's tree may have two branches of one position and token."""
    monkeypatch.setattr(verifier, "_without_twins", list)
    return GRAMMAR


def the_clock_runs_on(monkeypatch) -> Rules:
    """Wrong: the time since the first loss counts as failing, though a verifier has the text meanwhile."""
    rightly = stream.EdgeStream.accept

    def accept(self, opened, now):
        failing_since, failed_s = self._failing_since, self._failed_s
        reopen = rightly(self, opened, now)
        self._failing_since, self._failed_s = failing_since, failed_s
        return reopen

    monkeypatch.setattr(stream.EdgeStream, "accept", accept)
    return WHOLE["a minute alone"]


def runs_change(monkeypatch) -> None:
    """Wrong: a run that was sent is replaced by another drafter's, or lengthened."""
    rightly = tree.DraftTree.add

    def add(self, done):
        self._make((done.job.branch, done.job.extend_with[done.job.branch - done.job.truncate_to])).sent = False
        rightly(self, done)

    def likeliest_other(self):
        others = ((key, each) for key, each in self.branches.items() if each.other >= 0 and not each.asked)
        lacking = [(each.worth, *key, each.other) for key, each in others]
        return max(lacking, default=None)

    monkeypatch.setattr(tree.DraftTree, "add", add)
    monkeypatch.setattr(tree.DraftTree, "likeliest_other", likeliest_other)


def a_run_grows(monkeypatch) -> Rules:
    """Wrong: the run of a branch is lengthened after it was sent, under one number."""
    runs_change(monkeypatch)
    return replace(RUNS, window=1, job=1)


def a_run_is_replaced(monkeypatch) -> Rules:
    """Wrong: the run of a branch is another drafter's after it was sent, under one number."""
    runs_change(monkeypatch)
    return RUNS_OF_TWO


def contradictions_end_texts(monkeypatch) -> Rules:
    """Wrong: the edge goes on with less of a run than it has sent, and a verifier ends the text that contradicts it."""
    rightly_taken, rightly_received = tree.DraftTree.take, received.ReceivedDrafts._take

    def take(self, position, draft, token):
        return rightly_taken(self, position, draft, token)[:1]

    def receive(self, position, token):
        ahead = position - len(self._transcript)
        if 0 <= ahead < len(self.tokens) and self.tokens[ahead].id != token.id:
            raise InvalidArgument("contradicts what the chain said", field="draft.tokens")
        return rightly_received(self, position, token)

    monkeypatch.setattr(tree.DraftTree, "take", take)
    monkeypatch.setattr(received.ReceivedDrafts, "_take", receive)
    monkeypatch.setattr(World, "_check_chains", lambda *_: None)  # which would notice before
    return RUNS


def silent_drafters_are_asked_again(monkeypatch) -> Rules:
    """Wrong: a drafter that has nothing to say after a branch is asked again at once."""
    rightly = tree.DraftTree.add
    monkeypatch.setattr(tree.DraftTree, "add", lambda self, done: rightly(self, done) if done.drafts else None)
    return EVERYTHING


def slots_stay(monkeypatch) -> Rules:
    """Wrong: a slot is not freed."""
    monkeypatch.setattr(Sessions, "release", lambda *_: None)
    return WHOLE["plain decoding"]


def commits_come_twice(monkeypatch) -> Rules:
    """Wrong: an edge takes all tokens of a commit that came twice for new."""
    rightly = stream.EdgeStream.follow
    monkeypatch.setattr(stream.EdgeStream, "follow", lambda self, commit: min(0, rightly(self, commit)))
    return replace(WHOLE["plain decoding"], doubles=1)


PLANTED = (
    (twins_stay, "two drafts of a step have one position and token"),
    (the_clock_runs_on, "the text is lost, and was never for a minute without a verifier"),
    (a_run_grows, "the edge has sent"),
    pytest.param(a_run_is_replaced, "the edge has sent", marks=pytest.mark.soak),
    pytest.param(contradictions_end_texts, "contradicts what the chain said", marks=pytest.mark.soak),
    (silent_drafters_are_asked_again, "changes nothing, and happens again"),
    (slots_stay, "left at the end"),
    (commits_come_twice, "is not the target's text"),
)


@pytest.mark.parametrize(("plant", "says"), PLANTED)
def test_a_planted_defect_is_found(plant, says, monkeypatch):
    found = Search(plant(monkeypatch)).run(4)
    print(found.states, found.violation, len(found.path))
    assert says in str(found.violation)


# --- what is merged is the same ---


class Unmerged(Parts):
    """The states of one part along one run: each goes on as it is, and not as another of its form."""

    def __init__(self, frames: Interned, states: Interned) -> None:
        super().__init__(frames)
        self.states = states
        self._met: dict = {}

    def happen(self, number, event):
        part = clone(self._met.get(number, self.states[number]), {})
        said = part.happen(event, self._frames)
        after = self.states.number(clone(part, {}))
        self._met[after] = part
        return after, said


def differs(merged: World, seed: int) -> bool:
    """Go one way at random through a world and through one that merges nothing; return whether they part."""
    rng, unmerged = random.Random(seed), World(merged.rules)
    unmerged.frames = merged.frames
    unmerged.edges = Unmerged(merged.frames, merged.edges.states)
    unmerged.verifiers = Unmerged(merged.frames, merged.verifiers.states)
    state, there = merged.first(), unmerged.first()
    while state == there and (actions := list(merged.progress(state))):
        action = rng.choice(actions + list(merged.faults(state)))
        script = tuple(rng.randrange(2) for _ in range(20))
        state, there = merged.after(state, action, script), unmerged.after(there, action, script)
    return state != there


@pytest.mark.parametrize("rules", [EVERYTHING, RUNS], ids=["everything", "runs"])
def test_a_state_goes_on_as_every_other_of_its_form_does(rules):
    merged = World(rules)
    assert not any(differs(merged, seed) for seed in range(10))


def test_a_form_that_leaves_too_much_out_is_found(monkeypatch):
    unseen = small_states.UNSEEN_FIELDS["ReceivedDrafts"]
    monkeypatch.setitem(small_states.UNSEEN_FIELDS, "ReceivedDrafts", f"{unseen} chain")
    small_states.form_of.cache_clear()
    merged = World(RUNS)
    found = any(differs(merged, seed) for seed in range(40))
    small_states.form_of.cache_clear()
    assert found
