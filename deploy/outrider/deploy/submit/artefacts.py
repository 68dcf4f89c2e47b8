"""What a job hands back: files in hashed parts, with a manifest that is written last."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Self

from outrider.proto.errors import DataLoss

FOLDER = "outrider-artefacts"  # in the folder of Ray's logs, which its job server hands out
MANIFEST = "manifest.json"
PART_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class PackedFile:
    """One file: where it belongs, and the SHA-256 of each of its parts, in order."""

    path: str
    bytes: int
    parts: tuple[str, ...]

    def __post_init__(self) -> None:
        pure = PurePosixPath(self.path)
        if not pure.parts or pure.is_absolute() or ".." in pure.parts or "\\" in self.path:
            raise DataLoss(f"{self.path!r} does not lie in the folder of the job", field="artefacts")
        if len(self.parts) != -(-self.bytes // PART_BYTES):
            raise DataLoss(f"{self.path!r} has {len(self.parts)} parts for {self.bytes} bytes", field="artefacts")


@dataclass(frozen=True, slots=True)
class Manifest:
    """All files that a job hands back, and what was asked for but not there."""

    files: tuple[PackedFile, ...]
    missing: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(file.bytes for file in self.files)

    def to_json(self) -> str:
        """As it is stored."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Read it back; raises `DataLoss` where it is not whole."""
        try:
            stored = json.loads(text)
            files = tuple(PackedFile(f["path"], int(f["bytes"]), tuple(f["parts"])) for f in stored["files"])
            return cls(files, tuple(stored["missing"]))
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, DataLoss):
                raise
            raise DataLoss(f"the manifest cannot be read: {error}", field="artefacts") from error


def pack(work: Path, wanted: Iterable[str], into: Path) -> Manifest:
    """Cut the wanted files, and those in the wanted folders, into parts in `into`; the manifest is written last.

    Args:
        work: what the paths are relative to.
        wanted: files and folders; links are followed where they are files.
        into: a folder to make; a part is named by its hash, so equal ones are stored once.
    """
    into.mkdir(parents=True, exist_ok=True)
    files: list[PackedFile] = []
    missing = []
    for name in dict.fromkeys(wanted):
        found = list(_files_of(work / name))
        if not found:
            missing.append(name)
        files += [_packed(path, path.relative_to(work).as_posix(), into) for path in found]
    manifest = Manifest(tuple({file.path: file for file in files}.values()), tuple(missing))
    write_whole(into / MANIFEST, manifest.to_json().encode())
    return manifest


def part_hashes(path: Path) -> Iterator[tuple[str, bytes]]:
    """The SHA-256 and the content of each part of a file, in order."""
    with path.open("rb") as reader:
        while part := reader.read(PART_BYTES):
            yield hashlib.sha256(part).hexdigest(), part


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all."""
    beside = path.with_name(f"{path.name}.unfinished")
    beside.write_bytes(data)
    os.replace(beside, path)


def _files_of(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    elif path.is_dir():
        yield from sorted(below for below in path.rglob("*") if below.is_file())


def _packed(path: Path, name: str, into: Path) -> PackedFile:
    parts = []
    size = 0
    for sha256, part in part_hashes(path):
        if not (into / sha256).exists():
            write_whole(into / sha256, part)
        parts.append(sha256)
        size += len(part)
    return PackedFile(name, size, tuple(parts))
