"""Values made from files that may change while a process runs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from outrider.proto.errors import ConfigError

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Watched(Generic[T]):
    """A value made from files, and made again when they change; safe for any thread.

    A new version that cannot be read leaves the old value in force, and is logged once.

    Attributes:
        value: newest value.

    Raises:
        ConfigError: the first version cannot be read.
    """

    def __init__(self, what: str, files: tuple[Path, ...], make: Callable[[], T]) -> None:
        self._what = what
        self._files = files
        self._make = make
        self._lock = threading.Lock()
        self._version = self._refused = _version(files)
        self.value = make()

    def if_changed(self) -> T | None:
        """Return the new value if the files have changed and can be read; else None."""
        with self._lock:
            version = _version(self._files)
            if version == self._version:
                return None
            try:
                self.value = self._make()
            except ConfigError as error:
                # The next call tries again: a key and its certificate, say, are replaced one after the other.
                if version != self._refused:
                    logger.warning("%s stay as they were: %s", self._what, error)
                self._refused = version
                return None
            self._version = version
            logger.info("%s read again: %s", self._what, ", ".join(map(str, self._files)))
            return self.value


def _version(files: tuple[Path, ...]) -> tuple[object, ...]:
    def of(path: Path) -> object:
        try:
            found = path.expanduser().stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    return tuple(of(path) for path in files)
