"""Whose hits are wanted: drafters by the names that they are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.bench.comparison.contenders import load_contenders, load_packages
from outrider.edge.drafters import DrafterPackage, NgramDrafter
from outrider.edge.drafters.protocol import Drafter
from outrider.proto.errors import ConfigError, OutriderError

NGRAM = "ngram"

Packages = Mapping[str, DrafterPackage | None]  # by label, in the order of the command; None: n-grams need none


def find_drafters(arguments: Sequence[str]) -> Packages:
    """The packages that embedded names, folders and NAME=FOLDER stand for; `ngram` has none.

    Raises:
        ConfigError: none is named, or two have the same name.
        NotFound, InvalidArgument, ModelRefused, DataLoss: as `find_package`.
    """
    if not arguments:
        raise ConfigError("names none; name an embedded drafter, a package folder, or ngram", field="drafter")
    found: dict[str, DrafterPackage | None] = {}
    for argument in arguments:
        try:
            named = {NGRAM: None} if argument == NGRAM else load_packages([argument])
        except OutriderError as error:
            raise type(error)(error.message, field="drafter") from error
        for label, package in named.items():
            if label in found:
                raise ConfigError(f"two are called {label!r}; tell them apart by NAME=FOLDER", field="drafter")
            found[label] = package
    return found


def load_drafters(packages: Packages, tokenizer_sha256: str) -> dict[str, Drafter]:
    """The drafters, on one thread each, as an edge has them.

    Raises:
        TokenizerMismatch: a package was not made for a target with that tokenizer.
        ModelRefused: as `OnnxDrafter`.
    """
    try:
        loaded = load_contenders({k: p for k, p in packages.items() if p is not None}, tokenizer_sha256)
    except OutriderError as error:
        raise type(error)(error.message, field="drafter") from error
    by_label: dict[str, Drafter] = {contender.label: contender.drafter for contender in loaded}
    return {label: by_label[label] if label in by_label else NgramDrafter() for label in packages}
