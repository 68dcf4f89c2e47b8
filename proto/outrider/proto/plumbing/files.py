"""Files: the folder of fetched ones, the hash by which one is known, and values made from ones that may change."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from outrider.proto.errors import ConfigError

DEFAULT_CACHE = Path("~/.cache/outrider")
logger = logging.getLogger(__name__)
T = TypeVar("T")


def cache_folder() -> Path:
    """Return the folder for what is fetched or made once, in XDG_CACHE_HOME if that is set; `~` may stand in it."""
    home = os.environ.get("XDG_CACHE_HOME")
    return Path(home) / "outrider" if home else DEFAULT_CACHE


def sha256_of(path: Path) -> str:
    """Return the hash of a file, in hexadecimal digits."""
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def read_text(path: Path, field: str, *, origin: str = "") -> str:
    """Return the text of the file that the option of `field` names; raises `ConfigError`.

    `origin` says in an error where such a file comes from.
    """
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}{origin}: {error.strerror}", field=field) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {path}{origin}: it is not UTF-8", field=field) from error


def read_key(path: Path, field: str) -> str:
    """Return the API key in the file that the option of `field` names; raises `ConfigError`."""
    text = read_text(path, field).strip()
    if not text:
        raise ConfigError(f"{path} is empty", field=field)
    if path.expanduser().stat().st_mode & stat.S_IROTH:
        logger.warning("everybody on this machine can read the API key in %s; run chmod 600 on it", path)
    return text


class Watched(Generic[T]):
    """A value made from files, and made again when they change; safe for any thread.

    A new version that cannot be read leaves the old value in `value`, its reason in `error`, and is logged once.

    Args:
        what: name of the value in the log.
        files: files that it is made from.
        make: reads them.
        otherwise: what becomes of the value while they cannot be read, for the log.

    Raises:
        ConfigError: the first version cannot be read.
    """

    def __init__(
        self, what: str, files: tuple[Path, ...], make: Callable[[], T], otherwise: str = "stay as they were"
    ) -> None:
        self._what = what
        self._otherwise = otherwise
        self._files = files
        self._make = make
        self._lock = threading.Lock()
        self._version = self._refused = _version(files)
        self.value = make()
        self.error: ConfigError | None = None

    def if_changed(self) -> T | None:
        """Return the new value if the files have changed and can be read; else None."""
        with self._lock:
            version = _version(self._files)
            if version == self._version:
                self.error = None
                return None
            try:
                self.value = self._make()
            except ConfigError as error:
                # The next call tries again: a key and its certificate, say, are replaced one after the other.
                if version != self._refused:
                    logger.warning("%s %s: %s", self._what, self._otherwise, error)
                self._refused, self.error = version, error
                return None
            self._version, self._refused, self.error = version, version, None
            logger.info("%s read again: %s", self._what, ", ".join(map(str, self._files)))
            return self.value


def _version(files: tuple[Path, ...]) -> tuple[object, ...]:
    def of(path: Path) -> object:
        try:
            found = path.expanduser().stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino

    return tuple(of(path) for path in files)
