"""Texts that the edge has and drafts are copied from: files and folders, and earlier answers where they are kept."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from outrider.drafters.suffix_index import SuffixIndex
from outrider.edge.pool.kept_answers import KeptAnswers
from outrider.proto.errors import ConfigError, OutriderError

_PROBED_BYTES = 8192  # a file with a NUL among its first bytes is no text
FIELD = "draft_from"
MAX_BYTES = 8e6

log = logging.getLogger(__name__)

_Version = tuple[int, int]  # of a file: time of its change in ns, and bytes


@dataclass(slots=True)
class LocalFiles:
    """Tokens of the files that a user has named, each read once until it changes.

    Attributes:
        paths: files, and folders that are searched without hidden names and links.
        limit_bytes: limit of all text together.
    """

    paths: tuple[Path, ...]
    tokenizer: Tokenizer
    limit_bytes: float = MAX_BYTES
    _read: dict[Path, tuple[_Version, np.ndarray]] = field(default_factory=dict)

    def look(self) -> dict[Path, _Version]:
        """Return all files and their versions.

        Raises:
            ConfigError: one is missing or no file, or all are too large.
        """
        found: dict[Path, _Version] = {}
        for path in self.paths:
            given = path.expanduser()
            try:
                for each in _below(given) if given.is_dir() else (given,):
                    stat = each.stat()
                    found[each] = (stat.st_mtime_ns, stat.st_size)
                if not (given.is_dir() or given.is_file()):
                    raise ConfigError(f"{path} is neither a file nor a folder; leave it out", field=FIELD)
            except OSError as error:
                raise ConfigError(f"cannot read {path}: {error.strerror}", field=FIELD) from error
        total = sum(size for _, size in found.values())
        if total > self.limit_bytes:
            raise ConfigError(
                f"holds {total / 1e6:.1f} MB in {len(found)} files; name fewer: the limit is "
                f"{self.limit_bytes / 1e6:g}",
                field=FIELD,
            )
        return found

    def documents(self) -> list[np.ndarray]:
        """Return the tokens [m] of every file with text; folders may hold others.

        Raises:
            ConfigError: a file that was named itself cannot be read or is no text in UTF-8, or as in `look`.
        """
        read: dict[Path, tuple[_Version, np.ndarray]] = {}
        named = {path.expanduser() for path in self.paths}
        for path, version in self.look().items():
            before = self._read.get(path)
            if before is not None and before[0] == version:
                read[path] = before
                continue
            try:
                text = _text(path, int(self.limit_bytes))
            except ConfigError:
                if path in named:
                    raise
                continue
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
            read[path] = (version, np.array(ids, dtype=np.uint32))
        self._read = read
        return [tokens for _, tokens in read.values()]


def _below(folder: Path) -> Iterator[Path]:
    """Yield the regular files in a folder, in order, without hidden ones and without following links."""
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = (Path(root) / name for name in sorted(files) if not name.startswith("."))
        yield from (path for path in paths if path.is_file() and not path.is_symlink())


def _text(path: Path, limit_bytes: int) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(limit_bytes + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", field=FIELD) from error
    if b"\0" in content[:_PROBED_BYTES]:
        raise ConfigError(f"{path} is binary; name files of text", field=FIELD)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8; convert it, or leave it out", field=FIELD) from error


class LocalTexts:
    """Indices over local files and kept answers, refreshed by one thread; every method is for any thread."""

    def __init__(self, files: LocalFiles | None, answers: KeptAnswers | None) -> None:
        """Index nothing yet."""
        self._files = files
        self._answers = answers
        self._of_files: SuffixIndex | None = None
        self._of_answers: SuffixIndex | None = None
        self._seen: tuple[object, object] = (None, None)  # versions of both when they were indexed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outrider-local-texts")
        self._refreshing: Future[None] | None = None
        self._lock = threading.Lock()

    def load(self) -> None:
        """Index everything now.

        Raises:
            ConfigError: a file cannot be used; the message says which.
        """
        self._refresh()

    def sources(self) -> Sequence[SuffixIndex]:
        """Return the indices of now, files first."""
        return [index for index in (self._of_files, self._of_answers) if index is not None]

    def refresh(self) -> None:
        """Index in the background what has changed; return at once. What cannot be read now stays as it was."""
        with self._lock:
            if self._refreshing is None or self._refreshing.done():
                self._refreshing = self._thread.submit(self._try_refresh)

    def keep(self, tokens: Sequence[int]) -> None:
        """Keep an answer where answers are kept, in the background."""
        if self._answers is not None and tokens:
            self._thread.submit(self._try_keep, self._answers, tuple(tokens))

    def close(self) -> None:
        """Finish what is under way, and end the thread."""
        self._thread.shutdown()

    def _try_keep(self, answers: KeptAnswers, tokens: tuple[int, ...]) -> None:
        try:
            answers.keep(tokens)
        except OSError as error:
            log.warning("an answer is not kept: %s", error)

    def _try_refresh(self) -> None:
        try:
            self._refresh()
        except (OutriderError, OSError) as error:
            log.warning("drafting from local texts as they were: %s", error)

    def _refresh(self) -> None:
        began = time.monotonic()
        files, answers = self._seen
        if self._files is not None and (now := self._files.look()) != files:
            self._of_files = SuffixIndex(self._files.documents())
            files = now
        if self._answers is not None and (kept := self._answers.look()) != answers:
            self._of_answers = SuffixIndex(self._answers.documents())
            answers = kept
        if (files, answers) != self._seen:
            self._seen = files, answers
            tokens = sum(map(len, self.sources()))
            log.info("indexed %d local tokens in %.0f ms", tokens, 1e3 * (time.monotonic() - began))
