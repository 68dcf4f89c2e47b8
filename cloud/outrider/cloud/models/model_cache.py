"""Models that this machine has made or fetched, each in a folder of its own, whole or not at all.

<cache>/targets/<name>        a model as transformers loads it, with the hashes of its files
<cache>/targets/<name>.part   one that is being written, or was when its process was killed
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from outrider.proto.errors import DataLoss, Unavailable
from outrider.proto.plumbing.files import cache_folder, sha256_of

SUMS = "SHA256SUMS"  # in the form that `sha256sum --check` reads
_PART = ".part"


def cached(name: str) -> Path:
    """Return the folder of the model `name`, which may not be there yet."""
    return cache_folder().expanduser() / "targets" / name


def made_once(name: str, fill: Callable[[Path], None]) -> Path:
    """Return the folder of the model `name`, which `fill` writes into an empty one if it is not there yet.

    One process at a time writes into the cache; the others wait, and find what it has made.

    Raises:
        Unavailable: the cache cannot be written, or the disk is full.
        OutriderError: whatever `fill` raises; nothing of the model is left then.
    """
    folder = cached(name)
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # closing the file unlocks it, and so does the end of the process
            if not folder.is_dir():
                _make(folder, fill)
    except OSError as error:
        message = f"cannot make {folder}: {error}; make room, or it writable, or name another folder in XDG_CACHE_HOME"
        raise Unavailable(message, field="target", code="OUT-409") from error
    return folder


def _make(folder: Path, fill: Callable[[Path], None]) -> None:
    for stale in folder.parent.glob(f"*{_PART}"):  # of processes that were killed, since none else holds the lock
        shutil.rmtree(stale)
    part = folder.with_name(f"{folder.name}{_PART}")
    part.mkdir()
    try:
        fill(part)
        _write_sums(part)
        part.replace(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _write_sums(folder: Path) -> None:
    """Write the hashes of all files, and have the disk keep them before the folder has its name."""
    files = sorted(folder.iterdir())
    sums = folder / SUMS
    sums.write_text("".join(f"{sha256_of(file)}  {file.name}\n" for file in files), encoding="utf-8")
    for file in (*files, sums):
        with file.open("rb") as written:
            os.fsync(written.fileno())


def check_sums(folder: Path) -> None:
    """Raise `DataLoss` unless each file has the hash that it had when the folder was made."""
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
        damaged = [
            name for sha256, _, name in (line.partition("  ") for line in lines) if sha256_of(folder / name) != sha256
        ]
    except OSError as error:
        raise DataLoss(f"{folder} is not whole ({error}); copy it again", field="target") from error
    if damaged or not lines:
        raise DataLoss(f"{folder} is damaged ({', '.join(damaged) or SUMS}); copy it again", field="target")
