"""A drafter package: a folder with `manifest.json` and the files that it lists, each checked by its hash."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from outrider.proto.drafter_format import DRAFTER_FORMAT
from outrider.proto.errors import ConfigError, DataLoss, InvalidArgument
from outrider.proto.tokenizer import TOKENIZER_FILE, shipped_tokenizer
from outrider.proto.types import DrafterManifest, RemoteFile
from outrider.proto.types.checks import SHA256

MANIFEST = "manifest.json"
ADAPTER, GRAPHS = "adapter.safetensors", ("model.onnx", "steering.onnx")
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
    try:
        parsed = json.loads(raw)
        listed = _listed_files(parsed)
        itself = RemoteFile(MANIFEST, hashlib.sha256(raw).hexdigest(), len(raw))
        manifest = DrafterManifest(
            name=_text(parsed, "name"),
            version=_text(parsed, "version"),
            tokenizer_sha256=_text(parsed, "tokenizer_sha256"),
            target=_text(parsed, "target"),
            files=(itself, *listed),
        )
        sequence, parent = _sequence(parsed), _text(parsed, "parent") if "parent" in parsed else ""
        _check_is_for_all(parsed)
    except ValueError as error:  # JSON, Unicode, and the contract's own InvalidArgument
        raise ConfigError(str(error), field=where) from error
    if not SHA256.fullmatch(manifest.tokenizer_sha256):
        raise ConfigError("tokenizer_sha256 must be 64 hexadecimal digits", field=where)
    contents = {itself.sha256: StoredContent(manifest_path, manifest_stamp)}
    for file in listed:
        contents[file.sha256] = _content_of(file, folder, manifest)
    return Package(manifest, contents, sequence, parent)


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


def _text(parsed: Mapping[str, Any], key: str) -> str:
    value = parsed.get(key)
    if not isinstance(value, str):
        raise InvalidArgument("must be a string", field=key)
    return value


def _sequence(parsed: Mapping[str, Any]) -> int:
    value = parsed.get("sequence", 0)
    if type(value) is not int or value < 0:
        raise InvalidArgument("must be a whole number, 0 or more", field="sequence")
    return value


def _check_is_for_all(parsed: Mapping[str, Any]) -> None:
    """Refuse what an older release has learned from one API key's texts, which nobody else may have."""
    if "owner" in parsed:
        raise InvalidArgument("names one API key, and drafters are for all; delete the package's folder", field="owner")


def _listed_files(parsed: Any) -> tuple[RemoteFile, ...]:
    if not isinstance(parsed, dict) or parsed.get("format") != DRAFTER_FORMAT:
        raise InvalidArgument(f"is not {DRAFTER_FORMAT!r}; export the drafter again", field="format")
    files = parsed.get("files")
    if not isinstance(files, dict) or not files:
        raise InvalidArgument("must list at least one file", field="files")
    listed = []
    for name, entry in files.items():
        if name == MANIFEST:
            raise InvalidArgument("cannot list the manifest itself", field="files")
        if not isinstance(entry, dict) or type(entry.get("bytes")) is not int or entry["bytes"] < 0:
            raise InvalidArgument("must hold sha256 and bytes", field=f"files.{name}")
        listed.append(RemoteFile(name, _text(entry, "sha256"), entry["bytes"]))
    return tuple(listed)


def graphs_beside(folder: Path) -> tuple[Path, ...]:
    """Return the graphs of packages beside `folder` that may be its own, where it has an adapter and no graph."""
    if not (folder / ADAPTER).is_file():
        return ()
    missing = (name for name in GRAPHS if not (folder / name).exists())
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
