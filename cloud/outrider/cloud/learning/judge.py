"""Judgement of a candidate on fresh texts before it drafts a token, with bits that are exact and cost no decoding.

With the shared noise a drafter's proposal at a position is a function of the text before it, the seed and the position;
it would be accepted if it is the text's token. So a text with its sampling gives the hits of any drafter, whoever
drafted it: `hits_of`. Candidate and current drafter are compared on the same tokens (`PairedTest`).

A candidate passes only if several tests agree: that it gains over all texts, and that no kind of text loses its margin.
One that fails in one of them needs that very test to err, so each takes all of alpha_j (`sequential.py`; Berger 1982,
intersection-union tests).

A text counts only if no candidate was trained on any part of it. `ShadowJudge` sees to that: records reach training
through `take` alone, which judges first and lets go afterwards. A candidate was made before the records that judge it
came; a text of which anything came before, or that equals an earlier one, judges nothing.

A trial must not forget a text that spoke against a candidate, or it would be worth nothing: whoever can end the
process at will could have it forget those. So each text is in `TrialJournal` before it counts, and a
trial is resumed with all of them. Checkpoints hold the rest (`JudgeMemory`). Both have hashes and numbers, and no text.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from outrider.cloud.learning.lesson_record import LessonRecord
from outrider.drafters.proposals import ProposalRule
from outrider.drafters.protocol import Drafter
from outrider.proto.errors import InvalidArgument
from outrider.proto.policy.sequential import MIN_CLASS_SHARE, LossTest, SignTest, candidate_error, clipped

MAX_TOKENS = 256  # of one text
MIN_TOKENS = 8
MAX_TEXTS = 300  # that a candidate is judged on: one that gains .02 shows it in 100, and newer ones wait
MAX_DOUBTED_TEXTS = 2000  # that one is judged on which was shown to gain, and may lose in a kind of text
KEY_WEIGHT = 2.0  # limit of a key's share of the texts, in equal shares of all keys that came
MAX_SEEN = 1 << 17  # names of texts
NAME_BYTES = 16
WATCHED_TEXTS = 500  # after which a comparison with the parent begins again
RECENT_TEXTS = 1000.0  # over which the kinds of traffic fade


def can_judge(record: LessonRecord) -> bool:
    """Return whether a record holds a text from its beginning, and enough of it."""
    return not record.start and len(record.tokens) >= record.first_generated + MIN_TOKENS


def hits_of(drafter: Drafter, record: LessonRecord) -> np.ndarray:
    """Return whether what a drafter would have proposed at each generated position is the text's token.

    These are the bits that decoding the same text with this drafter gives. A steered drafter is judged unsteered.

    Args:
        drafter: drafter in question.
        record: one of which `can_judge` is true; at most `MAX_TOKENS` of it count.

    Returns:
        [g] bool.
    """
    first = record.first_generated
    prompt, generated = record.tokens[:first].tolist(), record.tokens[first : first + MAX_TOKENS].tolist()
    state = drafter.open(ProposalRule(record.sampling, prompt_length=first))
    try:
        state.extend(prompt)
        proposed = state.propose_forced(generated)
    finally:
        state.close()
    hits: np.ndarray = np.array([draft.id for draft in proposed]) == np.array(generated)
    return hits


class Verdict(StrEnum):
    """Outcome of a comparison so far."""

    OPEN = "open"
    BETTER = "better"
    WORSE = "worse"


class PairedTest(LossTest):
    """Comparison of a candidate with its parent on texts that neither was trained on.

    It ends as better if the candidate hits more over all texts and provably loses less than its `class_margin` in each
    kind of text that is common or `kept`. It ends as worse by the mirrored test, over all texts or in one kind.

    Args:
        number: which candidate of its name it is, from 1.
        kept: kinds of text that must be known to keep their hit rate, however rare they are.
    """

    def __init__(self, number: int = 1, kept: Collection[int] = ()) -> None:
        super().__init__(number)
        self._kept = frozenset(kept)
        self._gain = SignTest()
        self._keeps: dict[int, SignTest] = {}

    def add(self, difference: float, prompt_class: int = 0) -> None:
        over_margin = self.over_margin(difference, prompt_class)
        super().add(difference, prompt_class)
        self._gain.add(clipped(difference))
        self._keeps.setdefault(prompt_class, SignTest()).add(over_margin)

    @property
    def verdict(self) -> tuple[Verdict, str]:
        """Outcome so far, and why in a few words; a candidate that is shown to be worse somewhere is never better."""
        hits = f"hits {self.difference:+.3f} in {self.texts} texts"
        if self.lost:
            return Verdict.WORSE, hits + (f" of class {self.lost_class}" if self.lost_class is not None else "")
        if not self.gains:
            return Verdict.OPEN, f"{hits}, which shows nothing"
        if doubtful := self.doubtful_classes:
            return Verdict.OPEN, f"{hits}, and may lose in {', '.join(f'class {each}' for each in sorted(doubtful))}"
        return Verdict.BETTER, hits

    @property
    def gains(self) -> bool:
        """Whether the candidate is shown to hit more over all texts."""
        return self._gain.shows(candidate_error(self.number))

    @property
    def doubtful_classes(self) -> frozenset[int]:
        """Kinds of text that may lose the margin for all that is known, and must not."""
        common = {kind for kind, each in self._keeps.items() if each.count >= MIN_CLASS_SHARE * self.texts}
        error = candidate_error(self.number)
        return frozenset(
            kind for kind in common | self._kept if kind not in self._keeps or not self._keeps[kind].shows(error)
        )


class JudgedText(NamedTuple):
    """A text that a candidate was judged on.

    Attributes:
        difference: hit rate of the candidate less that of the current drafter.
        prompt_class: kind of text.
        key: salted hash of its API key.
        names: hashes of its session and of its beginning, by which it is known again.
    """

    difference: float
    prompt_class: int
    key: bytes
    names: tuple[bytes, ...]

    def line(self) -> str:
        """Return it as a line of JSON."""
        return json.dumps([self.difference, self.prompt_class, self.key.hex(), [name.hex() for name in self.names]])

    @classmethod
    def from_line(cls, line: str) -> Self:
        """Restore what `line` returned; raises `ValueError` or `TypeError` if it is malformed."""
        difference, prompt_class, key, names = json.loads(line)
        restored = tuple([bytes.fromhex(name) for name in names])
        return cls(float(difference), int(prompt_class), bytes.fromhex(key), restored)


class OpenTrial(NamedTuple):
    """A trial that is under way.

    Attributes:
        sequence: that of the candidate's package.
        number: which candidate it is, from 1.
        kept: kinds of text that it must be known to keep.
    """

    sequence: int
    number: int
    kept: tuple[int, ...]


@dataclass(slots=True)
class VersionWatch:
    """Comparison of the version that drafts with its parent, on texts since it was published.

    It lasts for `WATCHED_TEXTS`, since what is asked for changes, and each needs more evidence than the one before: the
    chance that a version which hits no less than its parent is ever retired is a hundredth.

    Attributes:
        version: version that drafts.
        number: which comparison it is, of all versions, from 1.
        loses: test of whether it hits less.
        difference: sum of the differences of hit rates.
    """

    version: str
    number: int
    loses: SignTest = field(default_factory=SignTest)
    difference: float = 0.0

    def add(self, difference: float) -> None:
        """Count a text: hit rate of the version less that of its parent."""
        self.loses.add(-clipped(difference))
        self.difference += difference

    @property
    def reason(self) -> str:
        """Reason in a few words for which the version is to be retired; empty: there is none."""
        if not self.loses.shows(candidate_error(self.number)):
            return ""
        return f"hits {self.difference / self.loses.count:+.3f} against its parent in {self.loses.count} texts"

    def next(self, version: str) -> VersionWatch:
        """Return the comparison that the next text of this version belongs to."""
        if version == self.version and self.loses.count < WATCHED_TEXTS:
            return self
        return VersionWatch(version, self.number + 1)

    def saved(self) -> list[Any]:
        """Return the state for a JSON file."""
        return [self.version, self.number, self.loses.row(), self.difference]

    @classmethod
    def restored(cls, saved: Sequence[Any]) -> Self:
        """Restore what `saved` returned; raises `ValueError` or `TypeError` if it is malformed."""
        version, number, row, difference = saved
        return cls(str(version), int(number), SignTest.from_row(row), float(difference))


@dataclass(slots=True)
class JudgeMemory:
    """Everything that a judge must not forget during a trial, or between two.

    Attributes:
        trial: the present one; None: there is none.
        watch: comparison of the version that drafts, or of the last one that was watched; None: there was none.
        kinds: texts by kind, of which the older ones have faded.
        seen: names of texts that came, the newest last.
    """

    trial: OpenTrial | None = None
    watch: VersionWatch | None = None
    kinds: dict[int, float] = field(default_factory=dict)
    seen: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def see(self, names: Iterable[bytes]) -> bool:
        """Note a text by its names, and return whether all of them are new."""
        fresh = True
        for name in names:
            fresh = fresh and name not in self.seen
            self.seen[name] = None
            self.seen.move_to_end(name)
        while len(self.seen) > MAX_SEEN:
            self.seen.popitem(last=False)
        return fresh

    def count(self, prompt_class: int) -> None:
        """Count a text of this kind."""
        self.kinds = {which: texts * (1 - 1 / RECENT_TEXTS) for which, texts in self.kinds.items()}
        self.kinds[prompt_class] = self.kinds.get(prompt_class, 0.0) + 1

    def common(self) -> tuple[int, ...]:
        """Return the kinds that a tenth or more of the newest texts have."""
        total = sum(self.kinds.values())
        return tuple(sorted(which for which, texts in self.kinds.items() if texts >= MIN_CLASS_SHARE * total))

    def saved(self) -> dict[str, Any]:
        """Return all but the names for a JSON file."""
        watch = self.watch.saved() if self.watch else None
        return {"trial": self.trial, "watch": watch, "kinds": sorted(self.kinds.items())}

    def saved_names(self) -> np.ndarray:
        """Return the names, the newest last: [n, NAME_BYTES] uint8."""
        return np.frombuffer(b"".join(self.seen), np.uint8).reshape(-1, NAME_BYTES)

    @classmethod
    def restored(cls, saved: Mapping[str, Any], names: np.ndarray) -> Self:
        """Return what was saved.

        Raises:
            KeyError, ValueError, TypeError: it is malformed.
        """
        trial = None
        if saved["trial"]:
            sequence, number, kept = saved["trial"]
            trial = OpenTrial(int(sequence), int(number), tuple(map(int, kept)))
        watch = VersionWatch.restored(saved["watch"]) if saved["watch"] else None
        kinds = {int(which): float(texts) for which, texts in saved["kinds"]}
        return cls(trial, watch, kinds, OrderedDict.fromkeys(name.tobytes() for name in names))


class TrialJournal:
    """The file of the texts of a trial, one a line.

    Args:
        path: of the file, which need not be there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, sequence: int, texts: Iterable[JudgedText] = ()) -> None:
        """Begin the trial of the candidate `sequence`, with texts that it was judged on before."""
        unfinished = self._path.with_name(f".{self._path.name}.unfinished")
        lines = [json.dumps({"sequence": sequence}), *(text.line() for text in texts)]
        unfinished.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        os.replace(unfinished, self._path)

    def append(self, text: JudgedText) -> None:
        """Add a text, which may count from now on."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text.line() + "\n")

    def resume(self, sequence: int) -> list[JudgedText]:
        """Return the texts of the candidate `sequence`, and go on behind them; a last line that was cut short is none.

        Raises:
            ValueError, TypeError, KeyError, OSError: there is no such journal, or it is broken.
        """
        first, *lines = self._path.read_text(encoding="utf-8").split("\n")
        if json.loads(first)["sequence"] != sequence:
            raise ValueError(f"{self._path} is of another trial")
        texts = [JudgedText.from_line(line) for line in lines[:-1]]  # behind the last line's end is nothing, or a part
        self.begin(sequence, texts)
        return texts


@dataclass(frozen=True, slots=True)
class Judgement:
    """The end of a candidate's trial.

    Attributes:
        better: whether it may be published.
        worse: whether training should go back to the version before, since it is known to hit less.
        why: reason in a few words.
        texts: texts that it was judged on.
        difference: mean difference of hit rates.
    """

    better: bool
    worse: bool
    why: str
    texts: int
    difference: float


class ShadowJudge:
    """The only way of records to training: each is judged on by the candidate of that time, if it is fresh.

    A candidate is better only if it hits more, and keeps its hit rate in every kind of text that is common or was when
    the trial began. How long it takes to draft needs no test: it is an adapter of its parent's graph, which is merged
    into the weights before the first token.

    A current drafter that is a version of a parent may be watched: it is to be retired if it hits less than that, over
    all texts since it was published.

    Args:
        current: drafter that candidates are compared with.
        candidates: candidates judged before, in earlier runs too; each further one needs more evidence.
        parent: drafter that the current one is compared with; None: it is not watched.
        memory: what outlives the process, for whoever saves it.
        journal: file of the trial; None: it is not to be resumed.
    """

    def __init__(
        self,
        current: Drafter,
        *,
        parent: Drafter | None = None,
        candidates: int = 0,
        memory: JudgeMemory | None = None,
        journal: TrialJournal | None = None,
    ) -> None:
        self.current = current
        self._parent = parent
        self.candidates = candidates
        self.memory = memory if memory is not None else JudgeMemory()
        self._journal = journal
        self._candidate: Drafter | None = None
        self._test = PairedTest()
        self._texts_of_key: Counter[bytes] = Counter()
        self._keys: set[bytes] = set()

    @property
    def test(self) -> PairedTest | None:
        """Comparison of the candidate with the current drafter; None without a candidate."""
        return self._test if self._candidate is not None else None

    def begin(self, candidate: Drafter, sequence: int = 0) -> None:
        """Judge this candidate from now on; it must not change any more.

        Args:
            candidate: drafter with the adapter in question.
            sequence: number of its package, by which its trial is resumed.

        Raises:
            InvalidArgument: another is being judged.
        """
        if self._candidate is not None:
            raise InvalidArgument("is being judged; one candidate at a time", field="candidate")
        if self._journal is not None:
            self._journal.begin(sequence)
        self.memory.trial = OpenTrial(sequence, self.candidates + 1, self.memory.common())
        self._open(candidate, self.memory.trial)

    def resume(self, candidate: Drafter, trial: OpenTrial, texts: Iterable[JudgedText]) -> None:
        """Go on with a trial after the texts that it has had."""
        self._open(candidate, trial)
        for text in texts:
            self.memory.see(text.names)
            self._keys.add(text.key)
            self._count(text)

    def compare_with(self, current: Drafter, parent: Drafter | None = None) -> None:
        """Compare candidates to come with this drafter, that with its parent, and drop the one that is being judged."""
        self.current, self._parent, self._candidate = current, parent, None
        self.memory.trial = None

    def take(self, record: LessonRecord) -> LessonRecord:
        """Judge the candidate on a new record if that is allowed, and return the record for training."""
        names = _names(record)
        fresh = self.memory.see(names)
        self._keys.add(record.key_salt)
        if not fresh or not can_judge(record):
            return record
        self.memory.count(record.prompt_class)
        candidate = self._candidate if self._may_count(record.key_salt) else None
        parent = self._parent if self._parent is not None and self.current.version != self._parent.version else None
        if candidate is None and parent is None:
            return record
        rate = hits_of(self.current, record).mean()
        if candidate is not None:
            difference = float(hits_of(candidate, record).mean() - rate)
            judged = JudgedText(difference, record.prompt_class, record.key_salt, names)
            if self._journal is not None:
                self._journal.append(judged)
            self._count(judged)
        if parent is not None:
            watch = self.memory.watch or VersionWatch(self.current.version, 1)
            self.memory.watch = watch.next(self.current.version)
            self.memory.watch.add(float(rate - hits_of(parent, record).mean()))
        return record

    def fallen(self) -> str:
        """Return the reason in a few words for which the current version is to be retired; empty: there is none."""
        watch = self.memory.watch
        return watch.reason if watch is not None and watch.version == self.current.version else ""

    def judgement(self) -> Judgement | None:
        """Return the end of the candidate's trial, and make one that is better the current drafter; None: not yet."""
        test, candidate = self._test, self._candidate
        if candidate is None:
            return None
        verdict, why = test.verdict
        if verdict is Verdict.OPEN and test.texts < (MAX_DOUBTED_TEXTS if test.gains else MAX_TEXTS):
            return None
        if verdict is Verdict.BETTER:
            self.current = candidate
        self._candidate = self.memory.trial = None
        worse = verdict is Verdict.WORSE and test.difference < 0
        return Judgement(verdict is Verdict.BETTER, worse, why, test.texts, test.difference)

    def _open(self, candidate: Drafter, trial: OpenTrial) -> None:
        self.candidates = trial.number
        self._candidate = candidate
        self._test = PairedTest(trial.number, trial.kept)
        self._texts_of_key.clear()

    def _count(self, text: JudgedText) -> None:
        self._test.add(text.difference, text.prompt_class)
        self._texts_of_key[text.key] += 1

    def _may_count(self, key: bytes) -> bool:
        """Return whether a key has fewer texts than its share allows, so that one that floods decides nothing alone."""
        total = self._texts_of_key.total()
        return self._texts_of_key[key] < 1 + KEY_WEIGHT * total / max(1, len(self._keys))


def _names(record: LessonRecord) -> tuple[bytes, ...]:
    """Return hashes of a record's session and of the beginning of its text."""
    begin = record.tokens[: record.first_generated + MIN_TOKENS].tobytes()
    return tuple(hashlib.sha256(name).digest()[:NAME_BYTES] for name in (b"s" + record.session_salt, b"t" + begin))
