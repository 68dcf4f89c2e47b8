"""From records to versions: what proves better is published, what does not is dropped, and nothing else gets out."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lessons_for_tests import bigram_target, quick_settings, text_record

from outrider.cloud.learning import cpu_share
from outrider.cloud.learning import judge as judging
from outrider.cloud.learning import trainer as training
from outrider.cloud.learning import trainer_actor as acting
from outrider.cloud.learning.judge import JudgeMemory, ShadowJudge, TrialJournal, VersionWatch
from outrider.cloud.learning.learner import Learner, drafters_folder, rehearsed_records
from outrider.cloud.learning.lesson_record import MAX_ROWS, LessonRecord, record_of_text
from outrider.cloud.learning.losses import judged_rows
from outrider.cloud.learning.trainer import Trainer, VersionFolder
from outrider.cloud.learning.trainer_actor import TrainerActor
from outrider.cloud.learning.trainer_settings import OWN
from outrider.cloud.training.teacher import BestTokens, TeacherFolder, TeacherRows
from outrider.drafters import ProposalRule
from outrider.drafters.adapters import read_adapter, write_adapter_package
from outrider.drafters.onnx import OnnxDrafter
from outrider.drafters.packages import DrafterPackage, find_package, load_package
from outrider.proto.drafter_format import LearnedFrom
from outrider.proto.errors import ConfigError, InvalidArgument, Unavailable
from outrider.proto.salts import salted
from outrider.proto.types import Sampling

VOCAB = 8192
TARGET = bigram_target(VOCAB, seed=5)


settings = partial(quick_settings, min_keys=1, publish_every=6)


@cache
def drawn(number: int) -> LessonRecord:
    return text_record(TARGET, vocab=VOCAB, seed=number, length=16, key=f"key-{number % 9}")


def texts(first: int, count: int) -> list[bytes]:
    return [replace(drawn(number), at_s=time.time()).encode() for number in range(first, first + count)]


def take_all(learner: Learner, records: list[bytes]) -> None:
    for data in records:
        learner.take(data)


def teach(learner: Learner, rounds: int, first: int = 0) -> None:
    for number in range(rounds):
        take_all(learner, texts(first + 4 * number, 4))
        assert learner.step(time.time())


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


# --- restarts ---


def in_trial(folder: Path) -> Learner:
    """Return a learner whose candidate has been judged on five texts, of which no checkpoint knows."""
    learner = Learner(settings(folder))
    teach(learner, 6)
    take_all(learner, texts(3000, 5))
    assert learner.judge.test.texts == 5
    return learner


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of such a learner."""
    folder = tmp_path_factory.mktemp("trial")
    in_trial(folder)
    return folder


@pytest.fixture
def learner(trial: Path, tmp_path: Path) -> Learner:
    """A learner that goes on with the trial in a folder of the test's own."""
    shutil.copytree(trial, tmp_path, dirs_exist_ok=True)
    return Learner(settings(tmp_path))


def test_a_trial_goes_on_after_a_restart_with_every_text_that_it_has_had(tmp_path: Path) -> None:
    learner = in_trial(tmp_path / "on")
    number, known = learner.judge.candidates, vars(learner.judge.test)
    candidate = learner._candidate
    shutil.copytree(tmp_path / "on", tmp_path / "again")
    again = Learner(settings(tmp_path / "again"))
    assert again.judge.test is not None
    assert (vars(again.judge.test), again.judge.candidates) == (known, number)
    assert again.judge.current.version == learner.judge.current.version
    take_all(again, texts(3000, 5) + texts(0, 4))
    assert again.judge.test.texts == 5, "it was judged on the ones, and the others were learned from"
    for data in texts(4000, 100):
        for each in (learner, again):
            each.take(data)
    assert learner.trainer.state.sequence == again.trainer.state.sequence == candidate.sequence
    assert learner.judge.candidates == again.judge.candidates
    assert again.judge.test is None
    # Both go back to the same from now on.
    for name, (_, b) in again.trainer._published.items():
        assert np.array_equal(b, learner.trainer._published[name][1])


