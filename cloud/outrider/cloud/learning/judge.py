"""Judgement of a candidate on fresh texts before it drafts a token, with bits that are exact and cost no decoding.

With the shared noise a drafter's proposal at a position is a function of the text before it, the seed and the position;
it would be accepted if it is the text's token. So a text with its sampling gives the hits of any drafter, whoever
drafted it: `reading_of`. Candidate and current drafter are compared on the same tokens (`PairedTest`).

A candidate passes only if several tests agree: that it gains over all texts, and that no kind of text loses its margin.
One that fails in one of them needs that very test to err, so each takes all of alpha_j (`sequential.py`; Berger 1982,
intersection of unions).

A text counts only if no candidate was trained on any part of it. `ShadowJudge` sees to that: records reach training
through `take` alone, which judges first and lets go afterwards. A candidate was made before the records that judge it
came; a text of which anything came before, or that equals an earlier one, judges nothing.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
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
from outrider.drafters.onnx import OnnxDrafter
from outrider.drafters.proposals import ProposalRule
from outrider.drafters.protocol import Drafter, DraftState
from outrider.proto.errors import InvalidArgument
from outrider.proto.policy.sequential import (
    MAX_SLOWDOWN,
    MIN_CLASS_SHARE,
    LossTest,
    SignTest,
    candidate_error,
    clipped,
)

MAX_TOKENS = 256  # of one text
MIN_TOKENS = 8
MAX_TEXTS = 300  # that a candidate is judged on: one that gains .02 shows it in 100, and newer ones wait
MAX_DOUBTED_TEXTS = 2000  # that one is judged on which was shown to gain, and may lose in a kind of text
KEY_WEIGHT = 2.0  # limit of a key's share of the texts, in equal shares of all keys that came
TIMED_TOKENS = 8  # that are drafted for their time, twice
SLOWDOWN_CLIP = 0.1  # of its logarithm


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


@dataclass(frozen=True, slots=True)
class ShadowReading:
    """A drafter's reading of a text.

    Attributes:
        hits: [g] bool, whether its proposal at each generated position is the text's token.
        draft_s: time to draft a token of it, seconds; 0: not measured, or it drafted none.
    """

    hits: np.ndarray
    draft_s: float


def reading_of(drafter: Drafter, text: ShadowText, clock: Callable[[], float] | None = None) -> ShadowReading:
    """Return what the drafter would have proposed all along a text, and how long it takes to draft its beginning.

    The hits are the bits that decoding the same text with this drafter gives. A steered drafter is judged unsteered.

    Args:
        drafter: any.
        text: text with its sampling.
        clock: seconds that this thread has worked, since a wall clock counts what others do meanwhile; None: the time
            is not measured.
    """
    state = drafter.open(text.rule)
    try:
        prompt, generated = text.tokens[: text.first_generated].tolist(), text.tokens[text.first_generated :].tolist()
        state.extend(prompt)
        proposed = state.propose_forced(generated)
        draft_s = min(_draft_s(state, len(prompt), clock) for _ in range(2)) if clock is not None else 0.0
    finally:
        state.close()
    return ShadowReading(np.array([draft.id for draft in proposed]) == np.array(generated), draft_s)


def _draft_s(state: DraftState, length: int, clock: Callable[[], float]) -> float:
    state.truncate(length)
    began = clock()
    drafts = state.propose(TIMED_TOKENS)
    return (clock() - began) / len(drafts) if drafts else 0.0


def _differ_in_graph(one: Drafter, other: Drafter) -> bool:
    """Return whether one may take longer for a token than the other: those of one graph differ in numbers alone."""
    if not (isinstance(one, OnnxDrafter) and isinstance(other, OnnxDrafter)):
        return True
    return one.package.graph_sha256 != other.package.graph_sha256


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


class PaceTest:
    """Comparison of a version's time to draft a token with that of its parent, one ratio a text.

    It bets on both sides of the limit `MAX_SLOWDOWN`, with logarithms, which noise of both times leaves in the middle.
    """

    def __init__(self) -> None:
        self._below, self._above = SignTest(), SignTest()
        self._logs = 0.0

    @property
    def slowdown(self) -> float:
        """Geometric mean of the ratios; 1 without any."""
        return math.exp(self._logs / max(1, self._below.count))

    def add(self, slowdown: float) -> None:
        """Count a ratio of times, own over parent's; raises `InvalidArgument` unless it is finite and above 0."""
        if not 0 < slowdown < math.inf:
            raise InvalidArgument(f"must be finite and above 0, not {slowdown}", field="slowdown")
        spare = (math.log(MAX_SLOWDOWN) - math.log(slowdown)) / SLOWDOWN_CLIP
        self._below.add(min(1.0, max(-1.0, spare)))
        self._above.add(min(1.0, max(-1.0, -spare)))
        self._logs += math.log(slowdown)

    def shows_kept(self, error: float) -> bool:
        """Return whether drafting is shown to take less than the limit; wrong with a chance of `error`, ever."""
        return self._below.shows(error)

    def shows_slower(self, error: float) -> bool:
        """Return whether drafting is shown to take more than the limit; wrong with a chance of `error`, ever."""
        return self._above.shows(error)


@dataclass(frozen=True, slots=True)
class Judgement:
    """The end of a candidate's trial.

    Attributes:
        better: whether it may be published.
        worse: whether training should go back to the version before: it is known to hit less, or to take longer.
        why: reason in a few words.
        texts: texts that it was judged on.
        difference: mean difference of hit rates.
    """

    better: bool
    worse: bool
    why: str
    texts: int
    difference: float


