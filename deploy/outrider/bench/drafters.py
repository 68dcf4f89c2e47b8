"""The drafters that a command names: embedded names, package folders, NAME=FOLDER, and n-grams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from outrider.drafters import DrafterPackage, NgramDrafter
from outrider.drafters.onnx import OnnxDrafter
from outrider.drafters.packages import find_package
from outrider.drafters.protocol import Drafter
from outrider.proto.errors import ConfigError, OutriderError, TokenizerMismatch

NGRAM = "ngram"

Packages = Mapping[str, DrafterPackage | None]  # packages by label, in the order of the command; None: n-grams


def find_packages(arguments: Sequence[str], field: str, *, ngram: bool = False) -> Packages:
    """Return the packages that the arguments name, by label, in their order.

    Args:
        arguments: embedded names, folders and NAME=FOLDER.
        field: the option, named in errors.
        ngram: whether `ngram` may be one of them; it has no package.

    Raises:
        ConfigError: none is named, a label is empty, or two have the same one.
        NotFound, InvalidArgument, ModelRefused, DataLoss: see `find_package`.
    """
    if not arguments:
        known = "an embedded drafter or a package folder" + (", or ngram" if ngram else "")
        raise ConfigError(f"names none; name {known}", field=field)
    found: dict[str, DrafterPackage | None] = {}
    for argument in arguments:
        label, package = (NGRAM, None) if ngram and argument == NGRAM else _find(argument, field)
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


def load_drafters(packages: Packages, tokenizer_sha256: str, field: str) -> dict[str, Drafter]:
    """Load the drafters of `packages`, on one thread each.

    Raises:
        TokenizerMismatch: a package was not made for a target with that tokenizer.
        ModelRefused: see `OnnxDrafter`.
    """
    for label, package in packages.items():
        if package is not None and package.tokenizer_sha256 != tokenizer_sha256:
            raise TokenizerMismatch(
                f"{label!r} has another tokenizer than the target; it was made for {package.target!r}", field=field
            )
    try:
        return {label: NgramDrafter() if p is None else OnnxDrafter(p) for label, p in packages.items()}
    except OutriderError as error:
        raise type(error)(error.message, field=field) from error
