"""Judgement of a candidate on fresh texts before it drafts a token, with bits that are exact and cost no decoding.

With the shared noise a drafter's proposal at a position is a function of the text before it, the seed and the position;
it would be accepted if it is the text's token. So a text with its sampling gives the hits of any drafter, whoever
drafted it: `hits_of`. Candidate and current drafter are compared on the same tokens (`PairedTest`).

A candidate passes only if several tests agree: that it gains over all texts, and that no kind of text loses its margin.
One that fails in one of them needs that very test to err, so each takes all of alpha_j (`sequential.py`; Berger 1982,
intersection of unions).

A text counts only if no candidate was trained on any part of it. `ShadowJudge` sees to that: records reach training
through `take` alone, which judges first and lets go afterwards. A candidate was made before the records that judge it
came; a text of which anything came before, or that equals an earlier one, judges nothing.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from outrider.cloud.learning.lesson_record import LessonRecord
from outrider.cloud.learning.trial import (
    NAME_BYTES,
    JudgedText,
    JudgeMemory,
    OpenTrial,
    TrialJournal,
    VersionWatch,
)
from outrider.drafters.proposals import ProposalRule
from outrider.drafters.protocol import Drafter
from outrider.proto.errors import InvalidArgument
from outrider.proto.policy.sequential import MIN_CLASS_SHARE, LossTest, SignTest, candidate_error, clipped

MAX_TOKENS = 256  # of one text
MIN_TOKENS = 8
MAX_TEXTS = 300  # that a candidate is judged on: one that gains .02 shows it in 100, and newer ones wait
MAX_DOUBTED_TEXTS = 2000  # that one is judged on which was shown to gain, and may lose in a kind of text
KEY_WEIGHT = 2.0  # limit of a key's share of the texts, in equal shares of all keys that came


@dataclass(frozen=True, slots=True)
class ShadowText:
    """A text with everything that decides whether a drafter hits.

    Attributes:
        tokens: [n] uint32, the whole text from position 0.
        first_generated: position of the first token after the prompt.
        rule: sampling with seed and noise, and the length of the prompt.
    """

    tokens: np.ndarray
    first_generated: int
    rule: ProposalRule

    @classmethod
    def of(cls, record: LessonRecord) -> ShadowText | None:
        """Return the text of a record, at most `MAX_TOKENS` of it; None: it begins in its middle or is too short."""
        tokens = record.tokens[: record.first_generated + MAX_TOKENS]
        if record.start or len(tokens) < record.first_generated + MIN_TOKENS:
            return None
        rule = ProposalRule(record.sampling, prompt_length=record.first_generated)
        return cls(tokens, record.first_generated, rule)


def hits_of(drafter: Drafter, text: ShadowText) -> np.ndarray:
    """Return whether what a drafter would have proposed at each generated position is the text's token: [g] bool.

    These are the bits that decoding the same text with this drafter gives. A steered drafter is judged unsteered.
    """
    state = drafter.open(text.rule)
    try:
        generated = text.tokens[text.first_generated :].tolist()
        state.extend(text.tokens[: text.first_generated].tolist())
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
        text = ShadowText.of(record) if fresh else None
        if text is None:
            return record
        self.memory.count(record.prompt_class)
        candidate = self._candidate if self._may_count(record.key_salt) else None
        parent = self._parent if self._parent is not None and self.current.version != self._parent.version else None
        if candidate is None and parent is None:
            return record
        rate = hits_of(self.current, text).mean()
        if candidate is not None:
            difference = float(hits_of(candidate, text).mean() - rate)
            judged = JudgedText(difference, record.prompt_class, record.key_salt, names)
            if self._journal is not None:
                self._journal.append(judged)
            self._count(judged)
        if parent is not None:
            watch = self.memory.watch or VersionWatch(self.current.version, 1)
            self.memory.watch = watch.next(self.current.version)
            self.memory.watch.add(float(rate - hits_of(parent, text).mean()))
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