class _Readings:
    """Readings of one text by several drafters, each made once."""

    def __init__(self, text: ShadowText) -> None:
        self._text = text
        self._made: dict[int, ShadowReading] = {}

    def of(self, drafter: Drafter, clock: Callable[[], float] | None = None) -> ShadowReading:
        """Return a drafter's reading, with its time if it is the first and there is a clock."""
        if id(drafter) not in self._made:
            self._made[id(drafter)] = reading_of(drafter, self._text, clock)
        return self._made[id(drafter)]

    def difference(self, drafter: Drafter, other: Drafter) -> float:
        """Return the hit rate of a drafter less that of another."""
        return float(self.of(drafter).hits.mean() - self.of(other).hits.mean())


class ShadowJudge:
    """The only way of records to training: each is judged on by the candidate of that time, if it is fresh.

    A candidate is better only if it hits more, keeps its hit rate in every kind of text that is common or was when the
    trial began, and takes no longer to draft. That needs no test where both have one graph, as an adapter and its
    parent do: it is merged into the weights before the first token.

    A current drafter that is a version of a parent may be watched: it is to be retired if it hits less than that, over
    all texts since it was published.

    Args:
        current: drafter that candidates are compared with.
        candidates: candidates judged before, in earlier runs too; each further one needs more evidence.
        parent: drafter that the current one is compared with; None: it is not watched.
        kept: kinds of text that must be known to keep their hit rate, however rare they are.
        memory: what outlives the process, for whoever saves it.
        journal: file of the trial; None: it is not to be resumed.
        clock: seconds that this thread has worked.
    """

    def __init__(
        self,
        current: Drafter,
        *,
        parent: Drafter | None = None,
        candidates: int = 0,
        kept: Collection[int] = (),
        memory: JudgeMemory | None = None,
        journal: TrialJournal | None = None,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.current = current
        self._parent = parent
        self.candidates = candidates
        self.memory = memory if memory is not None else JudgeMemory()
        self._kept = kept
        self._journal = journal
        self._clock = clock
        self._candidate: Drafter | None = None
        self._test = PairedTest()
        self._pace: PaceTest | None = None
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
        kept = tuple(sorted({*self._kept, *self.memory.common()}))
        if self._journal is not None:
            self._journal.begin(sequence)
        self.memory.trial = OpenTrial(sequence, self.candidates + 1, kept)
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
        readings = _Readings(text)
        if self._candidate is not None and self._may_count(record.key_salt):
            difference, slowdown = self._compared(self._candidate, readings)
            judged = JudgedText(difference, slowdown, record.prompt_class, record.key_salt, names)
            if self._journal is not None:
                self._journal.append(judged)
            self._count(judged)
        if self._parent is not None and self.current.version != self._parent.version:
            watch = self.memory.watch or VersionWatch(self.current.version, 1)
            self.memory.watch = watch.next(self.current.version)
            self.memory.watch.add(readings.difference(self.current, self._parent))
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
        verdict, why = self._verdict()
        if verdict is Verdict.OPEN and test.texts < (MAX_DOUBTED_TEXTS if test.gains else MAX_TEXTS):
            return None
        if verdict is Verdict.BETTER:
            self.current = candidate
        self._candidate = self.memory.trial = None
        slower = self._pace is not None and self._pace.shows_slower(candidate_error(test.number))
        worse = slower or (verdict is Verdict.WORSE and test.difference < 0)
        return Judgement(verdict is Verdict.BETTER, worse, why, test.texts, test.difference)

    def _open(self, candidate: Drafter, trial: OpenTrial) -> None:
        self.candidates = trial.number
        self._candidate = candidate
        self._test = PairedTest(trial.number, trial.kept)
        self._pace = PaceTest() if _differ_in_graph(candidate, self.current) else None
        self._texts_of_key.clear()

    def _compared(self, candidate: Drafter, readings: _Readings) -> tuple[float, float]:
        """Return the difference of hit rates and the ratio of times; either is first in turn, since caches are cold."""
        for drafter in [candidate, self.current][:: -1 if self._test.texts % 2 else 1]:
            readings.of(drafter, self._clock if self._pace is not None else None)
        own, other = readings.of(candidate).draft_s, readings.of(self.current).draft_s
        slowdown = own / other if own > 0 and other > 0 else 0.0
        return readings.difference(candidate, self.current), slowdown

    def _count(self, text: JudgedText) -> None:
        self._test.add(text.difference, text.prompt_class)
        if self._pace is not None and text.slowdown:
            self._pace.add(text.slowdown)
        self._texts_of_key[text.key] += 1

    def _verdict(self) -> tuple[Verdict, str]:
        """Return the outcome so far, and the reason for it in a few words."""
        pace, error = self._pace, candidate_error(self._test.number)
        if pace is not None and pace.shows_slower(error):
            return Verdict.WORSE, f"drafting takes {pace.slowdown:.2f} times as long"
        verdict, why = self._test.verdict
        if verdict is Verdict.BETTER and pace is not None and not pace.shows_kept(error):
            return Verdict.OPEN, f"{why}, and may draft more slowly"
        return verdict, why

    def _may_count(self, key: bytes) -> bool:
        """Return whether a key has fewer texts than its share allows, so that one that floods decides nothing alone."""
        total = self._texts_of_key.total()
        return self._texts_of_key[key] < 1 + KEY_WEIGHT * total / max(1, len(self._keys))


def _names(record: LessonRecord) -> tuple[bytes, ...]:
    """Return hashes of a record's session and of the beginning of its text."""
    begin = record.tokens[: record.first_generated + MIN_TOKENS].tobytes()
    return tuple(hashlib.sha256(name).digest()[:NAME_BYTES] for name in (b"s" + record.session_salt, b"t" + begin))
