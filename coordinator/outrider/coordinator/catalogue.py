"""The drafters that a fleet offers, and their files by hash.

A drafter package is a folder with `manifest.json` and the files that it lists, each checked by its hash.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import re
import stat
import threading
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from outrider.proto.drafter_format import ADAPTER, MANIFEST, MODEL, STEERING_GRAPH, described
from outrider.proto.errors import ConfigError, DataLoss, InvalidArgument, ModelRefused, NotFound, OutriderError
from outrider.proto.tokenizer import TOKENIZER_FILE, shipped_tokenizer, tokenizer_hash
from outrider.proto.types import SHA256, DrafterManifest, RemoteFile

logger = logging.getLogger(__name__)

SCAN_DEPTH = 2  # drafters/tiny/7/manifest.json
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
class Package:
    """A checked drafter package.

    Attributes:
        sequence: number among the versions of its name, the newest highest; 0 where its manifest has none.
    """

    manifest: DrafterManifest
    content_by_sha256: Mapping[str, StoredContent]
    sequence: int = 0


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
    return Package(manifest, contents, drafter.sequence)


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


@dataclass(frozen=True, slots=True)
class _Scan:
    """One scan of the folders; replaced as a whole, so that readers need no lock."""

    packages: tuple[Package, ...] = ()
    contents: Mapping[str, StoredContent] = field(default_factory=dict)  # by hash
    refused: Mapping[Path, OutriderError] = field(default_factory=dict)


class Catalogue:
    """Drafter packages below some folders, tokenizers and chat templates.

    `rescan` may run in any thread; all other methods belong to one event loop.
    """

    def __init__(self, folders: tuple[Path, ...] = ()) -> None:
        self._folders = folders
        self._scan = _Scan()
        self._scanning = threading.Lock()
        self._looked: dict[Path, tuple[tuple[tuple[str, Stamp], ...], Package | OutriderError]] = {}
        self._tokenizers: dict[str, RemoteFile] = {}
        self._kept: dict[str, bytes] = {}  # by hash: tokenizers and chat templates
        self._chat_templates: dict[str, RemoteFile | None] = {}
        self._changed = asyncio.Event()
        self._closed = False

    @property
    def manifests(self) -> tuple[DrafterManifest, ...]:
        """Drafters, sorted by name, the newest version of each first."""
        return tuple(package.manifest for package in self._scan.packages)

    @property
    def packages(self) -> tuple[Package, ...]:
        """All packages in the same order."""
        return self._scan.packages

    @property
    def refused(self) -> Mapping[Path, OutriderError]:
        """Package folders that are not served, and why."""
        return self._scan.refused

    def fits(self, tokenizer_sha256: str, models: Container[str] = ()) -> tuple[DrafterManifest, ...]:
        """Return the drafters that have this tokenizer (empty: any), and by text others.

        One with another tokenizer fits where it was exported for one of `models`: its drafts travel as their tokens.
        """
        return tuple(
            each for each in self.manifests if tokenizer_sha256 in ("", each.tokenizer_sha256) or each.target in models
        )

    def tokenizer(self, tokenizer_sha256: str) -> RemoteFile | None:
        """Return the file of the tokenizer with this identity, if it was added."""
        return self._tokenizers.get(tokenizer_sha256)

    def add_tokenizer(self, tokenizer_json: str) -> RemoteFile:
        """Serve the text of a `tokenizer.json`; raises `ConfigError` if it is something else."""
        try:
            identity = tokenizer_hash(tokenizer_json)
        except (ValueError, AttributeError) as error:
            raise ConfigError(f"is not a tokenizer.json: {error}", field="tokenizer") from error
        file = self._tokenizers[identity] = self._keep("tokenizer.json", tokenizer_json)
        return file

    def chat_template(self, model: str) -> RemoteFile | None:
        """Return the file of a model's chat template; None: it has none, or none was added yet."""
        return self._chat_templates.get(model)

    def knows_chat_template(self, model: str) -> bool:
        """Return whether a chat template of the model was added, even an empty one."""
        return model in self._chat_templates

    def add_chat_template(self, model: str, template_json: str) -> None:
        """Serve the chat template of a model; empty: it has none."""
        self._chat_templates[model] = self._keep("chat_template.json", template_json) if template_json else None

    def open(self, sha256: str, offset: int) -> BinaryIO:
        """Return a reader of the content with this hash, `offset` bytes in.

        Raises:
            InvalidArgument: this is no hash, or the offset is beyond the end.
            NotFound: no content has this hash.
            DataLoss: the file was touched since it was checked.
        """
        if not SHA256.fullmatch(sha256):
            raise InvalidArgument("must be 64 hexadecimal digits", field="fetch.sha256")
        stored, kept = self._scan.contents.get(sha256), self._kept.get(sha256, b"")
        if stored is None and not kept:
            raise NotFound("no file with this hash is served; list the drafters again", field="fetch.sha256")
        size = stored.size if stored is not None else len(kept)
        if offset > size:
            raise InvalidArgument(f"{offset} is beyond the end at {size}", field="fetch.offset")
        reader = stored.open() if stored is not None else BytesIO(kept)
        reader.seek(offset)
        return reader

    def rescan(self) -> bool:
        """Scan the folders again, hashing only packages that were touched, and return whether the drafters changed."""
        with self._scanning:
            before = self.manifests
            self._looked = {folder: self._look(folder) for folder in self._package_folders()}
            self._scan = _collect({folder: outcome for folder, (_, outcome) in self._looked.items()})
            return self.manifests != before

    async def refresh(self) -> bool:
        """Run `rescan` in a thread, and return whether the drafters changed."""
        changed = await asyncio.to_thread(self.rescan)
        if changed:
            self.wake()
        return changed

    async def changed(self) -> bool:
        """Wait until the drafters change; return False once the catalogue is closed."""
        if not self._closed:
            await self._changed.wait()
        return not self._closed

    def close(self) -> None:
        """End all waiting for changes."""
        self._closed = True
        self.wake()

    def _keep(self, name: str, text: str) -> RemoteFile:
        data = text.encode()
        file = RemoteFile(name, hashlib.sha256(data).hexdigest(), len(data))
        self._kept[file.sha256] = data
        return file

    def wake(self) -> None:
        """End one `changed` of everybody who waits."""
        woken, self._changed = self._changed, asyncio.Event()
        woken.set()

    def _package_folders(self) -> Iterator[Path]:
        seen: set[Path] = set()
        for top in self._folders:
            for folder in _walk(top, SCAN_DEPTH):
                resolved = folder.resolve()
                if resolved not in seen and (folder / MANIFEST).exists():
                    seen.add(resolved)
                    yield folder

    def _look(self, folder: Path) -> tuple[tuple[tuple[str, Stamp], ...], Package | OutriderError]:
        stamps = _stamps(folder)
        known = self._looked.get(folder)
        if known is not None and known[0] == stamps:
            return known
        try:
            package = load_package(folder)
        except (ConfigError, DataLoss) as error:
            logger.warning("drafter package %s is refused: %s", folder, error)
            return stamps, error
        logger.info("drafter %s version %s is served", package.manifest.name, package.manifest.version)
        return stamps, package


