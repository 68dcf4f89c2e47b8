"""Who is compared: drafters by the names they are given, and the variants of them that codes make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.edge.drafters.onnx import OnnxDrafter
from outrider.edge.drafters.packages import DrafterPackage, find_package
from outrider.edge.drafters.protocol import Drafter
from outrider.proto.errors import ConfigError, TokenizerMismatch

NO_CODES = "none"


@dataclass(frozen=True, slots=True)
class Contender:
    """A drafter, loaded from its package, and the label that it is shown under."""

    label: str
    package: DrafterPackage
    drafter: Drafter

    @property
    def projection(self) -> str | None:
        """Of the codes that it takes; None: it takes none."""
        return None if self.package.steering is None else self.package.steering.projection


@dataclass(frozen=True, slots=True)
class Variant:
    """A drafter with codes of one kind.

    Attributes:
        drafter: label of the contender.
        codes: how they travel, `int8` or `float16`; `none`: it gets no codes.
        age: positions that they are older than the freshest; None: it gets none.
    """

    drafter: str
    codes: str = NO_CODES
    age: int | None = None


def load_packages(arguments: Sequence[str]) -> dict[str, DrafterPackage]:
    """The packages that `NAME=FOLDER`, `FOLDER` or an embedded name stand for, by label, in their order.

    Raises:
        ConfigError: a label is empty, or stands for two.
        NotFound, InvalidArgument, ModelRefused, DataLoss: as `find_package`.
    """
    packages: dict[str, DrafterPackage] = {}
    for argument in arguments:
        label, given, source = argument.partition("=")
        if not given or Path(argument).is_dir():
            label, source = "", argument
        elif not label:
            raise ConfigError(f"{argument!r} has no name before the =; write NAME=FOLDER", field="package")
        package = find_package(source)
        label = label or package.name
        if label in packages:
            raise ConfigError(f"two drafters are called {label!r}; tell them apart by NAME=FOLDER", field="package")
        packages[label] = package
    return packages


def load_contenders(packages: dict[str, DrafterPackage], tokenizer_sha256: str) -> list[Contender]:
    """The drafters of `packages`, on one thread each, as an edge has them.

    Raises:
        TokenizerMismatch: a package was not made for a target with that tokenizer.
        ModelRefused: as `OnnxDrafter`.
    """
    for label, package in packages.items():
        if package.tokenizer_sha256 != tokenizer_sha256:
            raise TokenizerMismatch(
                f"{label!r} has another tokenizer than the target; it was made for {package.target!r}", field="package"
            )
    return [Contender(label, package, OnnxDrafter(package)) for label, package in packages.items()]


def variants_of(contender: Contender, precisions: Sequence[str], ages: Sequence[int]) -> list[Variant]:
    """All that it is compared as, in the order of `precisions`, then of `ages`: one where it takes no codes."""
    if contender.projection is None:
        return [Variant(contender.label)]
    return [
        Variant(contender.label, precision, age)
        for precision in precisions
        for age in (ages if precision != NO_CODES else (None,))
    ]


def ages_of(variants: Sequence[Variant]) -> list[int]:
    """Those that codes come in, each once, in their order."""
    return list(dict.fromkeys(variant.age for variant in variants if variant.age is not None))


def in_front(variants: Sequence[Variant]) -> list[Variant]:
    """Those without codes, and those whose codes are of the first age: what is shown and compared in detail."""
    first = ages_of(variants)[:1]
    return [variant for variant in variants if variant.age is None or variant.age in first]
