"""Drafters that an edge is offered: those for all, and those that are its API key's own."""

from __future__ import annotations

import logging
from collections.abc import Container
from dataclasses import replace

from outrider.coordinator.admission import Caller, CallerAdmission
from outrider.coordinator.catalogue import Catalogue
from outrider.coordinator.package import Package
from outrider.coordinator.statistics import FleetStatistics
from outrider.coordinator.versions import VersionState, own_line
from outrider.proto.salts import key_salt
from outrider.proto.types import DrafterManifest

logger = logging.getLogger(__name__)


class DrafterOffers:
    """The catalogue, seen by callers.

    Args:
        catalogue: packages, with their owners.
        statistics: states of their versions.
        admission: keys of callers.
        lease_secret: secret by which owners are named.
    """

    def __init__(
        self, catalogue: Catalogue, statistics: FleetStatistics, admission: CallerAdmission, lease_secret: bytes
    ) -> None:
        self._catalogue = catalogue
        self._statistics = statistics
        self._admission = admission
        self._lease_secret = lease_secret
        self._by_text: set[tuple[str, str]] = set()  # name and version of those that were logged

    def look(self) -> bool:
        """Take in what the catalogue has; return whether the state of any version changed."""
        packages = self._catalogue.packages
        return self._statistics.look((_line_of(p), p.manifest.version, p.sequence) for p in packages)

    def to(
        self, caller: Caller, tokenizer_sha256: str = "", models: Container[str] = ()
    ) -> tuple[DrafterManifest, ...]:
        """Return the drafters with this tokenizer in states in which edges take them, the current of a name first.

        The caller's own versions are arms beside that, at all of its edges. Drafters that were exported for one of
        `models`, which have this tokenizer, are offered with another tokenizer too: edges let them draft by text.
        """
        offers = []
        for package in self._catalogue.fits(tokenizer_sha256, self.owner(caller), models):
            line, manifest = _line_of(package), package.manifest
            if tokenizer_sha256 not in ("", manifest.tokenizer_sha256):
                self._note_by_text(manifest)
            share = self._statistics.share(line, manifest.version)
            current = self._statistics.versions.state(line, manifest.version) is VersionState.CURRENT
            if current and not package.owner:
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

    def owner(self, caller: Caller) -> str:
        """Return the owner of versions that only this caller may have; empty: it may have none."""
        if not self._admission.allows_learning(caller):
            return ""
        return key_salt(self._lease_secret, caller.tenant).hex()

    def owners(self) -> frozenset[bytes] | None:
        """Return the salts of all keys that may have versions of their own now; None: there are no keys to ask."""
        names = self._admission.learning_keys()
        return frozenset(key_salt(self._lease_secret, name) for name in names) if names is not None else None

    @property
    def retired(self) -> frozenset[tuple[str, str]]:
        """Retired versions whose files are here: owner, or drafter where there is none, and version."""
        versions = self._statistics.versions
        return frozenset(
            (p.owner or p.manifest.name, p.manifest.version)
            for p in self._catalogue.packages
            if versions.state(_line_of(p), p.manifest.version) is VersionState.RETIRED
        )

    @property
    def own(self) -> tuple[int, int]:
        """Number of versions that only their owners are offered, and number of these owners."""
        packages = [p for p in self._catalogue.packages if p.owner]
        offered = [p.owner for p in packages if self._statistics.share(_line_of(p), p.manifest.version)]
        return len(offered), len(set(offered))


def _line_of(package: Package) -> str:
    return own_line(package.manifest.name, package.owner)
