"""Search for the drafters that a list names, by their manifests: nothing else is fetched, checked or loaded yet.

A previous version drafts beside the current one of its name, at a share of the edges (`on_trial_here`). As long as both
are steered, these edges ask for no vectors: those of one version say nothing of another's hits.
`ngram` stands for n-grams of the text itself, `retrieval` for copies of what the edge has, a name with a slash or of a
folder for a package there, and any other name for a drafter that the coordinator offers, or else for an embedded one.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.packages import (
    FOR_ANY_SUBJECT,
    DrafterCache,
    DrafterPackage,
    Fetch,
    embedded_packages,
    find_folder,
    load_package,
    read_manifest,
)
from outrider.drafters.protocol import Drafter
from outrider.drafters.retrieval import RetrievalDrafter
from outrider.drafters.shelf import Member
from outrider.proto.drafter_format import trial_name
from outrider.proto.errors import (
    DataLoss,
    DeadlineExceeded,
    ModelRefused,
    OutriderError,
    TokenizerMismatch,
    Unavailable,
)
from outrider.proto.types import DrafterManifest

if TYPE_CHECKING:
    from outrider.drafters.by_text import Vocabulary

NGRAM, RETRIEVAL = "ngram", "retrieval"
WITHOUT_PACKAGE = {
    NGRAM: Member(NGRAM, NgramDrafter.version, 0, NgramDrafter),
    RETRIEVAL: Member(RETRIEVAL, RetrievalDrafter.version, 0, RetrievalDrafter),
}

BROKEN = (DataLoss, DeadlineExceeded, ModelRefused, Unavailable, OSError)
"""Errors of a drafter itself and not of the request for it: the others go on without it."""

_MEMORY_OF_GRAPHS = 3.0  # bytes of memory at most for each of a drafter's graphs on disk

log = logging.getLogger(__name__)


class DrafterSearch:
    """Search for drafters that read the tokens of one target.

    Args:
        offers: manifests that the coordinator offers.
        threads: threads of ONNX Runtime for each drafter.
        edge: name of this edge, which decides what it tries; empty: it tries nothing.
        tokenizer_json: the target's tokenizer, by which drafters with another one draft by text; empty: they cannot.
    """

    def __init__(
        self,
        offers: tuple[DrafterManifest, ...],
        cache: DrafterCache,
        fetch: Fetch,
        threads: int,
        edge: str = "",
        tokenizer_json: str = "",
    ) -> None:
        current = [offer for offer in offers if not offer.share]
        self._offers = {offer.name: offer for offer in reversed(current)}  # the first of a name counts
        self._order = sorted({offer.name: None for offer in current}, key=lambda name: name != FOR_ANY_SUBJECT)
        self._on_trial = [offer for offer in offers if offer.share and edge and on_trial_here(offer, edge)]
        self._cache = cache
        self._fetch = fetch
        self._threads = threads
        self._tokenizer_json = tokenizer_json

    def listed(self, names: tuple[str, ...], tokenizer_sha256: str, limit_bytes: float) -> tuple[list[Member], float]:
        """Return the drafters of a list, the most wanted first, and the limit of memory that holds for them, in bytes.

        Args:
            names: as `named` takes them; the first may be `all`, for all that fit, or `auto`, for all that fit of which
                none but the first is steered: replayed over all links, a steered one among others gains nothing, and
                its vectors cost bytes of every commit.
            tokenizer_sha256: the target's.
            limit_bytes: holds for several drafters. One alone has what it needs; with `auto` the first goes alone where
                it would fill the memory for several.
        """
        if names[0] not in ("all", "auto"):
            return self.named(names, tokenizer_sha256), limit_bytes if len(names) > 1 else math.inf
        first, *others = self.all(tokenizer_sha256)
        named = self.named(names[1:], tokenizer_sha256)
        if names[0] == "all":
            return [first, *others, *named], limit_bytes
        if _MEMORY_OF_GRAPHS * first.bytes > limit_bytes:
            return [first, *named], math.inf
        return [first, *(member for member in others if member.steering is None), *named], limit_bytes

    def named(self, names: tuple[str, ...], tokenizer_sha256: str) -> list[Member]:
        """Return these drafters in order, without those that are broken or cannot be had now, which are logged.

        An empty `tokenizer_sha256` stands for that of the first package.

        Raises:
            NotFound: nobody knows a name.
            TokenizerMismatch: a drafter was made for another tokenizer, and cannot draft by text.
            ModelRefused, DataLoss, Unavailable, OSError: none of them is left.
        """
        found: list[Member] = []
        failure: Exception | None = None
        for name in names:
            try:
                one = self._find(name)
            except BROKEN as error:
                if len(names) == 1:
                    raise
                log.warning("going on without the drafter %s: %s", name, error)
                failure = error
                continue
            if one.package is not None:
                tokenizer_sha256 = tokenizer_sha256 or one.package.tokenizer_sha256
                if one.package.tokenizer_sha256 != tokenizer_sha256:
                    one = self._by_text(one)
            found += (one, *self._trials_of(one))
        if not found and failure is not None:
            raise failure
        return found

    def all(self, tokenizer_sha256: str) -> list[Member]:
        """Return all that fit the target: the coordinator's offers, the embedded family, and n-grams.

        Of the offers the drafter for any subject comes first, and those with another tokenizer, which draft by text,
        come after all that read the target's tokens.
        """
        found: list[Member] = []
        others: list[Member] = []
        for name in dict.fromkeys((*self._order, *embedded_packages())):
            offer = self._offers.get(name)
            other = offer is not None and offer.tokenizer_sha256 != tokenizer_sha256
            if other and self._no_text:
                log.warning("passing over the drafter %s: it is for another tokenizer, and %s", name, self._no_text)
                continue
            try:
                one = self._by_text(self._find(name)) if other else self._find(name)
            except (OutriderError, OSError) as error:
                log.warning("passing over the drafter %s: %s", name, error)
                continue
            if other:
                others.append(one)
            elif one.package is not None and one.package.tokenizer_sha256 == tokenizer_sha256:
                found += (one, *self._trials_of(one))
        return [*found, *others, self._find(NGRAM)]

    @cached_property
    def _no_text(self) -> str:
        """Reason why no drafter can draft by text for this target; empty: drafters can."""
        if not self._tokenizer_json:
            return "the target's tokenizer is not known here"
        hindrance = self._target.hindrance
        return f"of the target's tokenizer, {hindrance}" if hindrance else ""

    @cached_property
    def _target(self) -> Vocabulary:
        from outrider.drafters.by_text import Vocabulary

        return Vocabulary(self._tokenizer_json)

    def _by_text(self, found: Member) -> Member:
        """Return a drafter with another tokenizer as one of the target's.

        Raises:
            TokenizerMismatch: it cannot draft by text.
        """
        if self._no_text:
            message = (
                f"{found.name!r} was made for another tokenizer than the target's and cannot draft by text: "
                f"{self._no_text}; leave it out, or use `auto`"
            )
            raise TokenizerMismatch(message, field="drafter", code="OUT-407")
        log.info("the drafter %s has another tokenizer than the target, so it drafts by text", found.name)
        target, package = self._target, found.package

        def load() -> Drafter:
            from outrider.drafters.by_text import TextDrafter, Vocabulary

            inner = found.load()  # which checks the files
            assert package is not None  # noqa: S101 - only packages have tokenizers
            return TextDrafter(inner, Vocabulary(package.tokenizer_path.read_text(encoding="utf-8")), target)

        return replace(found, load=load, steering=None, by_text=True)

    def _find(self, name: str) -> Member:
        if name in WITHOUT_PACKAGE:
            return WITHOUT_PACKAGE[name]
        known = name in self._offers or name in embedded_packages()
        local = "/" in name or (not known and Path(name).is_dir())
        offer = None if local else self._offers.get(name)
        if offer is not None:
            return self._offered(offer)
        folder = Path(name).expanduser() if local else find_folder(name)
        return own_member(read_manifest(folder), self._threads)

    def _trials_of(self, current: Member) -> list[Member]:
        """Return the versions of a drafter that this edge tries beside it, without those that cannot be had."""
        found = []
        for offer in self._on_trial:
            if current.package is None or offer.name != current.name:
                continue
            try:
                one = self._offered(offer, trial_name(offer.name, offer.version))
            except (OutriderError, OSError) as error:
                log.warning("not trying version %s of the drafter %s: %s", offer.version, offer.name, error)
                continue
            fits = one.package is not None and one.package.tokenizer_sha256 == current.package.tokenizer_sha256
            if fits and one.package is not None and _compares(one.package, current.package):
                found.append(self._by_text(one) if current.by_text else one)
        return found

    def _offered(self, offer: DrafterManifest, name: str = "") -> Member:
        package = self._cache.look(offer, self._fetch)
        return _member(package, partial(self._cache.ensure, offer, self._fetch), self._threads, name)


def own_member(package: DrafterPackage, threads: int) -> Member:
    """Return the drafter of a package that is here, with so many threads of ONNX Runtime."""
    return _member(package, partial(load_package, package.folder), threads)


def _member(package: DrafterPackage, check: Callable[[], DrafterPackage], threads: int, name: str = "") -> Member:
    from outrider.drafters.onnx import OnnxDrafter

    def load() -> Drafter:
        return OnnxDrafter(check(), threads=threads, name=name)

    return Member(name or package.name, package.version, package.graph_bytes, load, package.steering, package)


def _compares(version: DrafterPackage, current: DrafterPackage) -> bool:
    """Return whether both can be compared here, where a trial leaves steering off for both (`DrafterShelf`)."""
    if version.steering is None or current.steering is None:
        return version.steering is current.steering
    return version.steering.projection == current.steering.projection


def on_trial_here(offer: DrafterManifest, edge: str) -> bool:
    """Return whether the edge of this name is of the share that tries a version; others try the next one."""
    digest = hashlib.sha256("\n".join((edge, offer.name, offer.version)).encode()).digest()
    return int.from_bytes(digest[:8], "big") < offer.share * 2**64
