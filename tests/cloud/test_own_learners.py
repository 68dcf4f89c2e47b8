"""Learners of single keys: each from the texts of its key alone, for that key, bounded, and gone when forgotten."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from lessons_for_tests import bigram_target, text_record

from outrider.cloud.learning import actor as acting
from outrider.cloud.learning import own as owning
from outrider.cloud.learning.actor import TrainerActor
from outrider.cloud.learning.learner import Learner
from outrider.cloud.learning.own import OwnLearners
from outrider.cloud.learning.record import LessonRecord
from outrider.cloud.learning.settings import TrainerSettings
from outrider.drafters.packages import DrafterPackage, load_package
from outrider.proto.errors import Internal
from outrider.proto.salts import salted

VOCAB = 8192
ALICE, BOB, CAROL = (salted(b"", f"key {name}") for name in ("alice", "bob", "carol"))
TARGET = bigram_target(VOCAB, seed=5)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def settings(folder: Path, **changes: object) -> TrainerSettings:
    quick = {"drafter": "general", "rank": 2, "positions": 96, "texts": 4, "warm_up_steps": 1, "rate": 0.01}
    return TrainerSettings(folder=folder, **(quick | {"publish_every": 6} | changes))


def text(number: int, key: str = "alice", age_s: float = 0.0) -> LessonRecord:
    return text_record(TARGET, vocab=VOCAB, seed=number, length=16, key=f"key {key}", at_s=time.time() - age_s)


class Trainers:
    """A learner for all, and those of single keys; `now_s` passes as a test likes."""

    def __init__(self, folder: Path, *allowed: bytes, **changes: object) -> None:
        self.folder, self.now_s = folder, 0.0
        self.public = Learner(settings(folder, **changes))
        self.own = OwnLearners(self.public.trainer.settings, self.public)
        if allowed:
            self.own.allow(frozenset(allowed))

    def teach(self, *numbers: int, key: str = "alice") -> None:
        for number in numbers:
            self.own.take(text(number, key), self.now_s)

    def until_published(self, key: str = "alice", first: int = 0, texts: int = 200) -> DrafterPackage:
        """Teach a key until there is one more version of its own, and return that."""
        before = set(self.versions(key))
        for number in range(first, first + texts):
            self.teach(number, key=key)
            self.own.step(time.time())
            if new := set(self.versions(key)) - before:
                return load_package(new.pop())
        raise AssertionError(f"no version after {texts} texts")

    def versions(self, key: str) -> list[Path]:
        return sorted((self.folder / "drafters" / salted(b"", f"key {key}").hex()).glob("[0-9]*"))

    def learner(self, owner: bytes) -> Learner:
        return self.own._learners[owner].learner


def test_one_key_teaches_a_version_for_itself_and_none_for_others(tmp_path: Path) -> None:
    trainers = Trainers(tmp_path, ALICE)
    assert trainers.public.trainer.settings.min_keys == 8
    for number in range(900, 1000):
        trainers.teach(number, key="bob")  # who may have none
    published = trainers.until_published()
    assert (published.parent, published.learned_from.keys) == (trainers.public.trainer.package.version, 1)
    assert f'"owner": "{ALICE.hex()}"' in (published.folder / "manifest.json").read_text()
    assert not (tmp_path / "drafters" / "general").exists()
    learner = trainers.learner(ALICE)
    assert set(learner.trainer.state.keys) == {ALICE.hex()}
    assert learner.trainer.state.counts["candidates"] >= 1
    assert set(trainers.own._learners) == {ALICE}
    assert trainers.own.status() == {"own_learners": 1, "own_keys": 1, "own_versions": 1, "undeleted": 0}
    # A restart goes on from the checkpoint, but for nobody until a coordinator names the keys again.
    learner.trainer.save()
    again = Trainers(tmp_path)
    again.teach(5000)
    assert not again.own._learners
    assert trainers.versions("alice"), "nor is anything deleted before that"
    again.own.allow(frozenset({ALICE}))
    again.teach(5001)
    assert again.learner(ALICE).trainer.state.step == learner.trainer.state.step
    assert again.learner(ALICE).judge.current.version == learner.judge.current.version == published.version
    # Another version for all is the parent from then on.
    records = len(again.learner(ALICE).trainer.buffer)
    matrices = again.public.trainer.published_matrices()
    bent = {name: (a, b + 1e-3) for name, (a, b) in matrices.items()}
    again.public.trainer.published_matrices = lambda: bent
    folder = again.public.trainer.publish(again.public.trainer.write_candidate())
    again.public.newest = load_package(folder)
    again.teach(5002)
    moved = again.learner(ALICE)
    assert moved.trainer.package.version == load_package(folder).version
    assert moved.judge.current.version == load_package(folder).version
    assert len(moved.trainer.buffer) > records, "its texts are still there"
    assert moved.judge.candidates == learner.judge.candidates, "and it needs no less evidence"
    assert [load_package(path).version for path in again.versions("alice")] == [published.version]
    start, now = (
        np.concatenate([b.ravel() for _, b in m.values()]) for m in (bent, moved.trainer.published_matrices())
    )
    assert np.allclose(start, now, atol=1e-5)
    then = again.until_published(first=6000)
    assert then.parent == load_package(folder).version
    assert then.sequence == max(int(path.name) for path in again.versions("alice"))


def test_two_keys_never_learn_from_one_another_and_take_turns(tmp_path: Path) -> None:
    trainers = Trainers(tmp_path, ALICE, BOB)
    for number in range(0, 48, 2):
        trainers.teach(number, key="alice")
        trainers.teach(number + 1, key="bob")
    steps = []
    while trainers.own.step(time.time()):
        steps.append([trainers.learner(owner).trainer.state.step for owner in (ALICE, BOB)])
    assert max(abs(alice - bob) for alice, bob in steps) <= 1
    for owner in (ALICE, BOB):
        learner = trainers.learner(owner)
        assert set(learner.trainer.state.keys) == {owner.hex()}
        assert learner.judge._keys == {owner}


def test_few_keys_at_once_and_the_one_without_texts_for_longest_goes_and_comes_back(tmp_path: Path) -> None:
    trainers = Trainers(tmp_path, ALICE, BOB, CAROL, own_keys=2)
    trainers.teach(0, key="alice")
    trainers.teach(*range(1, 9), key="bob")
    assert trainers.own.step(time.time())
    trainers.now_s = owning.KEPT_S - 1
    trainers.teach(10, key="alice")
    trainers.teach(11, key="carol")
    assert set(trainers.own._learners) == {ALICE, BOB}, "nobody has rested for long"
    trainers.now_s += 1
    trainers.teach(12, key="carol")
    assert set(trainers.own._learners) == {ALICE, CAROL}
    trainers.now_s += owning.KEPT_S
    trainers.teach(13, key="bob")
    assert set(trainers.own._learners) == {CAROL, BOB}
    assert trainers.learner(BOB).trainer.state.step == 1, "it goes on where it was"
    none = Trainers(tmp_path / "none", ALICE, own_keys=0)
    none.teach(0)
    assert not none.own._learners


def test_a_learner_holds_few_positions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owning, "CLASS_POSITIONS", 64)
    monkeypatch.setattr(owning, "NEW_POSITIONS", 64)
    trainers = Trainers(tmp_path, ALICE)
    trainers.teach(*range(40))
    assert len(trainers.learner(ALICE).trainer.buffer) == 128


def test_a_checkpoint_that_cannot_be_read_costs_that_key_its_own_alone(tmp_path: Path, caplog) -> None:
    trainers = Trainers(tmp_path, ALICE, BOB)
    trainers.teach(*range(4), key="alice")
    trainers.own.step(time.time())
    folder = trainers.learner(ALICE).trainer.publish(trainers.learner(ALICE).trainer.write_candidate())
    (folder / "adapter.safetensors").write_bytes(b"broken")
    again = Trainers(tmp_path, ALICE, BOB)
    again.teach(10, key="alice")
    assert "is dropped" in caplog.text
    assert not again.versions("alice")
    again.teach(11, key="alice")
    assert again.learner(ALICE).trainer.state.step == 0


def traces(folder: Path, owner: bytes) -> list[Path]:
    found = [Path(at, name) for at, folders, files in os.walk(folder) for name in [*folders, *files]]
    return [path for path in found if owner.hex() in str(path)]


@pytest.fixture
def actor(tmp_path: Path, monkeypatch):
    """Without Ray, in this process; two keys have versions of their own."""
    monkeypatch.setattr(os, "nice", lambda _: 0)
    monkeypatch.setattr(acting, "IDLE_S", 0.01)
    made = TrainerActor(settings(tmp_path, cpu_share=1.0))
    made.allow_own(frozenset({ALICE, BOB}))
    made.push(tuple(text(number, ("alice", "bob")[number % 2]).encode() for number in range(16)))
    until(lambda: made.info()["own_learners"] == 2 and made.info()["counts"]["records"] == 16)
    with made._learning:
        for owner in (ALICE, BOB):
            trainer = made._own._learners[owner].learner.trainer
            trainer.publish(trainer.write_candidate())
            assert len(trainer.buffer)
    assert {key: made.info()[key] for key in ("own_keys", "own_versions")} == {"own_keys": 2, "own_versions": 2}
    yield made
    made._stopped.set()
    made._thread.join()


def until(holds, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def by_hand(actor):
    """The actor without its thread: a test calls `_learn`."""
    actor._stopped.set()
    actor._thread.join()
    actor._stopped.clear()
    return actor


def test_single_keys_wait_for_idle_time_too_and_get_every_second_step(by_hand, monkeypatch) -> None:
    def steps() -> list[int]:
        own = [each.learner.trainer.state.step for each in by_hand._own._learners.values()]
        return [by_hand._learner.trainer.state.step, sum(own)]

    monkeypatch.setattr(by_hand._gate, "opens", lambda: False)
    by_hand.push(tuple(text(number).encode() for number in range(100, 164)))
    before = steps()
    by_hand._learn()
    assert steps() == before
    leave = iter([True] * 6)
    monkeypatch.setattr(by_hand._gate, "opens", lambda: next(leave, False))
    by_hand._learn()
    assert [now - then for now, then in zip(steps(), before, strict=True)] == [3, 3]


def test_a_text_is_dropped_after_a_day_though_no_step_is_made(by_hand, monkeypatch) -> None:
    monkeypatch.setattr(by_hand._gate, "opens", lambda: False)
    trainers = [by_hand._learner.trainer, by_hand._own._learners[ALICE].learner.trainer]
    before = [len(trainer.buffer) for trainer in trainers]
    by_hand.push((text(100, age_s=25 * 3600.0).encode(),))
    by_hand._learn()
    assert by_hand._learner.trainer.state.counts["records"] == 17
    assert [len(trainer.buffer) for trainer in trainers] == before


def test_forgetting_a_key_deletes_its_versions_checkpoint_and_texts_at_once(actor, tmp_path: Path) -> None:
    assert traces(tmp_path, ALICE)
    assert actor.forget(ALICE) == 8 * 16
    assert not traces(tmp_path, ALICE)
    assert set(actor._own._learners) == {BOB}
    assert traces(tmp_path, BOB)
    actor.push((text(100).encode(),))  # it is allowed still, and begins with nothing
    until(lambda: actor.info()["own_learners"] == 2)
    with actor._learning:
        assert len(actor._own._learners[ALICE].learner.trainer.buffer) == 16


def test_a_key_that_is_revoked_loses_them_and_late_texts_teach_no_one(actor, tmp_path) -> None:
    actor.allow_own(frozenset({BOB}))
    until(lambda: actor.info()["own_keys"] == 1)
    assert not traces(tmp_path, ALICE)
    assert traces(tmp_path, BOB)
    assert actor._learner.forget(ALICE) == 0, "the learner for all has dropped its texts too"
    actor.push((text(100).encode(),))
    until(lambda: actor.info()["counts"]["records"] == 17)
    assert actor.info()["own_learners"] == 1
    assert "alice" not in str(actor.info())
    assert ALICE.hex() not in str(actor.info())


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of alice's that cannot be deleted, while the patch lasts."""
    unlink = os.unlink

    def refuse(path, *arguments, **options) -> None:
        if str(path).endswith("adapter.safetensors"):
            raise PermissionError(1, "Operation not permitted", path)
        unlink(path, *arguments, **options)

    monkeypatch.setattr(os, "unlink", refuse)
    return Path("adapter.safetensors")


