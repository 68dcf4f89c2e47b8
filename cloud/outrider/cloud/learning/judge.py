"""Judgement of a candidate on fresh texts before it drafts a token, with bits that are exact and cost no decoding.

With the shared noise a drafter's proposal at a position is a function of the text before it, the seed and the position;
it would be accepted if it is the text's token. So a text with its sampling gives the hits of any drafter, whoever
drafted it: `hits_of`. Candidate and current drafter are compared on the same tokens (`PairedTest`).

A text counts only if no candidate was trained on any part of it. `ShadowJudge` sees to that: records reach training
through `take` alone, which judges first and lets go afterwards. A candidate was made before the records that judge it
came; a text of which anything came before, or that equals an earlier one, judges nothing.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from outrider.cloud.learning.record import LessonRecord
from outrider.drafters.proposals import ProposalRule
from outrider.drafters.protocol import Drafter
from outrider.proto.errors import InvalidArgument
from outrider.proto.policy.sequential import PairedTest, Verdict

MAX_TOKENS = 256  # of one text
MIN_TOKENS = 8
MAX_TEXTS = 2000  # that a candidate is judged on; one that is no better by then is dropped
MAX_SEEN = 1 << 17
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
    """Return whether the drafter's proposal at each generated position [g] is the text's token: [g] bool.

    These are the bits that decoding the same text with this drafter gives. A steered drafter is judged unsteered.
    """
    state = drafter.open(text.rule)
    try:
        prompt, generated = text.tokens[: text.first_generated].tolist(), text.tokens[text.first_generated :].tolist()
        state.extend(prompt)
        proposed = state.propose_forced(generated)
    finally:
        state.close()
    hits: np.ndarray = np.array([draft.id for draft in proposed]) == np.array(generated)
    return hits


@dataclass(frozen=True, slots=True)
class Judgement:
    """The end of a candidate's trial.

    Attributes:
        better: whether it may be published.
        why: reason in a few words.
        texts: texts that it was judged on.
        difference: mean difference of hit rates.
    """

    better: bool
    why: str
    texts: int
    difference: float


class ShadowJudge:
    """The only way of records to training: each is judged on by the candidate of that time, if it is fresh.

    Args:
        current: drafter that candidates are compared with.
        candidates: candidates judged before, in earlier runs too; each further one needs more evidence.
        kept: kinds of text that must be known to keep their hit rate, however rare they are.
    """

    def __init__(self, current: Drafter, *, candidates: int = 0, kept: Collection[int] = ()) -> None:
        self.current = current
        self.candidates = candidates
        self._kept = kept
        self._candidate: Drafter | None = None
        self._test = PairedTest()
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._texts_of_key: Counter[bytes] = Counter()
        self._keys: set[bytes] = set()

    @property
    def test(self) -> PairedTest | None:
        """Comparison of the candidate with the current drafter; None without a candidate."""
        return self._test if self._candidate is not None else None

    def begin(self, candidate: Drafter) -> None:
        """Judge this candidate from now on; it must not change any more.

        Raises:
            InvalidArgument: another is being judged.
        """
        if self._candidate is not None:
            raise InvalidArgument("is being judged; one candidate at a time", field="candidate")
        self.candidates += 1
        self._candidate = candidate
        self._test = PairedTest(self.candidates, self._kept)
        self._texts_of_key.clear()

    def take(self, record: LessonRecord) -> LessonRecord:
        """Judge the candidate on a new record if that is allowed, and return the record for training."""
        fresh = self._see(record)
        self._keys.add(record.key_salt)
        if self._candidate is not None and fresh and self._may_count(record.key_salt):
            text = ShadowText.of(record)
            if text is not None:
                gained = hits_of(self._candidate, text).mean() - hits_of(self.current, text).mean()
                self._test.add(float(gained), record.prompt_class)
                self._texts_of_key[record.key_salt] += 1
        return record

    def judgement(self) -> Judgement | None:
        """Return the end of the candidate's trial, and make one that is better the current drafter; None: not yet."""
        test, candidate = self._test, self._candidate
        if candidate is None or (test.verdict is Verdict.OPEN and test.texts < MAX_TEXTS):
            return None
        better = test.verdict is Verdict.BETTER
        if better:
            self.current = candidate
        self._candidate = None
        return Judgement(better, _reason(test), test.texts, test.difference)

    def _see(self, record: LessonRecord) -> bool:
        """Note the record, and return whether its session and its beginning are new."""
        begin = record.tokens[: record.first_generated + MIN_TOKENS].tobytes()
        names = (b"s" + record.session_salt, b"t" + hashlib.sha256(begin).digest())
        fresh = not any(name in self._seen for name in names)
        for name in names:
            self._seen[name] = None
            self._seen.move_to_end(name)
        while len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        return fresh

    def _may_count(self, key: bytes) -> bool:
        """Return whether a key has fewer texts than its share allows, so that one that floods decides nothing alone."""
        total = self._texts_of_key.total()
        return self._texts_of_key[key] < 1 + KEY_WEIGHT * total / max(1, len(self._keys))


def _reason(test: PairedTest) -> str:
    where = f" of class {test.lost_class}" if test.lost_class is not None else ""
    said = f"hits {test.difference:+.3f} in {test.texts} texts{where}"
    return said if test.verdict is not Verdict.OPEN else f"{said}, which shows nothing"
