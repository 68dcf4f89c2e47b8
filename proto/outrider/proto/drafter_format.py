"""The format of drafter packages, as they are exported, served and loaded: a folder of files and their manifest."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.proto.errors import InvalidArgument, ModelRefused
from outrider.proto.tokenizer import TOKENIZER_FILE
from outrider.proto.types import NAME, PROJECTION, SHA256, RemoteFile, require

DRAFTER_FORMAT = "outrider-drafter/2"
MANIFEST = "manifest.json"
MODEL = "model.onnx"
STEERING_GRAPH = "steering.onnx"
ADAPTER = "adapter.safetensors"
GRAPHS = (MODEL, STEERING_GRAPH, ADAPTER)  # what a drafter computes, and the order in which its version hashes them
KINDS = ("onnx-lm",)
ON_TRIAL = "@"  # which no name contains
CACHE_LAYOUT = "[1, kv_head, position, head_dim]"  # keys, and values, of a layer
CACHE_DTYPES = {"float32": 4, "int8": 1}  # bytes of a number

_AGE = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)


def trial_name(name: str, version: str) -> str:
    """Return the name of a version on trial, which drafts beside the current version of the same name."""
    return f"{name}{ON_TRIAL}{version}"


def published_name(name: str) -> str:
    """Return the name in the manifest of a drafter that may be on trial."""
    return name.partition(ON_TRIAL)[0]


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Shape of a drafter's KV cache: for each layer, keys and values, `dtype` [1, kv_heads, positions, head_dim]."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str = "float32"

    def bytes_of(self, positions: int) -> int:
        return CACHE_DTYPES[self.dtype] * 2 * self.layers * self.kv_heads * self.head_dim * positions


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
    """Shape of a low-rank update of the graph, merged into it when it is loaded, and the matrices that change."""

    rank: int
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LearnedFrom:
    """Texts that a version learned from: judged positions, in all and by class of text, and API keys (0: a corpus)."""

    positions: int
    keys: int
    classes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class DrafterDescription:
    """A drafter, as its manifest describes it.

    Attributes:
        reach: number of last tokens that an answer depends on; None: all.
        parent: version that it was trained on from; empty: none.
        sequence: number among the versions of its name, the newest highest.
        learned_from: what an update learned from; None: it is none.
        adapter: update of the graph; None: the graph is all.
    """

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


def described(manifest: bytes) -> DrafterDescription:
    """Return the drafter that the content of a manifest describes.

    Raises:
        InvalidArgument: the manifest is malformed; `field` names where.
        ModelRefused: a format, kind or cache that this version does not know.
    """
    try:
        parsed = json.loads(manifest.decode(errors="replace"))
    except ValueError as error:  # no JSON, or a number too long to read
        raise InvalidArgument(f"is not JSON: {error}", field="manifest") from error
    fields = _Fields(parsed, "manifest")
    if fields.text("format") != DRAFTER_FORMAT:
        raise ModelRefused(
            f"{fields.text('format')!r} is not {DRAFTER_FORMAT!r}; export the drafter again with this version",
            field="manifest.format",
        )
    if fields.text("kind") not in KINDS:
        raise ModelRefused(f"{fields.text('kind')!r} is none of {', '.join(KINDS)}", field="manifest.kind")
    if fields.has("owner"):  # an older release has learned it from one API key's texts, which nobody else may have
        raise InvalidArgument("names one API key, and drafters are for all; delete the package", field="manifest.owner")
    cache = fields.inner("cache")
    for key, known in (("dtype", tuple(CACHE_DTYPES)), ("layout", (CACHE_LAYOUT,))):
        if cache.text(key) not in known:
            raise ModelRefused(f"{cache.text(key)!r} is not {' or '.join(known)}", field=f"manifest.cache.{key}")
    drafter = DrafterDescription(
        name=fields.matching("name", NAME),
        version=fields.matching("version", NAME),
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
        parent=fields.matching("parent", NAME) if fields.has("parent") else "",
        sequence=fields.whole("sequence") if fields.has("sequence") else 0,
        learned_from=_learned_from(fields.inner("learned_from")) if fields.has("learned_from") else None,
        adapter=_adapter(fields.inner("adapter")) if fields.has("adapter") else None,
    )
    if drafter.candidates > drafter.vocab_size:
        raise InvalidArgument("exceeds the vocabulary", field="manifest.candidates")
    if drafter.steering is not None and all(file.name != STEERING_GRAPH for file in drafter.files):
        raise InvalidArgument(f"does not list {STEERING_GRAPH}, which a steered drafter has", field="manifest.files")
    if drafter.adapter is not None and all(file.name != ADAPTER for file in drafter.files):
        raise InvalidArgument(f"does not list {ADAPTER}, which its adapter is in", field="manifest.files")
    return drafter


def _files(files: _Fields) -> tuple[RemoteFile, ...]:
    promised = []
    names = files.keys()
    for name in names:
        entry = files.inner(name)
        try:
            require(name != MANIFEST, "file.name", "cannot be the manifest itself")
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
        projection=steering.matching("projection", PROJECTION),
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
