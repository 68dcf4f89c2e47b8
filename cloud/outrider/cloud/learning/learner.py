"""Learning from records to published versions: judge first, then train, then let the next candidate be judged."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Collection, Iterable
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from outrider.cloud.learning.judge import ShadowJudge, TrialJournal
from outrider.cloud.learning.lesson_record import LessonRecord, record_of_text
from outrider.cloud.learning.losses import LOSSES, MIN_MASS, check_record
from outrider.cloud.learning.teaching import MIN_LOGP
from outrider.cloud.learning.trainer import Trainer
from outrider.cloud.learning.trainer_settings import TrainerSettings
from outrider.cloud.training.teacher import TeacherFolder
from outrider.drafters.onnx import OnnxDrafter
from outrider.drafters.packages import DrafterPackage, find_package, load_package
from outrider.proto.errors import ConfigError, InvalidArgument, ModelRefused, OutriderError
from outrider.proto.salts import SALT_BYTES, salted
from outrider.proto.types import Sampling

REHEARSAL_POSITIONS = 100_000  # that are in memory, about 38 MB

log = logging.getLogger(__name__)


class Learner:
    """A trainer, and the judge that its records go through.

    A candidate is made every so many updates, judged on records that come later, and published if it proves better;
    then the next is compared with it. One that does not is dropped, and training goes on from the last version. A trial
    goes on after a restart with all texts that it has had.

    Args:
        settings: those of the trainer.

    Attributes:
        newest: newest version that proved better, or the parent.

    Raises:
        OutriderError: the drafter cannot be trained on, or the texts to rehearse are not its target's.
    """

    def __init__(self, settings: TrainerSettings) -> None:
        self.trainer = Trainer(settings, rehearsed_records(settings))
        self._candidate: DrafterPackage | None = None
        self._tried_at = self.trainer.state.updates
        self._allowed: frozenset[bytes] = frozenset()
        self._revoked: frozenset[bytes] = frozenset()
        candidates = self.trainer.state.counts["candidates"]
        self._journal = TrialJournal(settings.folder / "trial.jsonl")
        self.newest = self._newest()
        self.judge = ShadowJudge(
            _loaded(self.newest),
            parent=self._watched_parent(),
            candidates=candidates,
            memory=self.trainer.memory,
            journal=self._journal,
        )
        self._resume()

    def take(self, data: bytes) -> None:
        """Judge on an encoded record, and keep it to learn from, if it is one and its key did not revoke that."""
        try:
            record = self.trainer.decode(data)
        except InvalidArgument as error:
            log.warning("a record was refused: %s", error)
            return
        if record.key_salt in self._revoked:
            return
        self.trainer.buffer.add(self.judge.take(record))
        self._decide()
        if why := self.judge.fallen():
            log.warning("version %s of %s is retired: %s", self.newest.version, self.newest.name, why)
            self.trainer.state.counts["versions retired"] += 1
            self.retire((self.newest.version,))

    def allow(self, keys: frozenset[bytes]) -> None:
        """Drop the records of keys that were among those allowed earlier and are not now, and take none of theirs.

        Of keys that were never named, such as that of texts without an API key, verifiers and edges have decided.
        """
        gone = self._allowed - keys
        self._allowed, self._revoked = keys, (self._revoked | gone) - keys
        for key in gone:
            self.trainer.buffer.forget(key)

    def retire(self, versions: Collection[str]) -> None:
        """Delete published versions that turned out worse.

        If the newest is among them, learning goes on from the newest that is left, or from the parent, and so does the
        judge.

        Raises:
            OutriderError: the version that is left cannot be loaded.
        """
        gone = self.trainer.versions.retire(versions)
        if gone:
            log.info("versions %s of %s were retired", ", ".join(sorted(gone)), self.trainer.package.name)
        if self.newest.version not in gone:
            return
        self._end_trial("the version that it was compared with was retired")
        self.newest = self._newest()
        self.judge.compare_with(_loaded(self.newest), self._watched_parent())
        self.trainer.go_back_to(self.newest)
        self._tried_at = self.trainer.state.updates

    def ready(self, wall_s: float) -> bool:
        """Drop what is too old at Unix time `wall_s`, and return whether enough is new for a step."""
        self.trainer.buffer.expire(wall_s)
        return self.trainer.ready()

    def step(self, wall_s: float) -> bool:
        """Make one step, if enough is new, at Unix time `wall_s`; return whether there was one."""
        trainer, settings = self.trainer, self.trainer.settings
        if not self.ready(wall_s):
            return False
        trainer.step()
        if trainer.state.step % settings.checkpoint_every == 0:
            trainer.save()
        self._tried_at = min(self._tried_at, trainer.state.updates)  # the weights may have gone back
        due = trainer.state.updates - self._tried_at >= settings.publish_every
        if self._candidate is None and due and trainer.may_spread():
            self._begin()
        return True

    def status(self) -> dict[str, Any]:
        """Return plain values about the learning so far."""
        state, test = self.trainer.state, self.judge.test
        return {
            "drafter": self.trainer.package.name,
            "model": self.trainer.package.target,
            "version": self.newest.version,
            "folder": str(self.newest.folder),
            "sequence": state.sequence,
            "steps": state.step,
            "positions": state.positions,
            "keys": len(state.keys),
            "waiting": self.trainer.buffer.waiting,
            "candidate": self._candidate.sequence if self._candidate else 0,
            "candidate_texts": test.texts if test else 0,
            "candidate_difference": test.difference if test else 0.0,
            "published": state.counts["versions"],
            "dropped": state.counts["candidates dropped"],
            "counts": dict(state.counts),
        }

    def _newest(self) -> DrafterPackage:
        """Return the newest version that was published here from this parent, or the parent."""
        trainer, package = self.trainer, self.trainer.package
        for number in reversed(trainer.versions.numbers()):
            if package.sequence < number <= trainer.state.sequence:
                version = load_package(trainer.versions.of(number))
                if version.parent == package.version:
                    return version
        return package

    def _watched_parent(self) -> OnnxDrafter | None:
        """Return the parent if versions that draft are to be compared with it."""
        return _loaded(self.trainer.package) if self.trainer.settings.watched else None

    def _begin(self) -> None:
        """Make a candidate, and let the records to come judge it."""
        self._tried_at = self.trainer.state.updates
        candidate = self.trainer.write_candidate()
        if candidate is None:
            return
        try:
            self.judge.begin(_loaded(candidate), candidate.sequence)
        except OutriderError as error:
            self._drop(candidate, str(error))
            return
        self._candidate = candidate
        self.trainer.save()  # with the trial, and the number of candidates, by which the next one needs more evidence

    def _resume(self) -> None:
        """Go on with the trial that was under way when an earlier run ended."""
        trainer, trial = self.trainer, self.trainer.memory.trial
        if trial is None:
            return
        try:
            candidate = trainer.find_candidate(trial.sequence)
            loaded = _loaded(candidate)
            if candidate.folder.parent == trainer.versions.path:  # it died before its checkpoint
                trainer.memory.trial, self.judge.current = None, loaded
                self.newest = trainer.publish(candidate)
                return
            self.judge.resume(loaded, trial, self._journal.resume(trial.sequence))
        except (OutriderError, OSError, ValueError, KeyError, TypeError) as error:
            log.warning("the trial of version %d cannot be resumed: %s", trial.sequence, error)
            trainer.memory.trial = None
            trainer.state.counts["candidates dropped"] += 1
            return
        self._candidate = candidate
        self._decide()

    def _decide(self) -> None:
        """Publish or drop the candidate if it was judged."""
        candidate, judgement = self._candidate, self.judge.judgement()
        if candidate is None or judgement is None:
            return
        self._candidate = None
        self._tried_at = self.trainer.state.updates
        log.info("version %d of %s: %s", candidate.sequence, self.trainer.package.name, asdict(judgement))
        if judgement.better:
            self.newest = self.trainer.publish(candidate)
            return
        if judgement.worse:
            self.trainer.go_back()  # and not where it was only too early to tell
        self._drop(candidate, judgement.why)

    def _end_trial(self, why: str) -> None:
        """Drop the candidate, if there is one."""
        candidate = self._candidate
        self._candidate = self.trainer.memory.trial = None
        if candidate is not None:
            self._drop(candidate, why)

    def _drop(self, candidate: DrafterPackage, why: str) -> None:
        log.warning("version %d of %s was dropped: %s", candidate.sequence, self.trainer.package.name, why)
        self.trainer.state.counts["candidates dropped"] += 1
        self.trainer.save()  # before the package goes: a trial that is over must not begin again
        shutil.rmtree(candidate.folder, ignore_errors=True)


def _loaded(package: DrafterPackage) -> OnnxDrafter:
    return OnnxDrafter(package, threads=1)


def rehearsed_records(settings: TrainerSettings) -> list[LessonRecord]:
    """Return a sample of the texts in the folders of `outrider train teacher` that a trainer is to rehearse.

    Raises:
        InvalidArgument: a folder holds no such texts, or those of a target with other tokens.
    """
    drafter, loss = find_package(settings.drafter), LOSSES[settings.loss]
    folders = [TeacherFolder(path.expanduser(), field="rehearsal") for path in settings.rehearsal]
    for folder in folders:
        folder.facts()
    share = REHEARSAL_POSITIONS / max(1, sum(sum(folder.counts()) for folder in folders))
    choose = np.random.default_rng([settings.seed, 3])
    records = []
    for rows, best in chain.from_iterable(folder.batches() for folder in folders):
        counts = rows.starts.diff() - rows.firsts
        begins = (counts.cumsum(0) - counts).tolist()
        for index, begin in enumerate(begins):
            greedy = bool(rows.greedy[index])
            if choose.random() >= share or not (greedy or loss.reads_target):  # the noise of the others is not known
                continue
            sampling = Sampling(temperature=0.0 if greedy else 1.0)
            record = record_of_text(
                rows[index].tolist(),
                int(rows.firsts[index]),
                sampling,
                model=drafter.target,
                session_salt=bytes(SALT_BYTES),
                key_salt=salted(b"", "rehearsal"),
            )
            said = slice(begin, begin + len(record))
            top_logp = best.logprobs[said].numpy().clip(MIN_LOGP)
            rest = 1 - np.exp(top_logp.astype(np.float64)).sum(axis=1)
            record = replace(
                record,
                top_ids=best.tokens[said].numpy().astype(np.uint32),
                top_logp=top_logp,
                rest_logp=np.log(rest.clip(MIN_MASS)).astype(np.float32),
            )
            check_record(record, drafter, loss)
            records.append(record)
    return records


def drafters_folder(settings: TrainerSettings) -> Path:
    """Return the folder of published versions, for a coordinator's catalogue; make it.

    Raises:
        ConfigError: beside it lies what an older release has learned for single API keys, which nobody forgets.
    """
    folder = settings.folder.expanduser().resolve() / "drafters"
    if (of_keys := folder.parent / "own").exists():
        raise ConfigError(
            f"{of_keys} holds what an older release has learned for single API keys, which no `outrider key --forget` "
            f"deletes; remove it, and what has the same names in {folder}",
            field="folder",
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def check_reads_tokens(settings: TrainerSettings, tokenizers: Iterable[str]) -> None:
    """Raise ModelRefused where the drafter that learns has another tokenizer than a target that teaches it.

    Args:
        settings: those of the trainer.
        tokenizers: hashes of the targets' tokenizers.
    """
    package = find_package(settings.drafter)
    if any(each != package.tokenizer_sha256 for each in tokenizers):
        raise ModelRefused(
            f"{package.name!r} has another tokenizer than the target {package.target!r}, so it drafts by text and "
            "cannot learn from the target's tokens; name a drafter with the target's tokenizer",
            field="drafter",
        )
