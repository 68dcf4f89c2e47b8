"""Files that the coordinator serves, kept on disk under the hash that was promised for them.

    <root>/drafters/<name>/<version>/   a drafter package, as `load_package` reads it
    <root>/files/<sha256>/<name>        a single file, such as a target's tokenizer
    <root>/content/<sha256>             a second name of every file above

Content that is here already, under another version or in the wheel, is linked and not fetched again.

A file arrives as `<name>.<hash>.part`, which an interrupted download leaves behind for the next to go on with, and
takes its name only once its hash is right. What lies here is checked again at every use.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.drafters.packages import DrafterPackage, check_file, embedded_file, load_package, read_manifest
from outrider.proto.drafter_format import MANIFEST
from outrider.proto.errors import DataLoss, InvalidArgument, ModelRefused, Unavailable
from outrider.proto.types import DrafterManifest, RemoteFile

MAX_FILE_BYTES = 16 << 30
SPARE_BYTES = 64 << 20  # that a download leaves on the disk

Fetch = Callable[[RemoteFile, int], Iterator[bytes]]
"""Called with a file and the bytes to skip; yields the rest of its content piece by piece."""


class DrafterCache:
    """The downloads of one machine. Several processes may share a root."""

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser()

    def ensure(self, manifest: DrafterManifest, fetch: Fetch) -> DrafterPackage:
        """Return the drafter of that manifest, fetched as far as it is not here yet.

        Raises:
            InvalidArgument: the manifest does not list `manifest.json`, or lists a name twice.
            ModelRefused: a file is promised to be larger than any may be.
            Unavailable: the root cannot be used, or has no room.
            DataLoss: what came is not what was promised.
            OutriderError: whatever `fetch` raises; the next call goes on where this one stopped.
        """
        return _as_promised(load_package(self._fetched(manifest, manifest.files, fetch)), manifest)

    def look(self, manifest: DrafterManifest, fetch: Fetch) -> DrafterPackage:
        """Return the drafter like `ensure`, but fetch no more than `manifest.json`."""
        files = tuple(file for file in manifest.files if file.name == MANIFEST)
        return _as_promised(read_manifest(self._fetched(manifest, files, fetch)), manifest)

    def _fetched(self, manifest: DrafterManifest, files: tuple[RemoteFile, ...], fetch: Fetch) -> Path:
        """Return the drafter's folder with these `files`."""
        names = [file.name for file in manifest.files]
        if MANIFEST not in names or len(set(names)) != len(names):
            raise InvalidArgument(f"must list {MANIFEST}, and no name twice", field="drafter.files")
        folder = self.root / "drafters" / manifest.name / manifest.version
        with self._usable(), _locked(folder):
            for file in files:
                self._ensure_file(folder, file, fetch)
        return folder

    def ensure_file(self, file: RemoteFile, fetch: Fetch) -> Path:
        """Return the path of that file, fetched unless it is here already; raises like `ensure`."""
        folder = self.root / "files" / file.sha256
        with self._usable(), _locked(folder):
            return self._ensure_file(folder, file, fetch)

    @contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise Unavailable(
                f"cannot use {self.root}: {reason}; give another folder with --cache", field="cache"
            ) from error

    def _ensure_file(self, folder: Path, file: RemoteFile, fetch: Fetch) -> Path:
        path, content = folder / file.name, self.root / "content" / file.sha256
        if _is_whole(path, file):
            return path
        for known in (content, embedded_file(file.sha256)):
            if known is not None and _is_whole(known, file) and _is_whole(_link(known, path), file):
                return path
        _fetch_whole(path, file, fetch)
        content.parent.mkdir(exist_ok=True)
        _link(path, content)
        return path


def _as_promised(package: DrafterPackage, manifest: DrafterManifest) -> DrafterPackage:
    for field_name in ("name", "version", "tokenizer_sha256", "target"):
        inside, promised = getattr(package, field_name), getattr(manifest, field_name)
        if inside != promised:
            raise DataLoss(f"{MANIFEST} says {inside!r} where the coordinator said {promised!r}", field=field_name)
    return package


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Make the folder and keep other processes from downloading into it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # closing the file unlocks it
        yield


def _fetch_whole(path: Path, file: RemoteFile, fetch: Fetch) -> None:
    partial = path.with_name(f"{file.name}.{file.sha256[:16]}.part")
    resumed = partial.exists()
    _check_size(path.parent, file, partial.stat().st_size if resumed else 0)
    _download(partial, file, fetch)
    if resumed and not _is_whole(partial, file):  # the old beginning may be at fault: once more from nothing
        partial.unlink()
        _download(partial, file, fetch)
    try:
        check_file(partial, file)
    except DataLoss:
        partial.unlink()
        raise
    partial.replace(path)


def _check_size(folder: Path, file: RemoteFile, have: int) -> None:
    if file.bytes > MAX_FILE_BYTES:
        raise ModelRefused(f"{file.name} has {file.bytes} bytes; {MAX_FILE_BYTES} at most are fetched", field="file")
    free = shutil.disk_usage(folder).free
    if file.bytes - have + SPARE_BYTES > free:
        raise Unavailable(
            f"{folder} has {free} bytes free, and {file.name} needs {file.bytes - have}; "
            "make room, or give another folder with --cache",
            field="cache",
        )


def _link(known: Path, path: Path) -> Path:
    """Give a file one more name, in the place of what has it now; a copy where the system links none."""
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}.link")
    try:
        os.link(known, unfinished)
    except OSError:
        shutil.copyfile(known, unfinished)
    return unfinished.replace(path)


def _download(partial: Path, file: RemoteFile, fetch: Fetch) -> None:
    """Append the rest of `file` to `partial`, never more than one piece beyond what was promised."""
    with partial.open("ab") as content:
        have = content.tell()
        if have >= file.bytes:
            return
        for piece in fetch(file, have):
            content.write(piece)
            have += len(piece)
            if have > file.bytes:
                return  # the check that follows refuses it


def _is_whole(path: Path, file: RemoteFile) -> bool:
    try:
        check_file(path, file)
    except DataLoss:
        return False
    return True
