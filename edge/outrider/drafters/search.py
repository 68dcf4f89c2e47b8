"""Search for the drafters that a list names, by their manifests: nothing else is fetched, checked or loaded yet.

An offer that is on trial drafts beside the current version of its name, at a share of the edges (`on_trial_here`). As
long as that is a steered drafter, these edges ask for no vectors: those of one version say nothing of another's hits.
`ngram` stands for n-grams of the text itself, `retrieval` for copies of what the edge has, a name with a slash or of a
folder for a package there, and any other name for a drafter that the coordinator offers, or else for an embedded one.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from outrider.drafters.cache import DrafterCache, Fetch
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.packages import DrafterPackage, embedded_packages, find_folder, load_package, read_manifest
from outrider.drafters.pool import BROKEN, Member
from outrider.drafters.protocol import Drafter
from outrider.drafters.retrieval import RetrievalDrafter
from outrider.proto.drafter_format import trial_name
from outrider.proto.errors import OutriderError, TokenizerMismatch
from outrider.proto.types import DrafterManifest

NGRAM, RETRIEVAL = "ngram", "retrieval"

log = logging.getLogger(__name__)


class DrafterSearch:
    """Search for drafters that read the tokens of one target.

    Args:
        offers: manifests that the coordinator offers.
        cache: folder of downloaded files.
        fetch: downloads one of them.
        threads: threads of ONNX Runtime for each drafter.
        edge: name of this edge, which decides what it tries; empty: it tries nothing.
    """

    def __init__(
        self, offers: tuple[DrafterManifest, ...], cache: DrafterCache, fetch: Fetch, threads: int, edge: str = ""
    ) -> None:
        current = [offer for offer in offers if not offer.share]
        self._offers = {offer.name: offer for offer in reversed(current)}  # the first of a name counts
        self._order = tuple(dict.fromkeys(offer.name for offer in current))
        self._on_trial = [offer for offer in offers if offer.share and edge and on_trial_here(offer, edge)]
        self._cache = cache
        self._fetch = fetch
        self._threads = threads

    def named(self, names: tuple[str, ...], tokenizer_sha256: str) -> list[Member]:
        """Return these drafters in order, without those that are broken or cannot be had now, which are logged.

        Args:
            names: names of drafters, or folders.
            tokenizer_sha256: the target's; empty: the first package's.

        Raises:
            NotFound: nobody knows a name.
            TokenizerMismatch: a drafter was made for another tokenizer.
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
                    raise TokenizerMismatch(
                        f"{name!r} was made for another tokenizer than the target's; leave it out, or use `auto`",
                        field="drafter",
                    )
            found += (one, *self._trials_of(one, tokenizer_sha256))
        if not found and failure is not None:
            raise failure
        return found

    def all(self, tokenizer_sha256: str) -> list[Member]:
        """Return all that fit the target's tokenizer: the coordinator's offers, the embedded family, and n-grams."""
        found: list[Member] = []
        for name in dict.fromkeys((*self._order, *embedded_packages())):
            offer = self._offers.get(name)
            if offer is not None and offer.tokenizer_sha256 != tokenizer_sha256:
                log.warning("passing over the drafter %s: it is for another tokenizer", name)
                continue
            try:
                one = self._find(name)
            except (OutriderError, OSError) as error:
                log.warning("passing over the drafter %s: %s", name, error)
                continue
            if one.package is not None and one.package.tokenizer_sha256 == tokenizer_sha256:
                found += (one, *self._trials_of(one, tokenizer_sha256))
        return [*found, self._find(NGRAM)]

    def _find(self, name: str) -> Member:
        if name == NGRAM:
            return Member(NGRAM, NgramDrafter.version, 0, NgramDrafter)
        if name == RETRIEVAL:
            return Member(RETRIEVAL, RetrievalDrafter.version, 0, RetrievalDrafter)
        known = name in self._offers or name in embedded_packages()
        local = "/" in name or (not known and Path(name).is_dir())
        offer = None if local else self._offers.get(name)
        if offer is not None:
            return self._offered(offer)
        folder = Path(name).expanduser() if local else find_folder(name)
        return self._member(read_manifest(folder), partial(load_package, folder))

    def _trials_of(self, current: Member, tokenizer_sha256: str) -> list[Member]:
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
            fits = one.package is not None and one.package.tokenizer_sha256 == tokenizer_sha256
            if fits and one.package is not None and _compares(one.package, current.package):
                found.append(one)
        return found

    def _offered(self, offer: DrafterManifest, name: str = "") -> Member:
        package = self._cache.look(offer, self._fetch)
        return self._member(package, partial(self._cache.ensure, offer, self._fetch), name)

    def _member(self, package: DrafterPackage, check: Callable[[], DrafterPackage], name: str = "") -> Member:
        return _member(package, check, self._threads, name)


def own_member(package: DrafterPackage, threads: int) -> Member:
    """Return the drafter of a package that is here, with so many threads of ONNX Runtime."""
    return _member(package, partial(load_package, package.folder), threads)


def _member(package: DrafterPackage, check: Callable[[], DrafterPackage], threads: int, name: str = "") -> Member:
    from outrider.drafters.onnx import OnnxDrafter

    def load() -> Drafter:
        return OnnxDrafter(check(), threads=threads, name=name)

    return Member(name or package.name, package.version, package.graph_bytes, load, package.steering, package)


def _compares(version: DrafterPackage, current: DrafterPackage) -> bool:
    """Return whether both can be compared here, where a trial leaves steering off for both (`DrafterPool.steered`).

    A steered drafter is tried only until it is published: tried beside it, the former version would keep it unsteered.
    """
    if version.steering is None or current.steering is None:
        return version.steering is current.steering
    return version.steering.projection == current.steering.projection and version.sequence > current.sequence


def on_trial_here(offer: DrafterManifest, edge: str) -> bool:
    """Return whether the edge of this name is of the share that tries a version; others try the next one."""
    digest = hashlib.sha256("\n".join((edge, offer.name, offer.version)).encode()).digest()
    return int.from_bytes(digest[:8], "big") < offer.share * 2**64
