"""Earlier answers on disk, as tokens, for drafts of later ones; only where a folder is given for them."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

MAX_BYTES = 1e6
_SUFFIX = ".tokens"
_TOKEN = np.dtype("<u4")


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
    limit_bytes: float = MAX_BYTES
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
