"""The drafters that a command names: embedded names, package folders, NAME=FOLDER, and those without a package."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from outrider.drafters import DrafterPackage, NgramDrafter
from outrider.drafters.by_text import TextDrafter, Vocabulary
from outrider.drafters.onnx import OnnxDrafter
from outrider.drafters.packages import find_package
from outrider.drafters.protocol import Drafter
from outrider.drafters.retrieval import RetrievalDrafter
from outrider.drafters.search import NGRAM, RETRIEVAL
from outrider.proto.errors import ConfigError, OutriderError
from outrider.proto.tokenizer import tokenizer_hash

_WITHOUT_PACKAGE = {NGRAM: NgramDrafter, RETRIEVAL: RetrievalDrafter}

Packages = Mapping[str, DrafterPackage | None]  # packages by label, in the order of the command; None: it needs none


def find_packages(arguments: Sequence[str], field: str, *, without: Collection[str] = ()) -> Packages:
    """Return the packages that the arguments name, by label, in their order.

    Args:
        arguments: embedded names, folders and NAME=FOLDER.
        field: the option, named in errors.
        without: those of `ngram` and `retrieval` that may be named too; they have no package.

    Raises:
        ConfigError: none is named, a label is empty, or two have the same one.
        NotFound, InvalidArgument, ModelRefused, DataLoss: see `find_package`.
    """
    if not arguments:
        known = "an embedded drafter or a package folder" + "".join(f", or {name}" for name in without)
        raise ConfigError(f"names none; name {known}", field=field)
    found: dict[str, DrafterPackage | None] = {}
    for argument in arguments:
        label, package = (argument, None) if argument in without else _find(argument, field)
        if label in found:
            raise ConfigError(f"two drafters are called {label!r}; name them by NAME=FOLDER", field=field)
        found[label] = package
    return found


def _find(argument: str, field: str) -> tuple[str, DrafterPackage]:
    label, given, source = argument.partition("=")
    if not given or Path(argument).is_dir():
        label, source = "", argument
    elif not label:
        raise ConfigError(f"{argument!r} has no name before the =; write NAME=FOLDER", field=field)
    try:
        package = find_package(source)
    except OutriderError as error:
        raise type(error)(error.message, field=field) from error
    return label or package.name, package


def load_drafters(packages: Packages, tokenizer_json: str, field: str) -> dict[str, Drafter]:
    """Load the drafters of `packages`, on one thread each; those with another tokenizer than the target draft by text.

    Raises:
        ModelRefused: see `OnnxDrafter` and `TextDrafter`.
    """
    try:
        return {
            label: _load(package, tokenizer_json) if package is not None else _WITHOUT_PACKAGE[label]()
            for label, package in packages.items()
        }
    except OutriderError as error:
        raise type(error)(error.message, field=field) from error


def _load(package: DrafterPackage, tokenizer_json: str) -> Drafter:
    drafter = OnnxDrafter(package)
    if package.tokenizer_sha256 == tokenizer_hash(tokenizer_json):
        return drafter
    own = package.tokenizer_path.read_text(encoding="utf-8")
    return TextDrafter(drafter, Vocabulary(own), Vocabulary(tokenizer_json))
