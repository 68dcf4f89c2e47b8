"""From records to versions: what proves better is published, what does not is dropped, and nothing else gets out."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from lessons_for_tests import bigram_target, text_record

from outrider.cloud.learning import actor as acting
from outrider.cloud.learning.actor import TrainerActor
from outrider.cloud.learning.learner import Learner, drafters_folder
from outrider.cloud.learning.record_file import read_records, write_records
from outrider.cloud.learning.settings import TrainerSettings
from outrider.drafters.packages import load_package
from outrider.proto.errors import InvalidArgument, Unavailable
from outrider.proto.salts import salted

VOCAB = 8192
TARGET = bigram_target(VOCAB, seed=5)


def settings(folder: Path, **changes: object) -> TrainerSettings:
    quick = {"drafter": "general", "rank": 2, "positions": 96, "texts": 4, "warm_up_steps": 1, "rate": 0.01}
    return TrainerSettings(folder=folder, **(quick | {"min_keys": 1, "publish_every": 6} | changes))


def texts(first: int, count: int) -> list[bytes]:
    return [
        text_record(TARGET, vocab=VOCAB, seed=number, length=16, key=f"key-{number % 9}", at_s=time.time()).encode()
        for number in range(first, first + count)
    ]


def teach(learner: Learner, rounds: int, first: int = 0) -> None:
    for number in range(rounds):
        for data in texts(first + 4 * number, 4):
            assert learner.take(data)
        assert learner.step(time.time())


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_a_drafter_that_has_learned_is_published_once_fresh_texts_show_it(tmp_path: Path) -> None:
    learner = Learner(settings(tmp_path))
    published = tmp_path / "drafters" / "general"
    teach(learner, 6)
    assert learner.judge.test is not None
    assert not published.exists()
    teach(learner, 20, first=1000)
    (folder, *_) = sorted(published.iterdir())
    assert load_package(folder).parent == learner.trainer.package.version
    assert learner.status()["counts"]["versions"] >= 1
    again = Learner(settings(tmp_path))
    assert again.judge.current.version == load_package(published / str(again.trainer.state.sequence)).version
    assert again.judge.candidates == again.trainer.state.counts["candidates"] >= 1


def test_a_poisoned_candidate_is_never_published_and_training_goes_back(tmp_path: Path, monkeypatch) -> None:
    learner = Learner(settings(tmp_path))
    trainer, published = learner.trainer, tmp_path / "drafters" / "general"
    teach(learner, 26)
    versions = {folder.name for folder in published.iterdir()}
    assert versions
    monkeypatch.setattr(trainer, "ready", lambda: False)
    while learner.judge.test is not None:  # of an honest candidate, if there is one
        learner.take(texts(2000 + learner.judge.test.texts, 1)[0])
    versions = {folder.name for folder in published.iterdir()}
    good = trainer._published
    random = np.random.default_rng(0)
    honest = trainer.published_matrices()
    poison = {name: (a, 0.02 * random.normal(size=b.shape).astype(np.float32)) for name, (a, b) in honest.items()}
    monkeypatch.setattr(trainer, "published_matrices", lambda: poison)  # small enough to load
    learner._begin()
    assert learner.judge.test is not None
    dropped = trainer.state.counts["candidates dropped"]
    for data in texts(5000, 60):
        learner.take(data)
        if trainer.state.counts["candidates dropped"] > dropped:
            break
    assert trainer.state.counts["candidates dropped"] == dropped + 1
    assert {folder.name for folder in published.iterdir()} == versions
    now = trainer.drafter.matrices()
    assert all(np.array_equal(b, good[name][1]) for name, (_, b) in now.items())


def test_without_enough_keys_no_candidate_is_made(tmp_path: Path) -> None:
    few, enough = (Learner(settings(tmp_path / str(keys), min_keys=keys)) for keys in (10, 9))
    for learner in (few, enough):
        teach(learner, 8)
    assert few.judge.test is None
    assert enough.judge.test is not None


def test_rehearsal_comes_from_a_file_and_a_broken_one_is_refused(tmp_path: Path) -> None:
    corpus = [text_record(TARGET, vocab=VOCAB, seed=number, key="corpus") for number in range(3)]
    file = tmp_path / "corpus.lessons"
    write_records(file, corpus)
    assert [record.sampling.seed for record in read_records(file)] == [0, 1, 2]
    learner = Learner(settings(tmp_path / "a", rehearsal=(file,)))
    assert learner.trainer.buffer.rehearsed_keys == {salted(b"", "corpus")}
    for broken in (file.read_bytes()[:-5], b"\xff" * 50, b"ab"):
        (tmp_path / "broken").write_bytes(broken)
        with pytest.raises(InvalidArgument):
            read_records(tmp_path / "broken")
    with pytest.raises(InvalidArgument, match="cannot read"):
        Learner(settings(tmp_path / "b", rehearsal=(tmp_path / "nowhere",)))


@pytest.fixture
def actor(tmp_path: Path, monkeypatch):
    """Without Ray, in this process, which stays as eager as it was."""
    monkeypatch.setattr(os, "nice", lambda _: 0)
    monkeypatch.setattr(acting, "IDLE_S", 0.01)
    made = TrainerActor(settings(tmp_path, cpu_share=1.0))
    yield made
    made._stopped.set()
    made._thread.join()


def until(holds, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_an_actor_learns_from_what_is_pushed_and_leaves_a_checkpoint(actor, tmp_path: Path) -> None:
    assert actor.push(tuple(texts(0, 12))) == 12
    until(lambda: actor.info()["steps"] >= 2)
    actor.push((b"garbage", *texts(50, 1)))
    until(lambda: actor.info()["counts"].get("records refused") == 1)
    assert actor.info()["counts"]["records"] == 13
    actor.stop()
    assert list(tmp_path.glob("checkpoint-*"))


def test_forgetting_reaches_what_waits_in_the_inbox_too(actor, monkeypatch) -> None:
    monkeypatch.setattr(actor._learner.trainer, "ready", lambda: False)
    with actor._learning:
        actor.push(tuple(texts(0, 18)))
    assert actor.forget(salted(b"", "key-0")) == 32
    assert actor.forget(salted(b"", "key-0")) == 0
    assert actor.info()["waiting"] == 16 * 16


def test_a_push_waits_for_room_and_is_refused_if_there_is_none(actor, monkeypatch) -> None:
    monkeypatch.setattr(acting, "ROOM_WITHIN_S", 0.1)
    monkeypatch.setattr(acting, "MAX_INBOX_BYTES", 20_000)
    with actor._learning:  # the trainer is busy
        actor.push(tuple(texts(0, 2)))
        with pytest.raises(Unavailable):
            actor.push(tuple(texts(2, 4)))
        monkeypatch.setattr(acting, "ROOM_WITHIN_S", 30.0)
        late = threading.Thread(target=actor.push, args=(tuple(texts(2, 1)),))
        late.start()
    late.join(30)
    assert not late.is_alive()


def test_learning_that_fails_ends_the_process(actor, monkeypatch) -> None:
    ended = threading.Event()

    def end(status: int) -> None:
        assert status == 1
        ended.set()

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(acting.logging, "shutdown", lambda: None)
    monkeypatch.setattr(actor._learner, "step", lambda wall_s: 1 // 0)
    actor.push(tuple(texts(0, 4)))
    assert ended.wait(30)


def test_the_folder_of_versions_is_made_for_a_catalogue(tmp_path: Path) -> None:
    assert drafters_folder(settings(tmp_path / "new")).is_dir()