def _collect(outcomes: Mapping[Path, Package | OutriderError]) -> _Scan:
    packages: dict[tuple[str, str], Package] = {}
    refused: dict[Path, OutriderError] = {}
    for folder, outcome in outcomes.items():
        if isinstance(outcome, OutriderError):
            refused[folder] = outcome
            continue
        identity = (outcome.manifest.name, outcome.manifest.version)
        # Two contents under one version would make "the same drafter" differ from edge to edge.
        if packages.setdefault(identity, outcome).manifest != outcome.manifest:
            refused[folder] = ConfigError(f"another package is already {identity}", field=folder.name)
            logger.warning("drafter package %s is refused: %s", folder, refused[folder])
    newest_first = sorted(packages.values(), key=_age_key, reverse=True)
    ordered = sorted(newest_first, key=lambda p: p.manifest.name)
    contents = {sha256: content for package in ordered for sha256, content in package.content_by_sha256.items()}
    return _Scan(tuple(ordered), contents, refused)


def _age_key(package: Package) -> tuple[int, list[tuple[int, int, str]]]:
    """Return the key that puts newer versions of a name last: their sequence, and what is in the version for ties.

    An exported version is a hash, which says nothing of its age: its order among equals is fixed, and no more.
    """
    parts = re.findall(r"\d+|\D+", package.manifest.version)
    return package.sequence, [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in parts]


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    """Yield `folder` and those below it, but no hidden ones: a package can be copied in and then renamed."""
    if not folder.is_dir():
        return
    yield folder
    if depth:
        for child in sorted(folder.iterdir()):
            if not child.name.startswith("."):
                yield from _walk(child, depth - 1)


def _stamps(folder: Path) -> tuple[tuple[str, Stamp], ...]:
    stamps = []
    for path in (*sorted(folder.iterdir()), *graphs_beside(folder)):
        try:
            stamps.append((str(path), stamp(path.stat())))
        except FileNotFoundError:
            # Gone since the listing, or a dangling link; the next scan sees another stamp.
            stamps.append((str(path), (-1, 0, 0, 0)))
    return tuple(stamps)
