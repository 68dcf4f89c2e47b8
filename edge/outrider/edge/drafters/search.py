"""Search for the drafters that a list names, by their manifests: nothing else is fetched, checked or loaded yet.

`ngram` is n-grams of the text itself, what has a slash or is a folder is a package there, and any other name is of a
drafter that the coordinator offers, or else of an embedded one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from outrider.edge.drafters.cache import DrafterCache, Fetch
from outrider.edge.drafters.ngram import NgramDrafter
from outrider.edge.drafters.packages import (
    DrafterPackage,
    embedded_packages,
    find_folder,
    load_package,
    read_manifest,
)
from outrider.edge.drafters.pool import BROKEN, Member
from outrider.edge.drafters.protocol import Drafter
from outrider.proto.errors import OutriderError, TokenizerMismatch
from outrider.proto.types import DrafterManifest

NGRAM = "ngram"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """A drafter and its package; None: it needs none."""

    member: Member
    package: DrafterPackage | None = None


class DrafterSearch:
    """Find drafters that read the tokens of one target.

    Args:
        offers: manifests that the coordinator offers.
        cache: folder of downloaded files.
        fetch: downloads one of them.
        threads: threads of ONNX Runtime for each drafter.
    """

    def __init__(self, offers: tuple[DrafterManifest, ...], cache: DrafterCache, fetch: Fetch, threads: int) -> None:
        self._offers = {offer.name: offer for offer in reversed(offers)}  # the first of a name counts
        self._order = tuple(dict.fromkeys(offer.name for offer in offers))
        self._cache = cache
        self._fetch = fetch
        self._threads = threads

    def named(self, names: tuple[str, ...], tokenizer_sha256: str) -> list[Found]:
        """Return these drafters in order, without those that are broken or cannot be had now, which are logged.

        Args:
            names: names of drafters, or folders.
            tokenizer_sha256: the target's; empty: the first package's.

        Raises:
            NotFound: nobody knows a name.
            TokenizerMismatch: a drafter was made for another tokenizer.
            ModelRefused, DataLoss, Unavailable, OSError: none of them is left.
        """
        found: list[Found] = []
        failure: Exception | None = None
        for name in names:
            try:
                one = self._find(name)
            except BROKEN as error:
                log.warning("going on without the drafter %s: %s", name, error)
                failure = error
                continue
            if one.package is not None:
                tokenizer_sha256 = tokenizer_sha256 or one.package.tokenizer_sha256
                if one.package.tokenizer_sha256 != tokenizer_sha256:
                    raise TokenizerMismatch(
                        f"{name!r} was made for another tokenizer than the target's; leave it out", field="drafter"
                    )
            found.append(one)
        if not found and failure is not None:
            raise failure
        return found

    def all(self, tokenizer_sha256: str) -> list[Found]:
        """Return all that fit the target's tokenizer: the coordinator's offers, the embedded family, and n-grams."""
        found = []
        for name in dict.fromkeys((*self._order, *embedded_packages())):
            try:
                one = self._find(name)
            except (OutriderError, OSError) as error:
                log.warning("passing over the drafter %s: %s", name, error)
                continue
            if one.package is not None and one.package.tokenizer_sha256 == tokenizer_sha256:
                found.append(one)
        return [*found, self._find(NGRAM)]

    def _find(self, name: str) -> Found:
        if name == NGRAM:
            return Found(Member(NGRAM, NgramDrafter.version, 0, NgramDrafter))
        known = name in self._offers or name in embedded_packages()
        if "/" in name or (not known and Path(name).is_dir()):
            return self._local(Path(name).expanduser())
        offer = self._offers.get(name)
        return self._local(find_folder(name)) if offer is None else self._offered(offer)

    def _local(self, folder: Path) -> Found:
        return self._in(read_manifest(folder), partial(load_package, folder))

    def _offered(self, offer: DrafterManifest) -> Found:
        package = self._cache.look(offer, self._fetch)
        return self._in(package, partial(self._cache.ensure, offer, self._fetch))

    def _in(self, package: DrafterPackage, check: Callable[[], DrafterPackage]) -> Found:
        from outrider.edge.drafters.onnx import OnnxDrafter

        def load() -> Drafter:
            return OnnxDrafter(check(), threads=self._threads)

        return Found(Member(package.name, package.version, package.graph_bytes, load, package.steering), package)
