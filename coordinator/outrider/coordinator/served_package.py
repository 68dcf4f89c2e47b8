"""A drafter package: a folder with `manifest.json` and the files that it lists, each checked by its hash."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from outrider.proto.drafter_format import ADAPTER, MANIFEST, MODEL, STEERING_GRAPH, described
from outrider.proto.errors import ConfigError, DataLoss, InvalidArgument, ModelRefused
from outrider.proto.tokenizer import TOKENIZER_FILE, shipped_tokenizer
from outrider.proto.types import DrafterManifest, RemoteFile

MAX_MANIFEST_BYTES = 1 << 20

Stamp = tuple[int, int, int, int]


def stamp(status: os.stat_result) -> Stamp:
    """Return size, times of change in ns and inode, which change when a file is written to or replaced.

    Writes within one tick of the file system's clock (ms) can go unseen; an edge checks the hash of what it fetches.
    """
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


@dataclass(frozen=True, slots=True)
class StoredContent:
    """A file that had the right hash when it had this stamp."""

    path: Path
    stamp: Stamp

    @property
    def size(self) -> int:
        """Length in bytes."""
        return self.stamp[0]

    def open(self) -> BinaryIO:
        """Return a fresh reader at the start; raises `DataLoss` if the file was touched since it was checked."""
        try:
            reader = self.path.open("rb")
        except OSError as error:
            raise DataLoss(f"{self.path.name} can no longer be read; list the drafters again") from error
        if stamp(os.fstat(reader.fileno())) != self.stamp:
            reader.close()
            raise DataLoss(f"{self.path.name} changed since it was checked; list the drafters again")
        return reader


@dataclass(frozen=True, slots=True)
class MemoryContent:
    """Bytes in memory."""

    data: bytes

    @property
    def size(self) -> int:
        """Length in bytes."""
        return len(self.data)

    def open(self) -> BinaryIO:
        """Return a fresh reader at the start."""
        return BytesIO(self.data)


Content = StoredContent | MemoryContent


@dataclass(frozen=True, slots=True)
class Package:
    """A checked drafter package.

    Attributes:
        manifest: its identity and files.
        content_by_sha256: its files by their hashes.
        sequence: place among the versions of its name, the newest highest; 0 where its manifest has none.
        parent: version that it was trained on from; empty: none.
    """

    manifest: DrafterManifest
    content_by_sha256: Mapping[str, StoredContent]
    sequence: int = 0
    parent: str = ""


def load_package(folder: Path) -> Package:
    """Read and check the package in `folder`.

    Raises:
        ConfigError: the manifest cannot be read or is invalid; `field` names the file.
        DataLoss: a file is missing or differs from the manifest; `field` names the file.
    """
    manifest_path = folder / MANIFEST
    raw, manifest_stamp = _read_manifest(manifest_path)
    where = f"{folder.name}/{MANIFEST}"
    itself = RemoteFile(MANIFEST, hashlib.sha256(raw).hexdigest(), len(raw))
    try:
        drafter = described(raw)
    except (InvalidArgument, ModelRefused) as error:
        raise ConfigError(str(error), field=where) from error
    manifest = DrafterManifest(
        drafter.name, drafter.version, drafter.tokenizer_sha256, drafter.target, (itself, *drafter.files)
    )
    contents = {itself.sha256: StoredContent(manifest_path, manifest_stamp)}
    for file in drafter.files:
        contents[file.sha256] = _content_of(file, folder, manifest)
    return Package(manifest, contents, drafter.sequence, drafter.parent)


def _read_manifest(path: Path) -> tuple[bytes, Stamp]:
    try:
        with path.open("rb") as reader:
            before = stamp(os.fstat(reader.fileno()))
            raw = reader.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", field=f"{path.parent.name}/{MANIFEST}") from error
    if len(raw) > MAX_MANIFEST_BYTES:
        raise ConfigError(f"exceeds {MAX_MANIFEST_BYTES} bytes", field=f"{path.parent.name}/{MANIFEST}")
    return raw, before


def graphs_beside(folder: Path) -> tuple[Path, ...]:
    """Return the graphs of packages beside `folder` that may be its own, where it has an adapter and no graph."""
    if not (folder / ADAPTER).is_file():
        return ()
    missing = (name for name in (MODEL, STEERING_GRAPH) if not (folder / name).exists())
    return tuple(path for name in missing for path in sorted(folder.parent.glob(f"[!.]*/{name}")))


def _content_of(file: RemoteFile, folder: Path, manifest: DrafterManifest) -> StoredContent:
    """Return the file in the folder, or what stands in for it: a tokenizer that ships with Outrider, a graph beside."""
    own = folder / file.name
    if file.name == TOKENIZER_FILE and not own.exists():
        own = shipped_tokenizer(manifest.tokenizer_sha256) or own
    for path in graphs_beside(folder):
        if path.name == file.name:
            with contextlib.suppress(DataLoss):
                return _checked(path, file, folder)
    return _checked(own, file, folder)


def _checked(path: Path, file: RemoteFile, folder: Path) -> StoredContent:
    where = f"{folder.name}/{file.name}"
    try:
        # Before opening: a pipe or a device would block or never end.
        if not stat.S_ISREG(path.stat().st_mode):
            raise DataLoss("is not a plain file", field=where)
        with path.open("rb") as reader:
            before = stamp(os.fstat(reader.fileno()))
            # The size first: it costs nothing, and a half-copied gigabyte need not be hashed.
            if before[0] != file.bytes:
                raise DataLoss(f"has {before[0]} bytes, the manifest promises {file.bytes}", field=where)
            found = hashlib.file_digest(reader, "sha256").hexdigest()
    except OSError as error:
        raise DataLoss(f"cannot be read: {error.strerror}", field=where) from error
    if found != file.sha256:
        raise DataLoss(f"has sha256 {found[:12]}, the manifest promises {file.sha256[:12]}", field=where)
    return StoredContent(path, before)
