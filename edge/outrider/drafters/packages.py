"""Drafters on disk: a folder of plain files and a manifest that promises the hash of each.

Nothing is handed to ONNX Runtime before its hash is checked, and a graph that keeps weights in external files does
not load, so the manifest covers all that a drafter is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path

from outrider.proto.drafter_format import ADAPTER, MANIFEST, MODEL, STEERING_GRAPH, DrafterDescription, described
from outrider.proto.errors import DataLoss, NotFound, did_you_mean
from outrider.proto.plumbing.files import sha256_of
from outrider.proto.tokenizer import TOKENIZER_FILE, shipped_tokenizer, tokenizer_hash
from outrider.proto.types import RemoteFile

FAMILY = Path(__file__).resolve().parent / "family"
FOR_ANY_SUBJECT = "general"


@dataclass(frozen=True, slots=True)
class DrafterPackage(DrafterDescription):
    """Drafter whose files are what its manifest says, in a folder."""

    folder: Path = field(kw_only=True)

    def path_of(self, name: str) -> Path:
        """Return the path of a file: in the folder, or where an equal one ships with the wheel."""
        own = self.folder / name
        if own.exists():
            return own
        if name == TOKENIZER_FILE:
            return shipped_tokenizer(self.tokenizer_sha256) or own
        promised = next((file.sha256 for file in self.files if file.name == name), "")
        return embedded_file(promised) or own

    @property
    def model_path(self) -> Path:
        """Path of the ONNX graph with its weights."""
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
    """Return the names of the drafters that ship with the wheel, the one for any subject first."""
    names = (manifest.parent.name for manifest in FAMILY.glob(f"*/{MANIFEST}"))
    return tuple(sorted(names, key=lambda name: (name != FOR_ANY_SUBJECT, name)))


@cache
def embedded_file(sha256: str) -> Path | None:
    """Return the path of the file with this hash in the drafters that ship with the wheel; None: there is none."""
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
    names = ", ".join(embedded_packages()) or "none"
    near = did_you_mean(str(name_or_path), embedded_packages())
    raise NotFound(
        f"no drafter {str(name_or_path)!r}: give a folder with a {MANIFEST}, or an embedded name ({names}){near}"
    )
