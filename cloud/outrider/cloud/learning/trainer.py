"""A trainer: it takes records, makes optimizer steps, and publishes adapters of its drafter; no Ray, no threads.

A run is a pure function of settings, parent and records. What a crash leaves is the newest whole checkpoint and whole
packages: both are written beside their place, and renamed last.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from outrider.cloud.export.parent import load_parent
from outrider.cloud.learning.adapted import AdaptedDrafter
from outrider.cloud.learning.buffer import Buffer
from outrider.cloud.learning.judge import JudgeMemory
from outrider.cloud.learning.lesson_record import LessonRecord
from outrider.cloud.learning.losses import LOSSES, check_record, judged_rows
from outrider.cloud.learning.trainer_settings import TrainerSettings
from outrider.drafters.adapters import LowRank, read_adapter, write_adapter_package
from outrider.drafters.packages import DrafterPackage, find_package, load_package, read_manifest
from outrider.proto.drafter_format import LearnedFrom
from outrider.proto.errors import InvalidArgument, ModelRefused, OutriderError

CHECKPOINT, TENSORS, STATE = "checkpoint-", "tensors.safetensors", "state.json"
MAX_LOGITS = 1 << 25  # of a batch: 134 MB, a few times
MIN_SHARE_OF_KEY = 0.02  # of the positions, for a key to count among those that taught
MAX_VERSIONS = 32  # that are kept where no coordinator tells which are retired, 0.3 MB each
TOLERATED = 3  # steps in a row that are not finite
MAX_GRADIENT_NORM = 1.0
AVERAGE_MEMORY = 0.99  # share of the average of the weights that a step leaves, at most
_GONE = ".deleted"

log = logging.getLogger(__name__)


class VersionFolder:
    """A drafter's published versions, a package for each under its number, where catalogues look; it need not exist.

    A version is renamed before it is deleted, so that no catalogue ever sees a part of a package.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def finish_deleting(self) -> None:
        """Delete the versions that an earlier process was deleting when it ended."""
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


@dataclass(slots=True)
class TrainerState:
    """The part of a checkpoint that is no tensor.

    Attributes:
        step: optimizer steps tried.
        updates: steps since the weights were last reset, of which the average is.
        failed: steps in a row that were not finite.
        sequence: of the newest package published; 0: none.
        positions, classes: positions learned from, in all and by class of prompts.
        keys: positions by the hex salt of the key that they came from.
        counts: records and steps by what became of them.
    """

    step: int = 0
    updates: int = 0
    failed: int = 0
    sequence: int = 0
    positions: int = 0
    classes: Counter[str] = field(default_factory=Counter)
    keys: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)


