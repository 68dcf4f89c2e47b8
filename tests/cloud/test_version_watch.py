"""A version that an edge trained for itself is compared with its parent as long as it drafts."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from lessons_for_tests import quick_settings

from outrider.cloud.learning import judge as judging
from outrider.cloud.learning.judge import JudgeMemory, ShadowJudge, VersionWatch
from outrider.cloud.learning.learner import Learner
from outrider.cloud.learning.lesson_record import LessonRecord, record_of_text
from outrider.cloud.learning.trainer_settings import OWN
from outrider.drafters import ProposalRule
from outrider.drafters.onnx import OnnxDrafter
from outrider.drafters.packages import DrafterPackage, find_package
from outrider.proto.salts import salted
from outrider.proto.types import Sampling

HEAD = "model.lm_head.weight"


settings = partial(quick_settings, **OWN | {"rank": 8})


def texts_until(watch: VersionWatch, differences: list[float]) -> int | None:
    """Return the number of texts after which the version is retired; None: it stays."""
    for count, difference in enumerate(differences, 1):
        watch = watch.next("1")
        watch.add(difference)
        if watch.reason:
            return count
    return None


# --- the test ---


@pytest.mark.parametrize(("loss", "most"), [(0.6, 12), (0.3, 20), (0.06, 120)])
def test_a_version_that_hits_less_is_retired_after_few_texts(loss: float, most: int) -> None:
    rng = np.random.default_rng(1)
    count = texts_until(VersionWatch("1", 1), list(np.clip(rng.normal(-loss, 0.08, 300), -1, 1)))
    assert count <= most


@pytest.mark.parametrize("gain", [0.0, 0.05])
def test_one_that_hits_no_less_stays_however_long_it_drafts(gain: float) -> None:
    rng = np.random.default_rng(2)
    fallen = [texts_until(VersionWatch("1", 1), list(rng.normal(gain, 0.1, 1200))) for _ in range(100)]
    assert sum(count is not None for count in fallen) <= 2, "a hundredth, ever"


def test_one_that_was_better_and_turns_worse_is_retired() -> None:
    """Users ask for other things in time, so that a comparison of all times would take as long as it was good."""
    rng = np.random.default_rng(3)
    good, bad = rng.normal(0.1, 0.05, 3 * judging.WATCHED_TEXTS), rng.normal(-0.07, 0.05, 400)
    count = texts_until(VersionWatch("1", 1), [*good, *bad])
    assert 0 < count - len(good) < 150
    forever = VersionWatch("1", 1)
    for difference in [*good, *bad]:
        forever.add(difference)
    assert not forever.reason, "without a new beginning it stays"


def test_each_comparison_needs_more_evidence_than_the_one_before() -> None:
    bad = [-0.1] * 200
    first, tenth = (texts_until(VersionWatch("1", number), bad) for number in (1, 10))
    assert first < tenth
    watch = VersionWatch("1", 4)
    assert watch.next("1") is watch
    assert (watch.next("2").number, watch.next("2").version) == (5, "2")


# --- in a judge and a learner ---


def plant(learner: Learner, size: float) -> DrafterPackage:
    """Publish a version whose head is led astray, as if a trial had let it through; every check lets it load."""
    trainer = learner.trainer
    rng = np.random.default_rng(1)
    good = trainer.published_matrices()
    a, b = good[HEAD]
    astray = good | {HEAD: (rng.standard_normal(a.shape) / a.shape[1], size * rng.standard_normal(b.shape))}
    trainer.published_matrices = lambda: astray
    candidate = trainer.write_candidate()
    assert candidate is not None
    del trainer.published_matrices
    return trainer.publish(candidate)


@pytest.fixture(scope="module")
def parent() -> OnnxDrafter:
    return OnnxDrafter(find_package("general"), threads=1)


def liked(drafter: OnnxDrafter, seed: int, length: int = 16) -> LessonRecord:
    """Return a text that this drafter hits all along: it is what it would have drafted."""
    sampling = Sampling(seed=seed)
    prompt = np.random.default_rng(seed).integers(100, 4000, size=6).tolist()
    state = drafter.open(ProposalRule(sampling, prompt_length=len(prompt)))
    state.extend(prompt)
    text = [draft.id for draft in state.propose(length)]
    state.close()
    salts = {"session_salt": salted(b"", str(seed)), "key_salt": salted(b"", "here")}
    return record_of_text([*prompt, *text], len(prompt), sampling, model="reference", at_s=1e9, **salts)


def taught(learner: Learner, drafter: OnnxDrafter, seeds: range) -> int | None:
    """Show a learner texts until a version is retired, and return how many it took."""
    for count, seed in enumerate(seeds, 1):
        learner.take(liked(drafter, seed).encode())
        if learner.trainer.state.counts["versions retired"]:
            return count
    return None


def test_a_planted_bad_version_is_retired_by_later_texts(tmp_path: Path, parent, caplog) -> None:
    bad = plant(Learner(settings(tmp_path)), 0.5)
    learner = Learner(settings(tmp_path))
    assert learner.status()["version"] == bad.version, "it drafts"
    learner.take(liked(parent, 0).encode())
    learner.trainer.save()
    learner = Learner(settings(tmp_path))
    count = taught(learner, parent, range(60))
    assert count is not None
    status = learner.status()
    assert (status["version"], status["folder"]) == (parent.version, str(find_package("general").folder))
    assert not bad.folder.exists()
    assert "against its parent" in caplog.text
    assert f"in {count} texts" in caplog.text, "that before the restart counts, and it counts once"
    assert Learner(settings(tmp_path)).status()["version"] == parent.version
    assert learner.trainer.write_candidate().sequence == bad.sequence + 1


def test_the_version_before_it_drafts_again_and_is_watched_in_its_turn(tmp_path: Path, parent) -> None:
    first = plant(Learner(settings(tmp_path)), 0.0)
    second = plant(Learner(settings(tmp_path)), 0.5)
    learner = Learner(settings(tmp_path))
    assert learner.newest.version == second.version
    assert taught(learner, parent, range(60)) is not None
    assert learner.newest.version == first.version
    learner.take(liked(parent, 100).encode())
    watch = learner.trainer.memory.watch
    assert (watch.version, watch.number, watch.loses.count) == (first.version, 2, 1)
    assert watch.difference == 0, "its change is none"


def test_a_trainer_beside_a_coordinator_leaves_that_to_it(tmp_path: Path, parent) -> None:
    bad = plant(Learner(settings(tmp_path)), 0.5)
    learner = Learner(settings(tmp_path, watched=False))
    assert taught(learner, parent, range(30)) is None
    assert (learner.newest.version, learner.trainer.memory.watch) == (bad.version, None)


def test_texts_that_were_learned_from_count_for_no_version(parent) -> None:
    record = liked(parent, 1)
    judge = ShadowJudge(OnnxDrafter(find_package("swift"), threads=1), parent=parent)
    for _ in range(2):
        judge.take(record)
    assert judge.memory.watch.loses.count == 1, "the first time it is fresh"


def test_the_comparison_is_saved_with_the_rest() -> None:
    memory = JudgeMemory(watch=VersionWatch("1", 3))
    for difference in (0.1, -0.3, -0.2):
        memory.watch.add(difference)
    restored = JudgeMemory.restored(json.loads(json.dumps(memory.saved())), memory.saved_names())
    assert restored.watch == memory.watch
    with pytest.raises(ValueError, match="not enough values"):
        VersionWatch.restored(["1", 3])
