"""Drafters that edges are offered."""

from __future__ import annotations

import logging
from collections.abc import Container
from dataclasses import replace

from outrider.coordinator.catalogue import Catalogue
from outrider.coordinator.statistics import FleetStatistics
from outrider.coordinator.version_trials import VersionState
from outrider.proto.types import DrafterManifest

logger = logging.getLogger(__name__)


class DrafterOffers:
    """The catalogue, seen by edges.

    Args:
        catalogue: packages.
        statistics: states of their versions.
    """

    def __init__(self, catalogue: Catalogue, statistics: FleetStatistics) -> None:
        self._catalogue = catalogue
        self._statistics = statistics
        self._by_text: set[tuple[str, str]] = set()  # name and version of those that were logged

    def look(self) -> bool:
        """Take in what the catalogue has; return whether the state of any version changed."""
        packages = self._catalogue.packages
        return self._statistics.look((p.manifest.name, p.manifest.version, p.sequence) for p in packages)

    def of(self, tokenizer_sha256: str = "", models: Container[str] = ()) -> tuple[DrafterManifest, ...]:
        """Return the drafters with this tokenizer in states in which edges take them, the current of a name first.

        Drafters that were exported for one of `models`, which have this tokenizer, are offered with another tokenizer
        too: edges let them draft by text.
        """
        offers = []
        for manifest in self._catalogue.fits(tokenizer_sha256, models):
            if tokenizer_sha256 not in ("", manifest.tokenizer_sha256):
                self._note_by_text(manifest)
            share = self._statistics.share(manifest.name, manifest.version)
            if self._statistics.versions.state(manifest.name, manifest.version) is VersionState.CURRENT:
                offers.append(manifest)
            elif share:
                offers.append(replace(manifest, share=share))
        return tuple(sorted(offers, key=lambda offer: offer.share > 0))

    def _note_by_text(self, manifest: DrafterManifest) -> None:
        """Log once that a drafter has another tokenizer than the target that it was exported for."""
        identity = manifest.name, manifest.version
        if identity not in self._by_text:
            self._by_text.add(identity)
            words = "drafter %s version %s is offered by text to edges of %s, whose tokenizer is another"
            logger.info(words, *identity, manifest.target)

    @property
    def retired(self) -> frozenset[tuple[str, str]]:
        """Retired versions whose files are here, each by its drafter's name and itself."""
        state = self._statistics.versions.state
        offered = ((manifest.name, manifest.version) for manifest in self._catalogue.manifests)
        return frozenset(each for each in offered if state(*each) is VersionState.RETIRED)
