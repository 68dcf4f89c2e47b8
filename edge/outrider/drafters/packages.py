"""Drafters on disk: a folder of plain files and a manifest that promises the hash of each.

Nothing is handed to ONNX Runtime before its hash is checked, and a graph that keeps weights in external files does
not load, so the manifest covers all that a drafter is.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from outrider.proto.drafter_format import CACHE_DTYPES, CACHE_LAYOUT, DRAFTER_FORMAT, CacheShape
from outrider.proto.errors import DataLoss, InvalidArgument, ModelRefused, NotFound
from outrider.proto.near import did_you_mean
from outrider.proto.plumbing.files import sha256_of
from outrider.proto.tokenizer import TOKENIZER_FILE, shipped_tokenizer, tokenizer_hash
from outrider.proto.types import RemoteFile
from outrider.proto.types.checks import NAME, SHA256

MANIFEST = "manifest.json"
MODEL = "model.onnx"
STEERING_GRAPH = "steering.onnx"
ADAPTER = "adapter.safetensors"
GRAPHS = (MODEL, STEERING_GRAPH, ADAPTER)  # what a drafter computes, and the order in which its version hashes them
KINDS = ("onnx-lm",)

FAMILY = Path(__file__).resolve().parent / "family"
FOR_ANY_SUBJECT = "general"
_VERSION = re.compile(r"[0-9a-f]{12}")
_AGE = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)


@dataclass(frozen=True, slots=True)
class SteeringShape:
    """Shape of a steered drafter's input, vectors that a projection in the cloud makes of the target's hidden state.

    Attributes:
        rank: numbers in a steering vector.
        mlp: width of every layer's MLP, to whose up projection the vector adds.
        projection: 12 hexadecimal digits of the projection that the drafter was trained with.
        gain: (age of the vector in positions, relative gain in tokens a round over no steering), ages ascending; may
            be empty.
    """

    rank: int
    mlp: int
    projection: str
    gain: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """Shape of a low-rank update of the graph that is merged into it when it is loaded (`adapters`).

    Attributes:
        rank: columns of B, and rows of A.
        targets: names of the matrices that change.
    """

    rank: int
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LearnedFrom:
    """Texts that a version learned from.

    Attributes:
        positions: number of judged positions.
        keys: number of API keys that they came from; 0: a corpus.
        classes: number of positions by class of text.
    """

    positions: int
    keys: int
    classes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class DrafterPackage:
    """Drafter whose files are what its manifest says.

    Attributes:
        reach: number of last tokens that an answer depends on; None: all. The other fields are the manifest's.
        parent: version that it was trained on from; empty: none.
        sequence: place among the versions of its name, the newest highest.
        learned_from: what an update learned from; None: it is none.
        adapter: update of the graph; None: the graph is all.
    """

    folder: Path
    name: str
    version: str
    target: str
    tokenizer_sha256: str
    files: tuple[RemoteFile, ...]
    precision: str
    vocab_size: int
    context_length: int
    candidates: int
    parameters: int
    cache: CacheShape
    steering: SteeringShape | None = None
    reach: int | None = None
    parent: str = ""
    sequence: int = 0
    learned_from: LearnedFrom | None = None
    adapter: AdapterShape | None = None

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
    try:
        parsed = json.loads(manifest.read_text(encoding="utf-8", errors="replace"))
    except json.JSONDecodeError as error:
        raise InvalidArgument(f"is not JSON: {error}", field="manifest") from error
    fields = _Fields(parsed, "manifest")
    if fields.text("format") != DRAFTER_FORMAT:
        raise ModelRefused(
            f"{fields.text('format')!r} is not {DRAFTER_FORMAT!r}; export the drafter again with this version",
            field="manifest.format",
        )
    if fields.text("kind") not in KINDS:
        raise ModelRefused(f"{fields.text('kind')!r} is none of {', '.join(KINDS)}", field="manifest.kind")
    cache = fields.inner("cache")
    for key, known in (("dtype", tuple(CACHE_DTYPES)), ("layout", (CACHE_LAYOUT,))):
        if cache.text(key) not in known:
            raise ModelRefused(f"{cache.text(key)!r} is not {' or '.join(known)}", field=f"manifest.cache.{key}")
    package = DrafterPackage(
        folder=folder,
        name=fields.matching("name", NAME),
        version=fields.matching("version", _VERSION),
        target=fields.text("target"),
        tokenizer_sha256=fields.matching("tokenizer_sha256", SHA256),
        files=_files(fields.inner("files")),
        precision=fields.text("precision"),
        vocab_size=fields.count("vocab_size"),
        context_length=fields.count("context_length"),
        candidates=fields.count("candidates"),
        parameters=fields.count("parameters"),
        cache=CacheShape(
            cache.count("layers"), cache.count("kv_heads"), cache.count("head_dim"), dtype=cache.text("dtype")
        ),
        steering=_steering(fields.inner("steering")) if fields.has("steering") else None,
        reach=fields.count("reach") if fields.has("reach") else None,
        parent=fields.matching("parent", _VERSION) if fields.has("parent") else "",
        sequence=fields.whole("sequence") if fields.has("sequence") else 0,
        learned_from=_learned_from(fields.inner("learned_from")) if fields.has("learned_from") else None,
        adapter=_adapter(fields.inner("adapter")) if fields.has("adapter") else None,
    )
    if package.candidates > package.vocab_size:
        raise InvalidArgument("exceeds the vocabulary", field="manifest.candidates")
    if package.steering is not None and all(file.name != STEERING_GRAPH for file in package.files):
        raise InvalidArgument(f"does not list {STEERING_GRAPH}, which a steered drafter has", field="manifest.files")
    if package.adapter is not None and all(file.name != ADAPTER for file in package.files):
        raise InvalidArgument(f"does not list {ADAPTER}, which its adapter is in", field="manifest.files")
    return package


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


def _files(files: _Fields) -> tuple[RemoteFile, ...]:
    promised = []
    names = files.keys()
    for name in names:
        entry = files.inner(name)
        try:
            promised.append(RemoteFile(name, entry.matching("sha256", SHA256), entry.count("bytes")))
        except InvalidArgument as error:
            raise InvalidArgument(error.message, field=f"manifest.files.{name}") from error
    for needed in (MODEL, TOKENIZER_FILE):
        if needed not in names:
            raise InvalidArgument(f"does not list {needed}", field="manifest.files")
    return tuple(promised)


def _steering(steering: _Fields) -> SteeringShape:
    return SteeringShape(
        rank=steering.count("rank"),
        mlp=steering.count("mlp"),
        projection=steering.matching("projection", _VERSION),
        gain=_gain(steering.inner("gain")) if steering.has("gain") else (),
    )


def _adapter(adapter: _Fields) -> AdapterShape:
    targets = adapter.texts("targets")
    if not targets or len(set(targets)) < len(targets):
        raise InvalidArgument("must name one matrix or more, and none twice", field="manifest.adapter.targets")
    return AdapterShape(adapter.count("rank"), targets)


def _learned_from(learned: _Fields) -> LearnedFrom:
    classes = learned.inner("classes")
    class_names = classes.keys()
    by_class = {name: classes.whole(name) for name in class_names}
    return LearnedFrom(learned.whole("positions"), learned.whole("keys"), by_class)


def _gain(gain: _Fields) -> tuple[tuple[int, float], ...]:
    ages = gain.keys()
    for age in ages:
        if not _AGE.fullmatch(age):
            raise InvalidArgument(f"{age!r} is no age in positions", field="manifest.steering.gain")
    return tuple(sorted((int(age), gain.finite(age)) for age in ages))


class _Fields:
    """A JSON object whose every access checks the type and names the field at fault."""

    def __init__(self, parsed: Any, where: str) -> None:
        if not isinstance(parsed, Mapping):
            raise InvalidArgument("must be a JSON object", field=where)
        self._parsed = parsed
        self._where = where

    def keys(self) -> tuple[str, ...]:
        return tuple(self._parsed)

    def has(self, key: str) -> bool:
        return key in self._parsed

    def inner(self, key: str) -> _Fields:
        return _Fields(self._get(key), f"{self._where}.{key}")

    def text(self, key: str) -> str:
        value = self._get(key)
        if not isinstance(value, str) or not value:
            raise InvalidArgument("must be a text that is not empty", field=f"{self._where}.{key}")
        return value

    def matching(self, key: str, pattern: re.Pattern[str]) -> str:
        value = self.text(key)
        if not pattern.fullmatch(value):
            raise InvalidArgument(f"{value!r} does not match {pattern.pattern}", field=f"{self._where}.{key}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._get(key)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise InvalidArgument("must be a list of strings", field=f"{self._where}.{key}")
        return tuple(value)

    def count(self, key: str) -> int:
        return self.whole(key, least=1)

    def whole(self, key: str, least: int = 0) -> int:
        value = self._get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InvalidArgument(f"must be a whole number, {least} or more", field=f"{self._where}.{key}")
        return value

    def finite(self, key: str) -> float:
        value = self._get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
            raise InvalidArgument("must be a finite number", field=f"{self._where}.{key}")
        return float(value)

    def _get(self, key: str) -> Any:
        if key not in self._parsed:
            raise InvalidArgument("is missing", field=f"{self._where}.{key}")
        return self._parsed[key]