def test_files_that_cannot_be_deleted_are_reported_and_teach_no_more(actor, tmp_path, stuck, monkeypatch) -> None:
    """Forgetting is a promise: it must not seem kept where a part of a version is still there."""
    with pytest.raises(Internal, match="not permitted") as refused:
        actor.forget(ALICE)
    assert refused.value.field == "key"
    assert actor.info()["undeleted"] == 1
    left = [path for path in traces(tmp_path, ALICE) if path.is_file()]
    assert {path.name for path in left} == {stuck.name}, "all else is gone"
    assert actor._learner.forget(ALICE) == 0, "the texts too"
    actor.push((text(100).encode(),))
    until(lambda: actor.info()["counts"]["records"] == 17)
    assert actor.info()["own_learners"] == 1, "it begins with nothing, or not at all"
    monkeypatch.undo()
    until(lambda: not actor.info()["undeleted"])
    assert not traces(tmp_path, ALICE)
    assert actor.forget(ALICE) == 16, "which came since"


@pytest.mark.usefixtures("stuck")
def test_a_key_that_is_revoked_is_deleted_as_soon_as_that_is_possible(actor, tmp_path, monkeypatch, caplog) -> None:
    actor.allow_own(frozenset({BOB}))
    until(lambda: actor.info()["undeleted"])
    assert "goes on trying" in caplog.text
    actor.push((text(100, "bob").encode(),))
    until(lambda: actor.info()["counts"]["records"] == 17)
    assert traces(tmp_path, ALICE)
    monkeypatch.undo()
    until(lambda: not traces(tmp_path, ALICE))
    assert traces(tmp_path, BOB)


