"""Learners of single keys: what the texts of one API key teach serves its own edges, even if too few taught for all.

Each learns from its key's records alone, and its candidates are judged on them alone. Their parent is the newest
version for all. When there is another, a learner begins again from that with the texts that it has; its last version
stays with its edges, where the coordinator compares it.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.cloud.learning.learner import Learner
from outrider.cloud.learning.record import LessonRecord
from outrider.cloud.learning.settings import TrainerSettings
from outrider.cloud.learning.version_folder import VersionFolder
from outrider.proto.errors import Internal, OutriderError
from outrider.proto.salts import SALT_BYTES

KEPT_S = 3600.0  # for which a learner without texts keeps its place from other keys
CLASS_POSITIONS = 10_000  # of each class of prompts, about 3.3 MB
NEW_POSITIONS = 8192
_OWNER = re.compile(rf"[0-9a-f]{{{2 * SALT_BYTES}}}")

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Own:
    """A key's learner, the time of its last text, and the turn in which it last made a step."""

    learner: Learner
    taught_s: float
    turn: int = 0


class OwnLearners:
    """Learners of the keys that a coordinator allows to have versions of their own, `settings.own_keys` at once.

    A further key takes the place of the one whose last text is the oldest, if that is old enough. The one that goes
    keeps checkpoint and versions, and goes on from there when it comes back.

    Args:
        settings: those of the trainer.
        public: learner for all, whose newest version is the parent.
    """

    def __init__(self, settings: TrainerSettings, public: Learner) -> None:
        self._settings = settings
        self._public = public
        self._learners: dict[bytes, _Own] = {}
        self._turns = 0
        self._undeleted: set[bytes] = set()
        self.allowed: frozenset[bytes] | None = None
        """Salts of the keys that may have versions of their own; None: no coordinator has said it yet."""

    def allow(self, owners: frozenset[bytes]) -> frozenset[bytes]:
        """Learn for these keys alone, delete what there is of others, and return the salts of those that are gone."""
        gone = (self.allowed or frozenset()) | {*self._learners, *self._on_disk()}
        gone -= owners
        self.allowed = owners
        for owner in gone:
            try:
                self.forget(owner)
            except Internal as error:
                log.error("a key lost its permission, and %s; the trainer goes on trying", error.message)
        return gone

    def take(self, record: LessonRecord, wall_s: float) -> None:
        """Teach the record's key alone with it, at Unix time `wall_s`, if that may have a learner and there is room."""
        owner = record.key_salt
        if self.allowed is None or owner not in self.allowed or owner in self._undeleted:
            return
        try:
            own = self._of(owner, wall_s)
            if own is None:
                return
            self._follow(own.learner)
            own.taught_s = wall_s
            own.learner.add(record)
        except (OutriderError, OSError):
            log.exception("what a key had for itself cannot be read, and is dropped")
            with suppress(Internal):
                self.forget(owner)

    def ready(self, wall_s: float) -> bool:
        """Drop what is too old at Unix time `wall_s`, and return whether one has enough new for a step."""
        ready = [own.learner.ready(wall_s) for own in self._learners.values()]
        return any(ready)

    def step(self, wall_s: float) -> bool:
        """Make a step of one learner with enough new, whose last one is the oldest; return whether there was one."""
        for own in sorted(self._learners.values(), key=lambda each: each.turn):
            self._follow(own.learner)
            if own.learner.step(wall_s):
                self._turns += 1
                own.turn = self._turns
                return True
        return False

    def forget(self, owner: bytes) -> None:
        """Delete versions, checkpoint and records of a key, which then begins with nothing.

        Raises:
            Internal: files stay that cannot be deleted. The rest is gone, and nothing is learned for the key until
                `delete_again` succeeds.
        """
        self._learners.pop(owner, None)
        errors = [error for folder in self._folders_of(owner) if (error := _deletion_error(folder)) is not None]
        if errors:
            self._undeleted.add(owner)
            reasons = "; ".join(map(str, errors))
            raise Internal(f"not all that was learned from a key's texts can be deleted: {reasons}", field="key")
        self._undeleted.discard(owner)

    def delete_again(self) -> None:
        """Try once more to delete what could not be deleted."""
        for owner in list(self._undeleted):
            with suppress(Internal):
                self.forget(owner)

    def retire(self, versions: Collection[tuple[str, str]]) -> None:
        """Delete versions that turned out worse, each named by its owner and itself.

        Learners whose parent is no longer the newest for all begin again.
        """
        retired = [(bytes.fromhex(owner), version) for owner, version in versions if _OWNER.fullmatch(owner)]
        for owner, version in retired:
            if (own := self._learners.get(owner)) is not None:
                own.learner.retire((version,))
            else:
                VersionFolder(self._place_of(owner).versions(self._public.trainer.package.name)).retire((version,))
        for own in self._learners.values():
            self._follow(own.learner)

    def save(self) -> None:
        """Write a checkpoint of each learner."""
        for own in self._learners.values():
            own.learner.trainer.save()

    def status(self) -> dict[str, int]:
        """Return counts, which name no key."""
        folders = [self._place_of(owner).versions(self._public.trainer.package.name) for owner in self._on_disk()]
        versions = [sum(path.name.isdecimal() for path in folder.glob("[0-9]*")) for folder in folders]
        counts = {"own_keys": sum(map(bool, versions)), "own_versions": sum(versions)}
        return counts | {"own_learners": len(self._learners), "undeleted": len(self._undeleted)}

    def _of(self, owner: bytes, wall_s: float) -> _Own | None:
        """Return the learner of a key, which may begin now; None: others keep all places."""
        if owner in self._learners or not self._settings.own_keys:
            return self._learners.get(owner)
        if len(self._learners) >= self._settings.own_keys:
            oldest = min(self._learners, key=lambda each: self._learners[each].taught_s)
            if wall_s - self._learners[oldest].taught_s < KEPT_S:
                return None
            self._learners.pop(oldest).learner.trainer.save()
        own = self._learners[owner] = _Own(Learner(self._settings_of(owner)), wall_s, self._turns)
        return own

    def _follow(self, learner: Learner) -> None:
        """Let a learner begin again if its parent is no longer the newest version for all."""
        parent = self._public.newest
        if learner.trainer.package.version != parent.version:
            learner.begin_again(parent)

    def _place_of(self, owner: bytes) -> TrainerSettings:
        """Return settings with the folders of a key."""
        return replace(self._settings, folder=self._settings.folder / "own" / owner.hex(), owner=owner.hex())

    def _folders_of(self, owner: bytes) -> tuple[Path, Path]:
        place = self._place_of(owner)
        return place.versions(self._public.trainer.package.name), place.folder

    def _settings_of(self, owner: bytes) -> TrainerSettings:
        """Return settings by which a key's texts alone are learned from."""
        return replace(
            self._place_of(owner),
            drafter=str(self._public.newest.folder),
            min_keys=1,
            rehearsal=(),
            rehearsed=0.0,
            class_positions=CLASS_POSITIONS,
            new_positions=NEW_POSITIONS,
            key_share=1.0,
        )

    def _on_disk(self) -> set[bytes]:
        folders: list[Path] = [*self._settings.folder.glob("own/*"), *self._settings.folder.glob("drafters/*")]
        return {bytes.fromhex(path.name) for path in folders if _OWNER.fullmatch(path.name)}


def _deletion_error(folder: Path) -> OSError | None:
    """Delete a folder, which may be gone, as far as that can be; return why some of it stays, if any does."""
    errors: list[OSError] = []

    def note(_: object, __: str, failure: tuple[type[BaseException], BaseException, object]) -> None:
        if isinstance(failure[1], OSError) and not isinstance(failure[1], FileNotFoundError):
            errors.append(failure[1])

    shutil.rmtree(folder, onerror=note)
    return errors[0] if errors else None
