"""The trainer's core: it learns, goes on after a crash with the same bits, and survives what is not finite."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from lessons_for_tests import bigram_target, text_record
from lessons_for_tests import quick_settings as settings
from random_models import BYTE_LLAMA, save_with_byte_tokenizer

from outrider.cloud.export import export_drafter
from outrider.cloud.learning import trainer as training
from outrider.cloud.learning.cpu_share import CpuShare
from outrider.cloud.learning.lesson_record import LessonRecord
from outrider.cloud.learning.losses import LOSSES, judged_rows
from outrider.cloud.learning.trainer import Trainer
from outrider.cloud.models.heads import reduce_vocabulary
from outrider.cloud.testing import tiny_llama
from outrider.drafters.packages import embedded_packages, find_package, load_package
from outrider.proto.errors import InvalidArgument

VOCAB = 8192
TARGET = bigram_target(VOCAB, seed=5)


def records(first: int, count: int, **kind: object) -> list[LessonRecord]:
    return [text_record(TARGET, vocab=VOCAB, seed=number, length=16, **kind) for number in range(first, first + count)]


def feed(trainer: Trainer, count: int = 6, first: int = 0, **kind: object) -> None:
    for record in records(first, count, key=f"key-{first}", **kind):
        trainer.buffer.add(trainer.decode(replace(record, model=trainer.package.target).encode()))


def teach(trainer: Trainer, steps: int) -> Trainer:
    for number in range(steps):
        feed(trainer, first=10 * number)
        trainer.step()
    return trainer


def publish(trainer: Trainer) -> Path:
    candidate = trainer.write_candidate()
    assert candidate is not None
    return trainer.publish(candidate).folder


def weights(trainer: Trainer) -> list[np.ndarray]:
    return [array for pair in trainer.drafter.matrices().values() for array in pair]


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def hits(trainer: Trainer, fresh: list[LessonRecord]) -> float:
    """Share of fresh positions where the drafter's own proposal is the target's token."""
    with torch.no_grad():
        rows = judged_rows(trainer.drafter, fresh, LOSSES["cce"])
    return float(((rows.log_q + rows.noise).argmax(1) == rows.committed).float().mean())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_trainer_learns_to_propose_what_the_target_says(tmp_path: Path, temperature: float) -> None:
    trainer = Trainer(settings(tmp_path))
    fresh = records(1000, 6, temperature=temperature)
    before = hits(trainer, fresh)
    losses = []
    for number in range(14):
        feed(trainer, first=10 * number, temperature=temperature)
        assert trainer.ready()
        losses.append(trainer.step())
    assert losses[-1] < 0.5 * losses[0]
    assert hits(trainer, fresh) > before + 0.15


def test_a_killed_trainer_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """The buffer is in memory alone and is lost, so both see the same new records after the checkpoint."""
    results = []
    for killed in (False, True):
        folder = tmp_path / str(killed)
        trainer = Trainer(settings(folder, loss="cce"))
        teach(trainer, 3)
        trainer.save()
        if killed:
            del trainer
            trainer = Trainer(settings(folder, loss="cce"))
            assert trainer.state.step == 3
        else:
            trainer.buffer = type(trainer.buffer)()
        feed(trainer, first=100)
        trainer.step()
        results.append((weights(trainer), trainer.published_matrices()))
    assert same(results[0][0], results[1][0])
    for name, pair in results[0][1].items():
        assert same(list(pair), list(results[1][1][name]))


def test_a_checkpoint_that_was_cut_short_is_passed_over(tmp_path: Path) -> None:
    trainer = teach(Trainer(settings(tmp_path)), 1)
    whole = trainer.save()
    saved = weights(trainer)
    cut = tmp_path / "checkpoint-00000009"
    shutil.copytree(whole, cut)
    content = (cut / "tensors.safetensors").read_bytes()
    (cut / "tensors.safetensors").write_bytes(content[: len(content) // 2])
    (tmp_path / ".unfinished-checkpoint").mkdir()
    again = Trainer(settings(tmp_path))
    assert again.state.step == 1
    assert same(weights(again), saved)
    feed(again)
    again.step()
    again.save()
    assert [path.name for path in tmp_path.glob("*checkpoint*")] == ["checkpoint-00000002"]


def test_a_checkpoint_of_another_drafter_or_loss_is_left_alone(tmp_path: Path) -> None:
    trainer = teach(Trainer(settings(tmp_path)), 1)
    trainer.save()
    assert Trainer(settings(tmp_path)).state.step == 1
    for changed in (settings(tmp_path, loss="cce"), settings(tmp_path, rank=3), settings(tmp_path, drafter="code")):
        assert Trainer(changed).state.step == 0


def test_a_loss_that_is_not_finite_changes_nothing_and_three_go_back(tmp_path: Path, monkeypatch) -> None:
    trainer = teach(Trainer(settings(tmp_path)), 1)
    folder = publish(trainer)
    published = trainer._published
    feed(trainer, first=20)
    trainer.step()
    good = weights(trainer)

    def broken(*arguments: object) -> object:
        rows = judged_rows(*arguments)
        return replace(rows, log_q=rows.log_q * math.nan)

    monkeypatch.setattr(training, "judged_rows", broken)
    for number in range(2):
        feed(trainer, first=40 + number)
        assert trainer.step() is None
        assert same(weights(trainer), good)
    feed(trainer, first=60)
    assert trainer.step() is None
    assert trainer.state.counts["steps skipped"] == 3
    assert trainer.state.counts["resets"] == 1
    assert same(weights(trainer), [array for pair in published.values() for array in pair])
    monkeypatch.undo()
    feed(trainer, first=80)
    assert trainer.step() is not None
    assert load_package(folder).parent == find_package("general").version


def test_a_gradient_that_is_not_finite_is_skipped_though_the_loss_is(tmp_path: Path) -> None:
    trainer = Trainer(settings(tmp_path))
    feed(trainer)
    before = weights(trainer)
    trainer.drafter.learned()[1].register_hook(lambda gradient: gradient * math.inf)
    assert trainer.step() is None
    assert same(weights(trainer), before)
    assert all(np.isfinite(array).all() for array in weights(trainer))


def test_an_update_is_published_as_an_adapter_of_its_parent(tmp_path: Path) -> None:
    trainer = Trainer(settings(tmp_path))
    teach(trainer, 2)
    package = load_package(publish(trainer))
    parent = find_package("general")
    assert package.folder == tmp_path / "drafters" / "general" / str(parent.sequence + 1)
    assert (package.name, package.parent, package.adapter.rank) == ("general", parent.version, 2)
    assert package.learned_from.keys == 2
    assert package.learned_from.positions == package.learned_from.classes["0"] >= 2 * 96
    assert load_package(publish(trainer)).sequence == package.sequence + 1
    assert Trainer(settings(tmp_path)).state.sequence == package.sequence + 1


def test_a_trainer_that_died_while_publishing_leaves_nothing_and_goes_on(tmp_path: Path) -> None:
    trainer = teach(Trainer(settings(tmp_path)), 1)
    home = tmp_path / "drafters" / "general"
    left = tmp_path / "candidates" / ".1.abcdef"
    left.mkdir(parents=True)
    (left / "manifest.json").write_text("{")
    folder = publish(trainer)
    assert not list((tmp_path / "candidates").iterdir())
    assert [path.name for path in home.iterdir()] == [folder.name]
    # It died after the package's renaming, before its checkpoint: the number is taken, and the next is free.
    for path in tmp_path.glob("checkpoint-*"):
        shutil.rmtree(path)
    assert int(publish(Trainer(settings(tmp_path))).name) == int(folder.name) + 1


@pytest.mark.parametrize("broken", [math.nan, math.inf, 1e3])
def test_weights_that_are_huge_or_no_numbers_are_never_published(tmp_path: Path, broken: float) -> None:
    trainer = teach(Trainer(settings(tmp_path)), 1)
    publish(trainer)
    good = trainer._published
    trainer._averages[1].fill_(broken)
    assert trainer.write_candidate() is None
    assert trainer.state.counts["versions refused"] == 1
    assert len(list((tmp_path / "drafters" / "general").iterdir())) == 1
    assert same(weights(trainer), [array for pair in good.values() for array in pair])


def test_what_is_published_is_the_average_of_the_weights(tmp_path: Path) -> None:
    trainer = Trainer(settings(tmp_path))
    seen = []
    for number in range(4):
        feed(trainer, first=10 * number)
        trainer.step()
        seen.append(weights(trainer)[-1])
    expected = np.zeros_like(seen[0])
    for number, each in enumerate(seen, start=1):
        kept = number / (number + 9)
        expected = kept * expected + (1 - kept) * each
    assert np.allclose(list(trainer.published_matrices().values())[-1][1], expected, atol=1e-6)


def test_records_of_another_target_or_tokenizer_and_garbage_are_refused_and_counted(tmp_path: Path) -> None:
    trainer = Trainer(settings(tmp_path))
    foreign = text_record(TARGET, vocab=VOCAB, model="another")
    wide = bigram_target(VOCAB + 8, seed=1)
    beyond = text_record(lambda tokens: np.roll(wide(tokens), 8190), vocab=VOCAB + 8)
    for data, field in ((foreign.encode(), "model"), (beyond.encode(), "to"), (b"garbage", "lessons")):
        with pytest.raises(InvalidArgument) as caught:
            trainer.decode(data)
        assert field in caught.value.field
    assert trainer.state.counts == {"records refused": 3}
    assert len(trainer.buffer) == 0
    (record,) = records(0, 1)
    for known in ("", trainer.package.tokenizer_sha256):
        trainer.decode(replace(record, tokenizer_sha256=known).encode())
    with pytest.raises(InvalidArgument, match=r"'general', which drafts by text.*--learn-drafter") as caught:
        trainer.decode(replace(record, tokenizer_sha256="ab" * 32).encode())
    assert caught.value.field == "lessons.tokenizer_sha256"
    assert trainer.state.counts == {"records": 2, "records refused": 4}


def test_the_parent_reads_the_same_rows_and_does_not_learn(tmp_path: Path) -> None:
    trainer = Trainer(settings(tmp_path, loss="kl-tail"))
    batch = records(0, 3)
    first = judged_rows(trainer.drafter, batch, trainer.loss)
    assert torch.equal(first.log_parent, first.log_q.detach())
    feed(trainer)
    trainer.step()
    rows = judged_rows(trainer.drafter, batch, trainer.loss)
    assert torch.equal(rows.log_parent, first.log_parent)
    assert not rows.log_parent.requires_grad
    assert rows.log_q.requires_grad
    assert not torch.allclose(rows.log_q, rows.log_parent)


def test_a_package_with_an_adapter_is_trained_on_from_it(tmp_path: Path) -> None:
    trainer = Trainer(settings(tmp_path / "one"))
    teach(trainer, 2)
    folder = publish(trainer)
    later = Trainer(settings(tmp_path / "two", drafter=str(folder), rank=1))
    rounded = {name: b.astype(np.float16) for name, (_, b) in trainer.published_matrices().items()}
    assert all(np.allclose(later.drafter.matrices()[name][1], b) for name, b in rounded.items())
    feed(later)
    later.step()
    assert load_package(publish(later)).sequence == 2


def test_a_drafter_that_knows_a_part_of_the_vocabulary_learns_and_is_published(tmp_path: Path) -> None:
    model = tiny_llama(seed=0, **BYTE_LLAMA | {"vocab_size": VOCAB}, tie_word_embeddings=True)
    reduce_vocabulary(model, torch.arange(200))
    source = save_with_byte_tokenizer(model, tmp_path / "source")
    export_drafter(source, tmp_path / "package", name="small", target_id="reference")
    trainer = Trainer(settings(tmp_path / "state", drafter=str(tmp_path / "package")))
    fresh = records(1000, 6)
    before = hits(trainer, fresh)
    teach(trainer, 12)
    assert hits(trainer, fresh) > before + 0.15
    assert load_package(publish(trainer)).parent == trainer.package.version


@pytest.mark.parametrize("name", embedded_packages())
def test_every_embedded_drafter_can_be_trained_on(tmp_path: Path, name: str) -> None:
    trainer = Trainer(settings(tmp_path, drafter=name))
    feed(trainer)
    assert trainer.step() is not None
    assert load_package(publish(trainer)).name == name


def test_the_share_of_a_core_is_kept_and_an_idle_trainer_may_catch_up() -> None:
    now = used = 0.0
    share = CpuShare(0.25, lambda: now, lambda: used, burst_s=2.0)
    for _ in range(200):
        now += max(share.wait_s(), 0.0)
        share.wait_s()
        used += 1.0
        now += 1.0
    assert used / now == pytest.approx(0.25, rel=0.05)
    assert share.lately == pytest.approx(0.25, rel=0.2)
    share.wait_s()
    now += 1e6
    assert share.wait_s() == 0
    assert share.lately == pytest.approx(0, abs=1e-3)
    used += 1.5
    assert share.wait_s() == 0  # of the two seconds that it had saved
    used += 1.0
    assert share.wait_s() == pytest.approx(2.0)


def test_the_state_of_a_checkpoint_is_plain_json_without_keys_or_texts(tmp_path: Path) -> None:
    trainer = teach(Trainer(settings(tmp_path)), 1)
    state = json.loads((trainer.save() / "state.json").read_text())
    assert state["step"] == 1
    assert state["counts"]["records"] == 6
    assert [len(key) for key in state["keys"]] == [32]  # a salted hash
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"state.json", "tensors.safetensors"}


def test_a_version_may_spread_once_enough_keys_taught_it(tmp_path: Path) -> None:
    trainer = Trainer(settings(tmp_path, min_keys=3))
    assert not trainer.may_spread()
    for number in range(3):
        assert not trainer.may_spread()
        feed(trainer, first=10 * number)
        trainer.step()
    assert trainer.may_spread()
    trainer.state.keys["flood"] = 100_000  # the others are below a fiftieth now
    assert not trainer.may_spread()
    trainer.settings = settings(tmp_path, min_keys=1)
    assert trainer.may_spread()


def test_rehearsal_teaches_and_counts_for_no_key(tmp_path: Path) -> None:
    trainer = teach(Trainer(settings(tmp_path), records(500, 4, key="corpus")), 1)
    assert len(trainer.state.keys) == 1
    assert trainer.state.positions > trainer.state.keys.total()
