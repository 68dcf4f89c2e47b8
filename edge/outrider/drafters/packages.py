"""Drafters on disk: a folder of plain files and a manifest that promises the hash of each.

Nothing is handed to ONNX Runtime before its hash is checked, and a graph that keeps weights in external files does
not load, so the manifest covers all that a drafter is.

Files that the coordinator serves are kept on disk under the hash that was promised for them:

    <root>/drafters/<name>/<version>/   a drafter package, as `load_package` reads it
    <root>/files/<sha256>/<name>        a single file, such as a target's tokenizer
    <root>/content/<sha256>             a second name of every file above

Content that is here already, under another version or embedded, is linked and not fetched again.

A file arrives as `<name>.<hash>.part`, which an interrupted download leaves behind for the next to go on with, and
takes its name only once its hash is right. What lies here is checked again at every use.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path

from outrider.proto.drafter_format import ADAPTER, MANIFEST, MODEL, STEERING_GRAPH, DrafterDescription, described
from outrider.proto.errors import DataLoss, InvalidArgument, ModelRefused, NotFound, Unavailable, did_you_mean
from outrider.proto.plumbing.files import sha256_of
from outrider.proto.tokenizer import TOKENIZER_FILE, shipped_tokenizer, tokenizer_hash
from outrider.proto.types import DrafterManifest, RemoteFile

FAMILY = Path(__file__).resolve().parent / "family"
FOR_ANY_SUBJECT = "general"
MAX_FILE_BYTES = 16 << 30
SPARE_BYTES = 64 << 20  # that a download leaves on the disk

Fetch = Callable[[RemoteFile, int], Iterator[bytes]]
"""Called with a file and the bytes to skip; yields the rest of its content piece by piece."""


@dataclass(frozen=True, slots=True)
class DrafterPackage(DrafterDescription):
    """Drafter whose files are what its manifest says, in a folder."""

    folder: Path = field(kw_only=True)

    def path_of(self, name: str) -> Path:
        """Return the path of a file: in the folder, or where an equal one is embedded."""
        own = self.folder / name
        if own.exists():
            return own
        if name == TOKENIZER_FILE:
            return shipped_tokenizer(self.tokenizer_sha256) or own
        promised = next((file.sha256 for file in self.files if file.name == name), "")
        return embedded_file(promised) or own

    @property
    def model_path(self) -> Path:
        return self.path_of(MODEL)

    @property
    def steering_path(self) -> Path:
        """Path of the small ONNX graph from a steering vector to every layer's bias, where the drafter is steered."""
        return self.path_of(STEERING_GRAPH)

    @property
    def adapter_path(self) -> Path:
        """Path of the update's matrices, where it has an adapter."""
        return self.path_of(ADAPTER)

    @property
    def graph_bytes(self) -> int:
        """Size of the graphs on disk, in bytes."""
        return sum(file.bytes for file in self.files if file.name in (MODEL, STEERING_GRAPH))

    @property
    def tokenizer_path(self) -> Path:
        """Path of the tokenizer that drafter and target share: the package's own, or the shipped one with its hash."""
        return self.path_of(TOKENIZER_FILE)


def load_package(folder: Path) -> DrafterPackage:
    """Read a folder's manifest and check every file against it.

    Raises:
        NotFound: there is no manifest.
        InvalidArgument: the manifest is malformed; `field` names where.
        ModelRefused: a format, kind or cache that this version does not know.
        DataLoss: a file is missing or is not what the manifest promises.
    """
    package = read_manifest(folder)
    for file in package.files:
        check_file(package.path_of(file.name), file)
    found = tokenizer_hash(package.tokenizer_path.read_text(encoding="utf-8"))
    if found != package.tokenizer_sha256:
        raise DataLoss(
            f"{TOKENIZER_FILE} has the canonical hash {found}, the manifest promises {package.tokenizer_sha256}"
        )
    return package


def read_manifest(folder: Path) -> DrafterPackage:
    """Return the package that a folder's manifest describes; raises what `load_package` does but for files."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        raise NotFound(f"{folder} holds no {MANIFEST}, so it is no drafter package")
    drafter = described(manifest.read_bytes())
    return DrafterPackage(**{each.name: getattr(drafter, each.name) for each in fields(drafter)}, folder=folder)


def check_file(path: Path, file: RemoteFile) -> None:
    """Raise DataLoss, naming the file, unless `path` holds the promised content."""
    if not path.is_file():
        raise DataLoss(f"{file.name} is missing")
    size = path.stat().st_size
    if size != file.bytes:
        raise DataLoss(f"{file.name} has {size} bytes where {file.bytes} were promised")
    found = sha256_of(path)
    if found != file.sha256:
        raise DataLoss(f"{file.name} has SHA-256 {found}, not the promised {file.sha256}")


def version_of(graphs: Iterable[Path]) -> str:
    """Return the version of a drafter of these `GRAPHS`, those that exist: 12 digits of the hash of their contents."""
    content = hashlib.sha256()
    for graph in graphs:
        if graph.is_file():
            content.update(graph.read_bytes())
    return content.hexdigest()[:12]


def embedded_packages() -> tuple[str, ...]:
    """Return the names of the drafters of the distribution `outrider-models`, the one for any subject first."""
    names = (manifest.parent.name for manifest in FAMILY.glob(f"*/{MANIFEST}"))
    return tuple(sorted(names, key=lambda name: (name != FOR_ANY_SUBJECT, name)))


@cache
def embedded_file(sha256: str) -> Path | None:
    """Return the path of the file with this hash in the embedded drafters; None: there is none."""
    for name in embedded_packages():
        package = read_manifest(FAMILY / name)
        for file in package.files:
            own = package.tokenizer_path if file.name == TOKENIZER_FILE else package.folder / file.name
            if file.sha256 == sha256 and own.exists():
                return own
    return None


def find_package(name_or_path: str | Path) -> DrafterPackage:
    """Return the embedded drafter of that name, or else the package in that folder, checked by `load_package`."""
    return load_package(find_folder(name_or_path))


def find_folder(name_or_path: str | Path) -> Path:
    """Return where the embedded drafter of that name lies, or else that folder, if it holds a package."""
    if name_or_path in embedded_packages():
        return FAMILY / name_or_path
    folder = Path(name_or_path).expanduser()
    if (folder / MANIFEST).is_file():
        return folder
    names = ", ".join(embedded_packages()) or "none are here; they come with the distribution outrider-models"
    near = did_you_mean(str(name_or_path), embedded_packages())
    raise NotFound(
        f"no drafter {str(name_or_path)!r}: give a folder with a {MANIFEST}, or an embedded name ({names}){near}"
    )


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
            message = f"cannot use {self.root}: {reason}; give another folder with --cache"
            raise Unavailable(message, field="cache", code="OUT-409") from error

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
        message = (
            f"{folder} has {free} bytes free, and {file.name} needs {file.bytes - have}; "
            "make room, or give another folder with --cache"
        )
        raise Unavailable(message, field="cache", code="OUT-409")


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
