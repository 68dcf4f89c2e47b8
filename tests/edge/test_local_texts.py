"""Files and kept answers as sources of drafts: what is read, when, within which bounds, and how errors name it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from outrider.edge.local_texts import KeptAnswers, LocalFiles, LocalTexts
from outrider.proto.errors import ConfigError


@pytest.fixture(scope="module")
def tokenizer(tokenizer_file) -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer_file))


def files_of(tokenizer: Tokenizer, *paths: Path, limit_bytes: float = 1e6) -> LocalFiles:
    return LocalFiles(paths, tokenizer, limit_bytes)


def texts_in(tokenizer: Tokenizer, files: LocalFiles) -> list[str]:
    return [tokenizer.decode(document.tolist()) for document in files.documents()]


def test_a_folder_gives_its_texts_without_hidden_binary_and_linked_ones(tokenizer, tmp_path) -> None:
    for name, content in (
        ("b.py", b"second"),
        ("a.txt", b"first"),
        ("c.bin", b"\0\1"),
        ("d.txt", b"\xff"),
        (".e", b"x"),
    ):
        (tmp_path / name).write_bytes(content)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "f.md").write_text("third")
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    assert texts_in(tokenizer, files_of(tokenizer, tmp_path)) == ["first", "second", "third"]


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "No such file"), (b"a\0b", "is binary"), (b"\xff\xfe", "is not UTF-8")]
)
def test_a_file_that_was_named_is_refused_by_name(tokenizer, tmp_path, content, reason) -> None:
    path = tmp_path / "named"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=reason) as caught:
        files_of(tokenizer, path).documents()
    assert caught.value.field == "draft_from"
    assert str(path) in str(caught.value)


def test_a_pipe_is_refused_without_being_read(tokenizer, tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="neither a file nor a folder"):
        files_of(tokenizer, tmp_path / "pipe").documents()
    assert files_of(tokenizer, tmp_path).documents() == []


def test_more_text_than_the_limit_is_refused(tokenizer, tmp_path) -> None:
    (tmp_path / "a").write_text("x" * 600)
    (tmp_path / "b").write_text("x" * 600)
    with pytest.raises(ConfigError, match="name fewer"):
        files_of(tokenizer, tmp_path, limit_bytes=1000).documents()


def test_an_index_stays_as_it_was_where_files_go_away(tokenizer, tmp_path) -> None:
    path = tmp_path / "a"
    path.write_text("some words that stay")
    texts = LocalTexts(files_of(tokenizer, path), None)
    texts.load()
    (index,) = texts.sources()
    path.unlink()
    texts.refresh()
    texts.close()  # waits for it
    assert texts.sources() == [index]


def test_an_unchanged_file_is_not_indexed_again(tokenizer, tmp_path) -> None:
    path = tmp_path / "a"
    path.write_text("some words")
    texts = LocalTexts(files_of(tokenizer, path), None)
    texts.load()
    (index,) = texts.sources()
    texts.load()
    assert texts.sources() == [index]
    path.write_text("other words")
    texts.load()
    assert texts.sources() != [index]
    texts.close()


def answers_in(folder: Path, limit_bytes: float = 1000, sha256: str = "a" * 64) -> KeptAnswers:
    return KeptAnswers(folder, sha256, 100, limit_bytes)


def test_answers_are_kept_for_their_owner_alone_and_read_in_order(tmp_path) -> None:
    answers = answers_in(tmp_path / "kept")
    answers.keep((1, 2, 3))
    answers.keep((4, 5))
    assert [document.tolist() for document in answers.documents()] == [[1, 2, 3], [4, 5]]
    for path in (tmp_path / "kept").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_the_oldest_answers_give_way_to_new_ones(tmp_path) -> None:
    answers = answers_in(tmp_path, limit_bytes=100)
    for token in range(10):
        answers.keep((token,) * 10)
    assert [document[0] for document in answers.documents()] == [8, 9]
    answers.keep(tuple(range(60)))
    assert [document.tolist() for document in answers.documents()] == [list(range(35, 60))]


def test_damaged_and_foreign_answers_are_left_out(tmp_path) -> None:
    answers = answers_in(tmp_path)
    answers.keep((7,))
    own = next(tmp_path.iterdir())
    (own / "1.tokens").write_bytes(np.array([5, 100], dtype="<u4").tobytes())  # a token that nobody has
    (own / "2.tokens").write_bytes(b"\1\0\0")
    answers_in(tmp_path, sha256="b" * 64).keep((8,))
    assert [document.tolist() for document in answers.documents()] == [[7]]


def test_answers_that_come_while_the_process_runs_are_copied_from_too(tmp_path) -> None:
    texts = LocalTexts(None, answers_in(tmp_path))
    texts.load()
    assert sum(map(len, texts.sources())) == 0
    texts.keep([1, 2, 3])
    texts.refresh()
    texts.close()
    assert sum(map(len, texts.sources())) == 4


def test_an_answer_that_cannot_be_written_costs_nothing_but_a_warning(tmp_path, caplog) -> None:
    (tmp_path / "kept").write_text("a file where the folder should be")
    texts = LocalTexts(None, answers_in(tmp_path / "kept"))
    texts.keep([1, 2, 3])
    texts.close()
    assert "an answer is not kept" in caplog.text