def test_own_versions_that_are_retired_are_deleted(actor, tmp_path: Path) -> None:
    by_key = {owner: tmp_path / "drafters" / owner.hex() for owner in (ALICE, BOB)}
    versions = {owner: load_package(folder / "1").version for owner, folder in by_key.items()}
    with actor._learning:
        actor._own._learners.pop(BOB)
    actor.retire(frozenset({(ALICE.hex(), "another"), (BOB.hex(), versions[BOB])}))
    until(lambda: actor.info()["own_versions"] == 1)
    assert [path.name for path in by_key[ALICE].iterdir()] == ["1"]
    actor.retire(frozenset({(ALICE.hex(), versions[ALICE])}))
    until(lambda: actor.info()["own_versions"] == 0)


def test_learners_of_single_keys_leave_a_parent_that_is_retired(by_hand, tmp_path: Path) -> None:
    learner, own = by_hand._learner, by_hand._own._learners[ALICE].learner
    with by_hand._learning:
        matrices = {name: (a, b + 1e-3) for name, (a, b) in learner.trainer.published_matrices().items()}
        learner.trainer.published_matrices = lambda: matrices
        learner.newest = load_package(learner.trainer.publish(learner.trainer.write_candidate()))
        own.begin_again(learner.newest)
    by_hand.retire(frozenset({("general", learner.newest.version)}))
    by_hand._learn()
    assert own.trainer.package.version == learner.newest.version == learner.trainer.package.version
    assert own.trainer.write_candidate() is not None, "the files of its parent are there"


def test_what_a_key_left_on_disk_goes_when_a_trainer_hears_that_it_is_gone(actor, tmp_path: Path) -> None:
    actor.stop()
    again = TrainerActor(settings(tmp_path, cpu_share=1.0))
    try:
        assert traces(tmp_path, ALICE)
        again.allow_own(frozenset({BOB}))
        until(lambda: not traces(tmp_path, ALICE))
        assert traces(tmp_path, BOB)
    finally:
        again._stopped.set()
        again._thread.join()
