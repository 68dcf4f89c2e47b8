"""Texts that the edge has and drafts are copied from: files and folders, and earlier answers where they are kept."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from outrider.drafters.suffix_index import SuffixIndex
from outrider.proto.errors import ConfigError, OutriderError

_PROBED_BYTES = 8192  # a file with a NUL among its first bytes is no text
FIELD = "draft_from"
MAX_BYTES = 8e6
MAX_ANSWER_BYTES = 1e6
_SUFFIX = ".tokens"
_TOKEN = np.dtype("<u4")

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


@dataclass(slots=True)
class KeptAnswers:
    """A folder of answers, one file each, readable by its owner alone; the oldest give way to new ones.

    Attributes:
        folder: where they are; made when the first one is kept.
        tokenizer_sha256: hash of the tokenizer, whose answers have a folder of their own.
        vocab_size: number of its tokens; a file with others is ignored.
        limit_bytes: limit of all files of the tokenizer together.
    """

    folder: Path
    tokenizer_sha256: str
    vocab_size: int
    limit_bytes: float = MAX_ANSWER_BYTES
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def keep(self, tokens: tuple[int, ...]) -> None:
        """Write an answer; what is longer than the limit is kept in part, its end.

        Raises:
            OSError: it cannot be written.
        """
        content = np.array(tokens[-int(self.limit_bytes // _TOKEN.itemsize) :], dtype=_TOKEN).tobytes()
        own = self._own
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = f"{time.time_ns():020d}-{os.getpid()}-{next(self._numbers)}"
        part = own / f".{name}"
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        part.rename(own / (name + _SUFFIX))
        self._make_room()

    def look(self) -> tuple[str, ...]:
        """Return the names of the answers, the oldest first; an answer never changes."""
        return tuple(path.name for path in self._paths())

    def documents(self) -> list[np.ndarray]:
        """Return the tokens [m] of all answers, the oldest first; one that has gone or is damaged is left out."""
        read = (_tokens(path, int(self.limit_bytes)) for path in self._paths())
        return [tokens for tokens in read if len(tokens) and int(tokens.max()) < self.vocab_size]

    @property
    def _own(self) -> Path:
        return self.folder.expanduser() / self.tokenizer_sha256[:16]

    def _paths(self) -> list[Path]:
        return sorted(self._own.glob(f"*{_SUFFIX}"))  # by time

    def _make_room(self) -> None:
        kept = 0
        for path in reversed(self._paths()):
            try:
                kept += path.stat().st_size
            except FileNotFoundError:  # another process made room too
                continue
            if kept > self.limit_bytes:
                path.unlink(missing_ok=True)


def _tokens(path: Path, limit_bytes: int) -> np.ndarray:
    try:
        with path.open("rb") as file:
            content = file.read(limit_bytes)
    except OSError:
        content = b""
    return np.frombuffer(content[: len(content) // _TOKEN.itemsize * _TOKEN.itemsize], dtype=_TOKEN)


class LocalTexts:
    """Indices over local files and kept answers, refreshed by one thread; every method is for any thread."""

    def __init__(self, files: LocalFiles | None, answers: KeptAnswers | None) -> None:
        self._answers = answers
        self._kinds = [texts for texts in (files, answers) if texts is not None]
        self._read: dict[int, tuple[object, SuffixIndex]] = {}  # of each kind, its version and index
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outrider-local-texts")
        self._refreshing: Future[None] | None = None
        self._lock = threading.Lock()

    def load(self) -> None:
        """Index what has changed.

        Raises:
            ConfigError: a file cannot be used; the message says which.
        """
        began, read = time.monotonic(), dict(self._read)
        for number, texts in enumerate(self._kinds):
            version = texts.look()
            if number not in read or read[number][0] != version:
                read[number] = version, SuffixIndex(texts.documents())
        if read != self._read:
            self._read = read
            tokens = sum(map(len, self.sources()))
            log.info("indexed %d local tokens in %.0f ms", tokens, 1e3 * (time.monotonic() - began))

    def sources(self) -> Sequence[SuffixIndex]:
        """Return the indices of now, files first."""
        return [index for _, index in self._read.values()]

    def refresh(self) -> None:
        """Index in the background what has changed; return at once. What cannot be read now stays as it was."""
        with self._lock:
            if self._refreshing is None or self._refreshing.done():
                self._refreshing = self._submit(self.load, "drafting from local texts as they were")

    def keep(self, tokens: Sequence[int]) -> None:
        """Keep an answer where answers are kept, in the background."""
        if self._answers is not None and tokens:
            self._submit(partial(self._answers.keep, tuple(tokens)), "an answer is not kept")

    def close(self) -> None:
        """Finish what is under way, and end the thread."""
        self._thread.shutdown()

    def _submit(self, do: Callable[[], None], otherwise: str) -> Future[None]:
        def attempt() -> None:
            try:
                do()
            except (OutriderError, OSError) as error:
                log.warning("%s: %s", otherwise, error)

        return self._thread.submit(attempt)