def test_a_decided_trial_is_acted_on_after_a_restart_if_it_was_not_before(
    learner: Learner, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(learner, "_decide", lambda: None)
    take_all(learner, texts(4000, 100))
    again = Learner(settings(tmp_path))
    assert again.judge.test is None
    assert again.trainer.state.sequence == learner._candidate.sequence
    assert load_package(tmp_path / "drafters" / "general" / str(again.trainer.state.sequence))


def test_a_version_that_was_moved_when_the_trainer_died_counts_as_published(
    learner: Learner, tmp_path: Path, monkeypatch
) -> None:
    sequence = learner._candidate.sequence
    monkeypatch.setattr(learner.trainer, "save", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        take_all(learner, texts(4000, 100))
    assert [path.name for path in (tmp_path / "drafters" / "general").iterdir()] == [str(sequence)]
    for _ in range(2):  # the first of them writes a checkpoint
        again = Learner(settings(tmp_path))
        assert again.judge.test is None
        assert again.trainer.state.sequence == sequence
        assert again.trainer.state.counts["versions"] == 1
        assert again.judge.current.version == load_package(tmp_path / "drafters" / "general" / str(sequence)).version
    assert again.judge.candidates == 1


@pytest.mark.parametrize("lost", ["journal", "package", "other journal"])
def test_a_trial_without_its_journal_or_package_is_given_up_and_still_counts(
    learner: Learner, tmp_path: Path, lost: str
) -> None:
    if lost == "package":
        shutil.rmtree(tmp_path / "candidates")
    elif lost == "journal":
        (tmp_path / "trial.jsonl").unlink()
    else:
        TrialJournal(tmp_path / "trial.jsonl").begin(99)
    again = Learner(settings(tmp_path))
    assert again.judge.test is None
    assert again.trainer.state.counts["candidates dropped"] == 1
    assert again.judge.candidates == learner.judge.candidates == 1, "the next needs as much more evidence"
    teach(again, 7, first=7000)
    assert again.judge.test.number == 2


def test_a_checkpoint_cut_short_in_mid_trial_takes_no_half_of_it(learner: Learner, tmp_path: Path) -> None:
    (whole,) = tmp_path.glob("checkpoint-*")
    cut = tmp_path / "checkpoint-99999999"
    shutil.copytree(whole, cut)
    (cut / "tensors.safetensors").write_bytes((cut / "tensors.safetensors").read_bytes()[:-100])
    again = Learner(settings(tmp_path))
    assert vars(again.judge.test) == vars(learner.judge.test)
    shutil.rmtree(whole)
    fresh = Learner(settings(tmp_path))
    assert fresh.judge.test is None
    assert fresh.trainer.memory == JudgeMemory()


def test_what_is_kept_of_texts_is_hashes_and_numbers(trial: Path) -> None:
    _, *lines = (trial / "trial.jsonl").read_text().splitlines()
    for line in lines:
        difference, kind, key, names = json.loads(line)
        assert -1 <= difference <= 1
        assert kind == 0
        assert [len(each) for each in (key, *names)] == [32, 32, 32]


def test_a_candidate_has_its_parents_graph_so_that_a_token_is_the_same_work(tmp_path: Path) -> None:
    """So its time needs no test, which a busy machine's clock could turn either way."""

    def graph(drafter: OnnxDrafter) -> str:
        return next(file.sha256 for file in drafter.package.files if file.name == "model.onnx")

    learner = Learner(settings(tmp_path))
    teach(learner, 6)
    candidate = learner.judge._candidate
    assert candidate.package.adapter is not None
    assert graph(candidate) == graph(learner.judge.current)
    assert graph(candidate) != graph(OnnxDrafter(find_package("swift"))), "negative control"


# --- versions that a coordinator retires ---


def numbers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def two_versions(folder: Path) -> tuple[Learner, list[DrafterPackage]]:
    """Return a learner that has published two versions, and that tries a third."""
    learner = Learner(settings(folder))
    for number in (1, 2):
        trainer = learner.trainer
        matrices = {name: (a, b + 1e-3 * number) for name, (a, b) in trainer.published_matrices().items()}
        trainer.published_matrices = lambda matrices=matrices: matrices
        learner.newest = trainer.publish(trainer.write_candidate())
        learner.judge.compare_with(OnnxDrafter(learner.newest))
        del trainer.published_matrices
    teach(learner, 6)
    assert learner.judge.test is not None
    return learner, [load_package(folder / "drafters" / "general" / number) for number in ("1", "2")]


def test_training_goes_on_from_the_version_before_one_that_is_retired(tmp_path: Path) -> None:
    learner, (first, second) = two_versions(tmp_path)
    learner.retire([second.version, "another"])
    assert numbers(tmp_path / "drafters" / "general") == ["1"]
    assert (learner.newest.version, learner.judge.current.version) == (first.version, first.version)
    assert learner.judge.test is None, "what was compared with it is no longer tried"
    assert not numbers(tmp_path / "candidates")
    now = learner.trainer.drafter.matrices()
    assert all(np.allclose(a.T @ b.T, read[0].T @ read[1].T, atol=1e-5) for (a, b), read in pairs(now, first))
    again = Learner(settings(tmp_path))
    assert again.newest.version == first.version
    assert again.trainer.write_candidate().sequence > 2, "a number is never used twice"
    again.retire([first.version])
    assert again.newest.version == again.trainer.package.version
    assert not any(b.any() for _, b in again.trainer.drafter.matrices().values()), "as the parent has them"


def pairs(matrices: dict[str, Any], package: DrafterPackage) -> list[tuple[Any, Any]]:
    read = read_adapter(package)
    return [(matrices[name], read[name]) for name in read]


def test_an_older_version_that_is_retired_is_deleted_alone(tmp_path: Path) -> None:
    learner, (first, second) = two_versions(tmp_path)
    candidate = learner._candidate
    learner.retire([first.version])
    assert numbers(tmp_path / "drafters" / "general") == ["2"]
    assert (learner.newest.version, learner._candidate) == (second.version, candidate)
    assert learner.judge.test is not None


def test_without_a_coordinator_the_oldest_versions_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "MAX_VERSIONS", 1)
    two = Learner(settings(tmp_path)).trainer
    for _ in range(2):
        two.publish(two.write_candidate())
    assert numbers(tmp_path / "drafters" / "general") == ["2"]


def test_a_version_goes_as_a_whole_even_if_the_trainer_dies_meanwhile(tmp_path: Path, monkeypatch, caplog) -> None:
    folder = VersionFolder(tmp_path)
    for number in (1, 2):
        shutil.copytree(find_package("swift").folder, tmp_path / str(number))
    version = find_package("swift").version
    (tmp_path / "2" / "manifest.json").write_text("{")
    monkeypatch.setattr(shutil, "rmtree", lambda _: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        folder.retire([version])
    monkeypatch.undo()
    assert folder.numbers() == [2], "a catalogue sees all of it or nothing"
    assert "cannot be read" in caplog.text
    folder.finish_deleting()
    assert numbers(tmp_path) == ["2"]
    assert folder.retire([version]) == frozenset()

    def busy(path: Path) -> None:
        raise OSError(16, "busy", str(path))

    (tmp_path / ".2.deleted" / "graph").mkdir(parents=True)
    monkeypatch.setattr(shutil, "rmtree", busy)
    folder.keep_newest(0)
    assert folder.numbers() == [2]
    assert "stays" in caplog.text, "what is in its way could not be deleted"
    monkeypatch.undo()
    shutil.copytree(find_package("swift").folder, tmp_path / "3")
    folder.keep_newest(1)
    assert numbers(tmp_path) == ["3"]


# --- around it ---


def test_what_a_target_wrote_is_rehearsed_and_what_another_wrote_is_refused(tmp_path: Path) -> None:
    said = [torch.randint(VOCAB, (length,), dtype=torch.int32) for length in (12, 9, 20)]
    firsts, greedy = [4, 1, 5], torch.tensor([True, False, True])
    logp = [torch.randn(n, VOCAB).mul(4).log_softmax(-1) for n in (8, 8, 15)]
    folder = TeacherFolder(tmp_path / "says")
    folder.begin({"target": "reference"})
    for number, part in enumerate((slice(0, 2), slice(2, 3))):
        rows = TeacherRows.of(said[part], firsts[part], greedy[part])
        folder.add(number, rows, BestTokens.of(torch.cat(logp[part])))
    rehearsal = (folder.folder,)
    learner = Learner(settings(tmp_path / "a", rehearsal=rehearsal, rehearsed=1.0))
    assert learner.trainer.buffer.rehearsed_keys == {salted(b"", "rehearsal")}
    records = sorted(learner.trainer.buffer.draw(10**6, 0), key=lambda record: len(record.tokens))
    for record, index in zip(records, (1, 0, 2), strict=True):
        assert record.tokens.tolist() == said[index].tolist()
        assert record.positions.tolist() == list(range(firsts[index], len(said[index])))
        assert record.sampling.temperature == (0.0 if greedy[index] else 1.0)
        best = logp[index].topk(64)
        assert np.array_equal(record.top_ids, best.indices.numpy())
        assert np.allclose(np.exp(record.rest_logp), 1 - best.values.exp().sum(1).numpy(), atol=1e-2)
    assert learner.trainer.ready() is False, "nothing is new"
    of_tokens = rehearsed_records(settings(tmp_path / "b", rehearsal=rehearsal, loss="cce"))
    assert [len(record.tokens) for record in of_tokens] == [12, 20], "at T = 1 the noise is not known"
    folder.add(2, TeacherRows.of([said[0] + VOCAB], [4], greedy[:1]), BestTokens.of(logp[0]))
    with pytest.raises(InvalidArgument, match="beyond the vocabulary"):
        Learner(settings(tmp_path / "c", rehearsal=rehearsal))
    with pytest.raises(InvalidArgument, match="train teacher") as refused:
        Learner(settings(tmp_path / "d", rehearsal=(tmp_path / "nowhere",)))
    assert refused.value.field == "rehearsal"


@pytest.fixture
def actor(tmp_path: Path, monkeypatch):
    """Without Ray, in this process, which stays as eager as it was."""
    monkeypatch.setattr(os, "nice", lambda _: 0)
    monkeypatch.setattr(acting, "IDLE_S", 0.01)
    monkeypatch.setattr(cpu_share, "LOOK_S", 0.01)
    made = TrainerActor(settings(tmp_path, cpu_share=1.0))
    yield made
    made._stopped.set()
    made._thread.join()


def until(holds, seconds: float = 120.0) -> None:
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


def test_a_key_that_allows_learning_no_longer_teaches_nothing_old_or_new(actor, monkeypatch) -> None:
    monkeypatch.setattr(actor._learner.trainer, "ready", lambda: False)
    revoked, other = salted(b"", "key-0"), salted(b"", "key-1")
    actor.allow(frozenset({revoked, other}))
    actor.push(tuple(texts(0, 18)))
    until(lambda: actor.info()["waiting"] == 18 * 16)
    actor.allow(frozenset({other}))
    until(lambda: actor.info()["waiting"] == 16 * 16)
    actor.push(tuple(texts(18, 9)))
    until(lambda: actor.info()["counts"]["records"] == 27)
    assert actor.info()["waiting"] == (16 + 8) * 16, "keys that no coordinator has named teach on"
    assert actor.forget(revoked) == 0
    actor.allow(frozenset({revoked, other}))
    until(lambda: not actor._learner._revoked)
    actor.push(tuple(texts(27, 9)))
    until(lambda: actor.info()["counts"]["records"] == 36)
    assert actor.forget(revoked) == 16, "it allows learning again"


def test_a_text_is_dropped_after_a_day_though_no_step_is_made(actor, monkeypatch) -> None:
    monkeypatch.setattr(actor._gate, "opens", lambda: False)
    old = text_record(TARGET, vocab=VOCAB, seed=1, length=16, at_s=time.time() - 25 * 3600.0)
    actor.push((*texts(0, 1), old.encode()))
    until(lambda: actor.info()["counts"].get("records") == 2 and actor.info()["waiting"] == 16)


def test_an_actor_deletes_what_a_coordinator_retires_and_nothing_else(actor, tmp_path: Path) -> None:
    with actor._learning:
        trainer = actor._learner.trainer
        actor._learner.newest = published = trainer.publish(trainer.write_candidate())
    actor.retire(frozenset({("swift", published.version), ("general", "another")}))
    until(lambda: not actor._retired)
    with actor._learning:
        assert numbers(tmp_path / "drafters" / "general") == ["1"]
    actor.retire(frozenset({("general", published.version)}))
    until(lambda: actor.info()["version"] == actor._learner.trainer.package.version)
    assert not numbers(tmp_path / "drafters" / "general")


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


def test_a_folder_with_what_single_keys_have_taught_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own" / "5a5a").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"for single API keys, .* remove it") as refused:
        drafters_folder(settings(tmp_path))
    assert refused.value.field == "folder"


# === texts of which nothing but the tokens is known ==================================================================


def own(record: LessonRecord) -> LessonRecord:
    """The same text, as an edge knows it."""
    return record_of_text(
        record.tokens.tolist(),
        record.first_generated,
        record.sampling,
        model=record.model,
        session_salt=record.session_salt,
        key_salt=record.key_salt,
        at_s=record.at_s,
    )


def text(seed: int, **options: object) -> LessonRecord:
    return text_record(TARGET, vocab=VOCAB, seed=seed, length=16, **options)  # type: ignore[arg-type]


def test_a_record_of_tokens_alone_survives_its_encoding() -> None:
    record = LessonRecord.decode(own(text(1, temperature=1.0)).encode())
    assert record.top_ids.shape == (16, 0)
    assert record.positions.tolist() == list(range(4, 20))
    assert record.targets.tolist() == record.tokens[4:].tolist()
    long = record_of_text([1] * (MAX_ROWS + 100), 10, Sampling(), model="m", session_salt=bytes(16), key_salt=bytes(16))
    assert len(long) == MAX_ROWS


def test_a_loss_of_tokens_sees_the_same_with_the_targets_probabilities_and_without(tmp_path: Path) -> None:
    trainer = Trainer(settings(tmp_path, loss="cce"))
    records = [text(seed, temperature=float(seed % 2)) for seed in range(4)]
    mixed = [own(record) if index % 2 else record for index, record in enumerate(records)]
    values = []
    for batch in (records, [own(record) for record in records], mixed):
        rows = judged_rows(trainer.drafter, batch, trainer.loss)
        assert rows is not None
        values.append(float(trainer.loss.value(rows).detach()))
    assert values[0] == pytest.approx(values[1], rel=1e-6) == pytest.approx(values[2], rel=1e-6)
    for record in mixed:
        assert len(trainer.decode(record.encode())) == 16


@pytest.mark.parametrize("top", [0, 10])
def test_a_loss_of_probabilities_refuses_records_that_lack_some(tmp_path: Path, top: int) -> None:
    trainer = Trainer(settings(tmp_path))
    fewer = text(2, top=top) if top else own(text(2))
    with pytest.raises(InvalidArgument, match=rf"has {top} tokens a row") as refused:
        trainer.decode(fewer.encode())
    assert refused.value.field == "lessons.top_ids"
    for seed in range(4):  # mixed into a batch, it would end the trainer
        trainer.buffer.add(trainer.decode(text(seed).encode()))
    assert trainer.step() is not None


def test_one_key_may_fill_the_sample_where_there_is_no_other(tmp_path: Path) -> None:
    few, all_of_it = (
        Trainer(settings(tmp_path / str(share), key_share=share, loss="cce")).buffer for share in (0.05, 1.0)
    )
    for seed in range(400):
        record = replace(own(text(seed)), key_salt=bytes(16))
        for buffer in (few, all_of_it):
            buffer._into_sample(record)
    assert (len(few), len(all_of_it)) == (4992, 6400)


def test_tokens_and_seeds_alone_make_a_version_that_proves_better(tmp_path: Path) -> None:
    learner = Learner(settings(tmp_path, loss="cce", key_share=1.0))
    parent = learner.status()["version"]
    for step in range(40):
        for seed in range(4 * step, 4 * step + 4):
            learner.take(own(text(seed, temperature=float(seed % 2), key="me")).encode())
        learner.step(1e9)
        if learner.status()["version"] != parent:
            break
    status = learner.status()
    package = load_package(Path(status["folder"]))
    assert (package.version, package.parent) == (status["version"], parent)


def test_what_was_learned_from_another_parent_is_left_alone(tmp_path: Path) -> None:
    parent = find_package("general")
    head = {"model.lm_head.weight": (np.ones((2, 192), np.float32), np.zeros((8192, 2), np.float32))}
    learned = LearnedFrom(1, 1, {})
    older = tmp_path / "here" / "drafters" / "general" / "1"
    older.parent.mkdir(parents=True)
    newer = write_adapter_package(parent.folder, tmp_path / "newer", head, sequence=1, learned_from=learned)
    write_adapter_package(parent.folder, older, head, sequence=1, learned_from=LearnedFrom(2, 1, {}))
    learner = Learner(settings(tmp_path / "here", drafter=str(newer), loss="cce"))
    assert learner.newest.folder == newer
    candidate = learner.trainer.write_candidate()
    assert candidate.sequence == 2


# === a version is compared with its parent as long as it drafts ======================================================


HEAD = "model.lm_head.weight"


own_settings = partial(quick_settings, **OWN | {"rank": 8})


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
    bad = plant(Learner(own_settings(tmp_path)), 0.5)
    learner = Learner(own_settings(tmp_path))
    assert learner.status()["version"] == bad.version, "it drafts"
    learner.take(liked(parent, 0).encode())
    learner.trainer.save()
    learner = Learner(own_settings(tmp_path))
    count = taught(learner, parent, range(60))
    assert count is not None
    status = learner.status()
    assert (status["version"], status["folder"]) == (parent.version, str(find_package("general").folder))
    assert not bad.folder.exists()
    assert "against its parent" in caplog.text
    assert f"in {count} texts" in caplog.text, "that before the restart counts, and it counts once"
    assert Learner(own_settings(tmp_path)).status()["version"] == parent.version
    assert learner.trainer.write_candidate().sequence == bad.sequence + 1


def test_the_version_before_it_drafts_again_and_is_watched_in_its_turn(tmp_path: Path, parent) -> None:
    first = plant(Learner(own_settings(tmp_path)), 0.0)
    second = plant(Learner(own_settings(tmp_path)), 0.5)
    learner = Learner(own_settings(tmp_path))
    assert learner.newest.version == second.version
    assert taught(learner, parent, range(60)) is not None
    assert learner.newest.version == first.version
    learner.take(liked(parent, 100).encode())
    watch = learner.trainer.memory.watch
    assert (watch.version, watch.number, watch.loses.count) == (first.version, 2, 1)
    assert watch.difference == 0, "its change is none"


def test_a_trainer_beside_a_coordinator_leaves_that_to_it(tmp_path: Path, parent) -> None:
    bad = plant(Learner(own_settings(tmp_path)), 0.5)
    learner = Learner(own_settings(tmp_path, watched=False))
    assert taught(learner, parent, range(30)) is None
    assert (learner.newest.version, learner.trainer.memory.watch) == (bad.version, None)


def test_texts_that_were_learned_from_count_for_no_version(parent) -> None:
    record = liked(parent, 1)
    judge = ShadowJudge(OnnxDrafter(find_package("swift"), threads=1), parent=parent)
    for _ in range(2):
        judge.take(record)
    assert judge.memory.watch.loses.count == 1, "the first time it is fresh"
