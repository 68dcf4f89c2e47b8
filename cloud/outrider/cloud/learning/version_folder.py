"""The folder of a drafter's published versions, a package for each under its number; catalogues look there."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Collection
from pathlib import Path

from outrider.drafters.packages import read_manifest
from outrider.proto.errors import OutriderError

_GONE = ".deleted"

log = logging.getLogger(__name__)


class VersionFolder:
    """Published versions by number; the folder need not be there.

    One that is to go is hidden first, so that no catalogue ever sees a part of a package.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def finish_deleting(self) -> None:
        """Delete what an earlier process has hidden, and died before it was gone."""
        for hidden in self.path.glob(f".*{_GONE}"):
            _delete(hidden)

    def numbers(self) -> list[int]:
        """Return the numbers of the versions that are there, ascending."""
        return sorted(int(path.name) for path in self.path.glob("[0-9]*") if path.name.isdecimal())

    def of(self, number: int) -> Path:
        """Return the folder of a version, which need not be there."""
        return self.path / str(number)

    def keep_newest(self, count: int) -> None:
        """Delete all versions but the newest `count`."""
        numbers = self.numbers()
        for number in numbers[: max(0, len(numbers) - count)]:
            self._remove(number)

    def retire(self, versions: Collection[str]) -> frozenset[str]:
        """Delete these versions, and return those that were there."""
        found = {number: self._version_of(number) for number in self.numbers()}
        gone = {number: version for number, version in found.items() if version in versions}
        for number in gone:
            self._remove(number)
        return frozenset(gone.values())

    def _version_of(self, number: int) -> str:
        try:
            return read_manifest(self.of(number)).version
        except OutriderError as error:
            log.warning("version %d in %s cannot be read: %s", number, self.path, error)
            return ""

    def _remove(self, number: int) -> None:
        hidden = self.path / f".{number}{_GONE}"
        try:
            if hidden.exists():
                _delete(hidden)
            self.of(number).rename(hidden)
        except OSError as error:
            log.warning("version %d in %s stays: %s", number, self.path, error)
            return
        _delete(hidden)


def _delete(folder: Path) -> None:
    """Delete a folder, which may be gone; what cannot be deleted is logged, and tried again later."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("%s cannot be deleted: %s", folder, error)