class Trainer:
    """The training of one drafter's adapter.

    It goes on from the newest whole checkpoint in `settings.folder`, if that is of the same parent.

    Args:
        settings: what to train, and how.
        rehearsal: records of the drafter's own corpus.

    Attributes:
        memory: that of the judge of its candidates, which is saved with its own state.
        versions: those that were published.

    Raises:
        ModelRefused: the drafter cannot be trained on.
        NotFound, DataLoss, InvalidArgument: there is no such drafter, or its package is broken.
    """

    def __init__(self, settings: TrainerSettings, rehearsal: Sequence[LessonRecord] = ()) -> None:
        self.settings = settings
        self.package: DrafterPackage = find_package(settings.drafter)
        rank = max(settings.rank, self.package.adapter.rank if self.package.adapter else 0)
        self.drafter = AdaptedDrafter(load_parent(self.package), rank=rank, seed=settings.seed)
        self.loss = LOSSES[settings.loss]
        self.buffer = Buffer(rehearsal, seed=settings.seed, rehearsed=settings.rehearsed, key_share=settings.key_share)
        self.state = TrainerState(sequence=self.package.sequence)
        self.memory = JudgeMemory()
        self._first = self.drafter.matrices()
        self._published = self._start = self._adapter_of(self.package)
        self._forget_updates(self._start)
        self.versions = VersionFolder(settings.folder / "drafters" / self.package.name)
        self.versions.finish_deleting()
        self._candidates = settings.folder / "candidates"
        settings.folder.mkdir(parents=True, exist_ok=True)
        self._resume()

    @property
    def positions_a_step(self) -> int:
        """Number of positions of a step, fewer for large vocabularies."""
        return max(64, min(self.settings.positions, MAX_LOGITS // self.drafter.vocab_size))

    def decode(self, data: bytes) -> LessonRecord:
        """Return the record in `data`.

        Raises:
            InvalidArgument: it is none, or about another target or tokenizer; it is counted, and nothing else happens.
        """
        try:
            record = LessonRecord.decode(data)
            check_record(record, self.package, self.loss)
        except InvalidArgument:
            self.state.counts["records refused"] += 1
            raise
        self.state.counts["records"] += 1
        return record

    def ready(self) -> bool:
        """Return whether enough is new for a step: some texts, or half a batch of positions."""
        enough = self.buffer.waiting >= self.positions_a_step / 2
        return enough or self.buffer.num_waiting_records >= self.settings.texts

    def step(self) -> float | None:
        """Make a step, and return its loss; None: it was not finite and changed nothing, or there was nothing to learn.

        After three in a row that were not finite, the weights are those of the last version published.
        """
        state, settings = self.state, self.settings
        records = self.buffer.draw(self.positions_a_step, state.step)
        rows = judged_rows(self.drafter, records, self.loss)
        state.step += 1
        if rows is None:
            return None
        for group in self._optimizer.param_groups:
            group["lr"] = settings.rate * min(1.0, (state.updates + 1) / settings.warm_up_steps)
        loss = self.loss.value(rows)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.learned(), MAX_GRADIENT_NORM)
        if not (torch.isfinite(loss) and torch.isfinite(norm)):
            self._fail("a loss or gradient that is not finite")
            return None
        self._optimizer.step()
        state.failed = 0
        state.updates += 1
        self._average_in()
        self._count(records)
        return float(loss.detach())

    def published_matrices(self) -> dict[str, LowRank]:
        """Return the average of the weights, which is what would be published, by name."""
        averaged = iter(self._averages)
        return {name: (next(averaged).numpy().copy(), next(averaged).numpy().copy()) for name in self._start}

    def write_candidate(self) -> DrafterPackage | None:
        """Write the average of the weights as a package that no catalogue sees; None: it was refused.

        One that is refused, since it is not finite or changes the parent by too much, makes training go on from the
        last version published.
        """
        state = self.state
        shutil.rmtree(self._candidates, ignore_errors=True)
        sequence = max([state.sequence, self.package.sequence, *self.versions.numbers()]) + 1
        learned = LearnedFrom(state.positions, len(state.keys), dict(state.classes))
        folder, matrices = self._candidates / str(sequence), self.published_matrices()
        try:
            write_adapter_package(self.package.folder, folder, matrices, sequence=sequence, learned_from=learned)
        except ModelRefused as error:
            state.counts["versions refused"] += 1
            log.warning("a new version of %s was refused: %s", self.package.name, error)
            self.go_back()
            return None
        state.counts["candidates"] += 1
        return load_package(folder)

    def may_spread(self) -> bool:
        """Return whether edges may get what was learned: enough keys taught it, a fiftieth of the positions each."""
        keys = self.state.keys
        least = MIN_SHARE_OF_KEY * keys.total()
        return sum(positions >= least for positions in keys.values()) >= self.settings.min_keys

    def publish(self, candidate: DrafterPackage) -> DrafterPackage:
        """Move a candidate to where catalogues look, `versions`; return it from there.

        One that is there already, since a trainer died next, is taken for published.
        """
        folder = self.versions.of(candidate.sequence)
        if candidate.folder != folder:
            folder.parent.mkdir(parents=True, exist_ok=True)
            candidate.folder.rename(folder)
        published = load_package(folder)
        self.state.sequence = published.sequence
        self.state.counts["versions"] += 1
        self._published = self._adapter_of(published)
        self.versions.keep_newest(MAX_VERSIONS)
        self.save()
        return published

    def find_candidate(self, sequence: int) -> DrafterPackage:
        """Return the candidate of this number, published or not, that an earlier run has written.

        Raises:
            OutriderError: its package is gone or broken.
        """
        folder = self.versions.of(sequence)
        return load_package(folder if folder.exists() else self._candidates / str(sequence))

    def go_back(self) -> None:
        """Go on from the last version published, or from the parent."""
        self._forget_updates(self._published)

    def go_back_to(self, version: DrafterPackage) -> None:
        """Go on from a version published earlier, or from the parent, which counts as the last one from now on."""
        self._published = self._adapter_of(version)
        self.go_back()
        self.save()

    def save(self) -> Path:
        """Write a checkpoint, which is there whole or not at all, and remove older ones."""
        folder = self.settings.folder
        final = folder / f"{CHECKPOINT}{self.state.step:08d}"
        unfinished = folder / ".unfinished-checkpoint"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        save_file(self._tensors(), unfinished / TENSORS)
        saved = {each.name: getattr(self.state, each.name) for each in fields(self.state)}
        saved |= {"judge": self.memory.saved(), "parent": self.package.version}
        saved |= {"loss": self.settings.loss, "rank": self.settings.rank}
        (unfinished / STATE).write_text(json.dumps(saved), encoding="utf-8")
        older = [path for path in folder.glob(f"{CHECKPOINT}*") if path != final]
        shutil.rmtree(final, ignore_errors=True)
        os.replace(unfinished, final)
        for path in older:
            shutil.rmtree(path, ignore_errors=True)
        return final

    def _adapter_of(self, package: DrafterPackage) -> dict[str, LowRank]:
        """Return the drafter's first matrices with those of the package's adapter in them: their product is that's."""
        matrices = {name: (a.copy(), b.copy()) for name, (a, b) in self._first.items()}
        for name, (a, b) in (read_adapter(package) if package.adapter else {}).items():
            own_a, own_b = matrices[name]
            own_a[: len(a)], own_b[:, : len(a)] = a, b
        return matrices

    def _resume(self) -> None:
        """Go on from the newest checkpoint that can be read and is of this parent, loss and rank."""
        settings = self.settings
        for path in sorted(settings.folder.glob(f"{CHECKPOINT}*"), reverse=True):
            try:
                saved: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
                same = (saved.pop("parent"), saved.pop("loss"), saved.pop("rank"))
                if same != (self.package.version, settings.loss, settings.rank):
                    log.warning("%s is of another drafter or loss, and is passed over", path)
                    continue
                tensors = load_file(path / TENSORS)
                self.memory = JudgeMemory.restored(saved.pop("judge"), tensors["seen"].numpy())
                self._restore(tensors)
                counters = {name: Counter(saved[name]) for name in ("classes", "counts", "keys")}
                self.state = TrainerState(**{each.name: saved[each.name] for each in fields(TrainerState)} | counters)
                return
            except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
                log.warning("%s cannot be read: %s", path, error)
                self.memory = JudgeMemory()
                self._forget_updates(self._start)

    def _tensors(self) -> dict[str, torch.Tensor]:
        published = [torch.from_numpy(array) for pair in self._published.values() for array in pair]
        groups: dict[str, Sequence[torch.Tensor]] = {
            "weight": self.drafter.learned(),
            "average": self._averages,
            "published": published,
        }
        tensors = {
            f"{kind}.{index}": tensor.detach().clone().contiguous()
            for kind, group in groups.items()
            for index, tensor in enumerate(group)
        }
        tensors["seen"] = torch.from_numpy(self.memory.saved_names().copy())
        for index, moments in self._optimizer.state_dict()["state"].items():
            tensors |= {f"{name}.{index}": value.detach().clone() for name, value in moments.items()}
        return tensors

    def _restore(self, tensors: dict[str, torch.Tensor]) -> None:
        learned = self.drafter.learned()
        with torch.no_grad():
            for index, parameter in enumerate(learned):
                parameter.copy_(tensors[f"weight.{index}"])
                self._averages[index].copy_(tensors[f"average.{index}"])
        published = iter(tensors[f"published.{index}"].numpy() for index in range(len(learned)))
        self._published = {name: (next(published), next(published)) for name in self._start}
        moments = {
            index: {name: tensors[f"{name}.{index}"] for name in ("step", "exp_avg", "exp_avg_sq")}
            for index in range(len(learned))
            if f"step.{index}" in tensors
        }
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": moments})

    def _forget_updates(self, matrices: dict[str, LowRank]) -> None:
        """Set the weights to `matrices`, their average too, and the optimizer to its beginning."""
        self.drafter.load(matrices)
        self._averages = [parameter.detach().clone() for parameter in self.drafter.learned()]
        self._optimizer = torch.optim.AdamW(
            self.drafter.learned(), lr=self.settings.rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.state.updates = self.state.failed = 0

    def _fail(self, why: str) -> None:
        state = self.state
        state.counts["steps skipped"] += 1
        state.failed += 1
        log.warning("a step of %s was skipped: %s", self.package.name, why)
        if state.failed >= TOLERATED:
            state.counts["resets"] += 1
            log.warning("%d steps in a row failed; going on from the last version published", state.failed)
            self.go_back()

    @torch.no_grad()
    def _average_in(self) -> None:
        """Add the weights to their average, whose memory grows with it to `AVERAGE_MEMORY`."""
        kept = min(AVERAGE_MEMORY, self.state.updates / (self.state.updates + 9))
        for average, parameter in zip(self._averages, self.drafter.learned(), strict=True):
            average.lerp_(parameter, 1 - kept)

    def _count(self, records: Sequence[LessonRecord]) -> None:
        state = self.state
        for record in records:
            state.positions += len(record)
            state.classes[str(record.prompt_class)] += len(record)
            if record.key_salt not in self.buffer.rehearsed_keys:
                state.keys[record.key_salt.hex()] += len(record)
