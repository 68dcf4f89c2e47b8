"""Records of texts of which nothing but the tokens is known: who learns from them, and who refuses them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from lessons_for_tests import bigram_target, quick_settings, text_record

from outrider.cloud.learning.learner import Learner
from outrider.cloud.learning.lesson_record import MAX_ROWS, LessonRecord, record_of_text
from outrider.cloud.learning.losses import judged_rows
from outrider.cloud.learning.trainer import Trainer
from outrider.drafters.adapters import write_adapter_package
from outrider.drafters.packages import find_package, load_package
from outrider.proto.drafter_format import LearnedFrom
from outrider.proto.errors import InvalidArgument
from outrider.proto.types import Sampling

VOCAB = 8192
TARGET = bigram_target(VOCAB, seed=5)


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


settings = partial(quick_settings, min_keys=1, publish_every=6)


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
