"""The judge of candidates: exact hits on fresh texts alone, and no candidate passes that was not better on them."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from lessons_for_tests import bigram_target, text_record

from outrider.cloud.learning.judge import (
    MAX_DOUBTED_TEXTS,
    MAX_TEXTS,
    JudgedText,
    JudgeMemory,
    Judgement,
    PairedTest,
    ShadowJudge,
    TrialJournal,
    Verdict,
    can_judge,
    hits_of,
)
from outrider.cloud.learning.lesson_record import LessonRecord
from outrider.drafters import ProposalRule, find_package
from outrider.drafters.onnx import OnnxDrafter
from outrider.drafters.protocol import TokenPrefix
from outrider.proto.errors import InvalidArgument
from outrider.proto.noise import gumbel
from outrider.proto.policy.sequential import ERROR, MARGIN, SignTest, candidate_error, class_margin, clipped
from outrider.proto.salts import salted
from outrider.proto.types import DraftToken, Sampling

VOCAB, WORDS = 48, 12
TARGET = bigram_target(VOCAB, seed=1)


class BigramDrafter:
    """A drafter of a bigram model, which proposes by the shared noise; `right` of its positions follow the target."""

    steering = None

    def __init__(self, right: float, *, version: str = "1", wrong_class_seed: int = 0) -> None:
        self.name, self.version = "bigram", version
        self.right = right
        self._seed = wrong_class_seed
        self.opened = 0

    def open(self, rule: ProposalRule) -> _BigramState:
        self.opened += 1
        return _BigramState(self, rule)

    def proposal(self, tokens: list[int], rule: ProposalRule) -> int:
        position = len(tokens)
        if np.random.default_rng([self._seed, rule.sampling.seed, position]).random() >= self.right:
            return VOCAB - 1  # which the target hardly ever takes
        noise = gumbel(rule.sampling.seed, position, np.arange(VOCAB)) if rule.sampling.temperature else 0.0
        return int((TARGET(np.array(tokens)) / (rule.sampling.temperature or 1) + noise).argmax())


class _BigramState(TokenPrefix):
    def __init__(self, drafter: BigramDrafter, rule: ProposalRule) -> None:
        super().__init__()
        self._drafter, self._rule = drafter, rule

    def propose(self, n: int) -> tuple[DraftToken, ...]:
        drafts = []
        for _ in range(n):
            drafts.append(DraftToken(self._drafter.proposal(self.tokens, self._rule)))
            self.tokens.append(drafts[-1].id)
        return tuple(drafts)

    def score(self, tokens: list[int]) -> np.ndarray:
        raise NotImplementedError


@cache
def text(
    seed: int, *, key: str = "", temperature: float = 1.0, length: int = 32, prompt_class: int = 1
) -> LessonRecord:
    return text_record(
        TARGET,
        vocab=VOCAB,
        seed=seed,
        temperature=temperature,
        length=length,
        prompt=6,
        key=key or f"key-{seed}",
        prompt_class=prompt_class,
    )


def judged(judge: ShadowJudge, seeds: range) -> int | None:
    """Show the judge texts until it has judged; return how many it took."""
    for count, seed in enumerate(seeds, 1):
        judge.take(text(seed))
        if judge.judgement() is not None:
            return count
    return None


# --- hits ---


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=3), Sampling(temperature=0.6, seed=9)])
def test_hits_are_the_bits_of_verification_of_the_same_drafter(sampling: Sampling) -> None:
    """A draft is accepted where it is the text's token; the drafter makes them token by token here."""
    package = find_package("swift")
    drafter, vocab = OnnxDrafter(package), package.vocab_size
    target = bigram_target(vocab, seed=1)
    rule = ProposalRule(sampling, prompt_length=4)

    def drafted(tokens: np.ndarray) -> int:
        state = drafter.open(rule)
        state.extend(tokens.tolist())
        (draft,) = state.propose(1)
        state.close()
        return draft.id

    def copying(tokens: np.ndarray) -> np.ndarray:
        """A target that mostly wants what the drafter proposes, so that there are hits and misses."""
        row = target(tokens)
        if len(tokens) % 3:
            row[drafted(tokens)] = 50.0
        return row - row.max() - np.log(np.exp(row - row.max()).sum())

    record = text_record(
        copying, vocab=vocab, seed=sampling.seed, temperature=sampling.temperature, prompt=4, length=20
    )
    record = replace(record, sampling=sampling)
    hits = hits_of(drafter, record)
    assert hits.tolist() == [drafted(record.tokens[:place]) == record.tokens[place] for place in range(4, 24)]
    assert 0.4 < hits.mean() < 0.9, "both happen"


def test_a_record_from_the_middle_of_a_text_or_too_short_a_one_judges_nothing() -> None:
    assert not can_judge(text(1, length=7))
    whole = text(1)
    assert can_judge(whole)
    kept = whole.positions >= 8
    middle = replace(
        whole,
        start=2,
        tokens=whole.tokens[2:],
        **{name: getattr(whole, name)[kept] for name in ("positions", "top_ids", "top_logp", "rest_logp", "weights")},
    )
    assert not can_judge(middle)


# --- judgements ---


def test_a_better_candidate_passes_and_is_what_the_next_one_is_compared_with() -> None:
    judge, better = ShadowJudge(BigramDrafter(0.5)), BigramDrafter(0.8)
    judge.begin(better)
    assert judged(judge, range(100)) is not None
    assert judge.current is better
    assert judge.test is None
    judge.begin(BigramDrafter(0.5))
    assert judge.candidates == 2
    assert judge.test.number == 2


def test_a_poisoned_candidate_is_dropped_within_sixty_texts_and_never_passes() -> None:
    current = BigramDrafter(0.6)
    judge = ShadowJudge(current)
    judge.begin(BigramDrafter(0.3))
    count = judged(judge, range(60))
    assert count is not None
    assert judge.current is current


def test_a_candidate_that_is_no_better_is_dropped_in_the_end() -> None:
    judge = ShadowJudge(BigramDrafter(0.6))
    judge.begin(BigramDrafter(0.6, wrong_class_seed=1))
    test = judge.test
    assert test is not None
    rng = np.random.default_rng(1)
    for _ in range(MAX_TEXTS):
        assert judge.judgement() is None
        test.add(float(rng.normal(0, 0.1)), 1)
    judgement = judge.judgement()
    assert (judgement.better, judgement.texts) == (False, MAX_TEXTS)
    assert "which shows nothing" in judgement.why
    assert judge.test is None


def test_a_candidate_that_gains_is_not_dropped_while_it_may_lose_a_kind() -> None:
    judge = ShadowJudge(BigramDrafter(0.6))
    judge.begin(BigramDrafter(0.6, wrong_class_seed=1))
    test = judge.test
    for _ in range(MAX_TEXTS // 2):
        test.add(0.1, 1)
        test.add(-0.03, 2)
        test.add(0.01, 2)
    assert test.texts > MAX_TEXTS
    assert judge.judgement() is None
    while test.texts < MAX_DOUBTED_TEXTS:
        test.add(0.1, 1)
        test.add(-0.03, 2)
        test.add(0.01, 2)
    judgement = judge.judgement()
    assert (judgement.better, judgement.worse) == (False, False)
    assert "may lose in class 2" in judgement.why


def test_a_candidate_that_loses_a_kind_of_text_does_not_pass() -> None:
    judge = ShadowJudge(BigramDrafter(0.55))
    judge.begin(Specialist(0.45, 0.9))
    judgement = end_of(judge, range(400))
    assert not judgement.better
    assert judgement.difference > 0.05, "over all texts it gains"
    assert "of class 1" in judgement.why


class Specialist(BigramDrafter):
    """Right in texts of even seeds, which tests give class 1, and of odd ones, class 2, as often as it is told."""

    def __init__(self, even: float, odd: float) -> None:
        super().__init__(even, wrong_class_seed=7)
        self._even, self._odd = even, odd

    def proposal(self, tokens: list[int], rule: ProposalRule) -> int:
        self.right = self._odd if rule.sampling.seed % 2 else self._even
        return super().proposal(tokens, rule)


def end_of(judge: ShadowJudge, seeds: range) -> Judgement | None:
    for seed in seeds:
        judge.take(text(seed, prompt_class=1 + seed % 2))
        if (judgement := judge.judgement()) is not None:
            return judgement
    return None


def test_a_kind_that_traffic_had_before_the_trial_is_waited_for() -> None:
    """A candidate must not pass while the one kind stays away that it forgot."""
    forgetful, mindful = ShadowJudge(BigramDrafter(0.55)), ShadowJudge(BigramDrafter(0.55))
    for judge in (forgetful, mindful):
        for seed in range(1000, 1040):
            judge.take(text(seed, prompt_class=1 + seed % 2))
    forgetful.begin(Specialist(0.9, 0.45))
    mindful.begin(Specialist(0.9, 0.8))
    for judge in (forgetful, mindful):
        assert end_of(judge, range(0, 120, 2)) is None, "only texts of class 1"
    lost = end_of(forgetful, range(1, 401, 2))
    assert not lost.better
    kept = end_of(mindful, range(1, 401, 2))
    assert kept.better
    # Negative control: a judge that has seen no other kind lets the first one pass.
    fresh = ShadowJudge(BigramDrafter(0.55))
    fresh.begin(Specialist(0.9, 0.45))
    passed = end_of(fresh, range(0, 120, 2))
    assert passed.better


def test_a_rare_kind_and_one_that_has_faded_are_not_waited_for() -> None:
    memory = JudgeMemory()
    for _ in range(100):
        memory.count(3)
    for _ in range(900):
        memory.count(1)
    assert memory.common() == (1,), "3 had a tenth, and is older"
    memory.kinds[2] = 120.0
    assert memory.common() == (1, 2)


# --- restarts ---


def test_a_bet_is_in_the_journal_before_it_counts(tmp_path: Path, monkeypatch) -> None:
    """Else an end of the process between the two would take back a bet that was seen."""
    judge = ShadowJudge(BigramDrafter(0.5), journal=TrialJournal(tmp_path / "trial"))
    judge.begin(BigramDrafter(0.9), sequence=4)

    def die(self: object, text: JudgedText) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ShadowJudge, "_count", die)
    with pytest.raises(KeyboardInterrupt):
        judge.take(text(1))
    assert judge.test.texts == 0
    assert len(TrialJournal(tmp_path / "trial").resume(4)) == 1


@pytest.mark.parametrize("cut", [1, 10, 60])
def test_a_journal_that_was_cut_short_goes_on_behind_its_last_whole_line(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "trial"
    journal = TrialJournal(path)
    journal.begin(3)
    texts = [JudgedText(0.1 * n, n, b"key", (b"a" * 16, b"b" * 16)) for n in range(3)]
    for each in texts:
        journal.append(each)
    path.write_bytes(path.read_bytes()[:-cut])
    assert journal.resume(3) == texts[:2]
    journal.append(texts[2])
    assert journal.resume(3) == texts
    with pytest.raises(ValueError, match="another trial"):
        journal.resume(4)
    path.write_text(path.read_text().replace("0.1", "none"))
    with pytest.raises(ValueError, match="Expecting value"):
        journal.resume(3)


# --- test, then train ---


def test_a_text_that_came_before_the_candidate_never_judges_it() -> None:
    """A candidate that knows by heart what it was trained on gains there alone."""
    learned = [text(seed) for seed in range(40)]
    judge = ShadowJudge(BigramDrafter(0.5))
    for record in learned:
        assert judge.take(record) is record, "without a candidate a record goes on at once"
    candidate = BigramDrafter(1.0)
    judge.begin(candidate)
    for record in learned:
        assert judge.take(record) is record
    assert judge.test.texts == 0
    assert candidate.opened == 0, "it is not even asked"
    judge.take(text(99))
    assert judge.test.texts == 1


@pytest.mark.parametrize("same", ["session", "beginning"])
def test_a_text_of_which_a_part_was_learned_never_judges(same: str) -> None:
    first, second = text(1, length=16), text(2)
    if same == "session":
        second = replace(second, session_salt=first.session_salt)
    else:
        second = replace(text(1, length=32), session_salt=salted(b"", "another"))
    judge = ShadowJudge(BigramDrafter(0.5))
    judge.take(first)
    judge.begin(BigramDrafter(1.0))
    judge.take(second)
    assert judge.test.texts == 0


def test_a_text_judges_a_candidate_once_though_it_comes_in_parts() -> None:
    judge = ShadowJudge(BigramDrafter(0.5))
    judge.begin(BigramDrafter(1.0))
    judge.take(text(1, length=16))
    judge.take(text(1, length=32))
    assert judge.test.texts == 1


def test_two_candidates_are_not_judged_at_once() -> None:
    judge = ShadowJudge(BigramDrafter(0.5))
    judge.begin(BigramDrafter(0.6))
    with pytest.raises(InvalidArgument, match="one candidate at a time"):
        judge.begin(BigramDrafter(0.7))


def test_a_key_that_floods_has_two_shares_at_most() -> None:
    judge = ShadowJudge(BigramDrafter(0.5))
    for key in range(9):  # the fleet has ten keys
        judge.take(text(1000 + key, key=f"other-{key}"))
    judge.begin(BigramDrafter(0.5, wrong_class_seed=1))
    for seed in range(60):
        judge.take(text(seed, key="flood"))
        if seed % 10 == 0:
            judge.take(text(2000 + seed, key=f"other-{seed // 10}"))
    of_flood = judge.test.texts - 6
    assert of_flood <= 3, "of 66 texts 60 came from one key"
    alone = ShadowJudge(BigramDrafter(0.5))
    alone.begin(BigramDrafter(0.5, wrong_class_seed=1))
    for seed in range(20):
        alone.take(text(seed, key="only"))
    assert alone.test.texts == 20, "the only key of a fleet is not held back"


# === the tests of a candidate ========================================================================================


CODE, PROSE = 3, 1


def test_later_candidates_need_more_evidence() -> None:
    tests = [PairedTest(number) for number in (1, 10)]
    texts = 0
    while tests[1].verdict[0] is Verdict.OPEN:
        texts += 1
        for test in tests:
            test.add(0.05, CODE)
        if tests[0].verdict[0] is Verdict.OPEN:
            first = texts
    assert first < texts - 1


def test_a_kind_of_text_that_loses_two_hundredths_is_no_price_for_gains_elsewhere() -> None:
    rng = np.random.default_rng(8)
    better, runs = 0, 150
    for _ in range(runs):
        test = PairedTest()
        for _ in range(400):
            test.add(float(rng.normal(0.1, 0.1)), PROSE)
            test.add(float(rng.normal(-0.02, 0.045)), CODE)
            if test.verdict[0] is Verdict.BETTER:
                better += 1
                break
            if test.verdict[0] is Verdict.WORSE:
                assert test.lost_class == CODE
                break
    assert better <= runs * ERROR + 3 * math.sqrt(runs * ERROR)


def test_a_kind_that_loses_hardly_ever_passes_in_any_of_many_candidates() -> None:
    """The kind loses what the margin is, no less, and all else gains: the worst case of the bound."""
    rng = np.random.default_rng(11)
    fleets, passed = 60, 0
    for _ in range(fleets):
        for number in range(1, 6):
            test = PairedTest(number)
            for gain in rng.normal(-MARGIN, 0.05, 150):
                test.add(0.1, PROSE)
                test.add(float(gain), CODE)
            assert test.gains
            passed += test.verdict[0] is Verdict.BETTER
    assert passed <= fleets * ERROR + 3 * math.sqrt(fleets * ERROR)


def test_a_rarer_kind_that_loses_its_margin_hardly_ever_passes_either() -> None:
    """A fifth of the texts may lose .025 each; its share is less at times, and its margin more, never for the bound."""
    rng = np.random.default_rng(12)
    runs, passed = 150, 0
    for _ in range(runs):
        test = PairedTest()
        for place in range(600):
            rare = place % 5 == 4
            test.add(float(rng.normal(-class_margin(0.2), 0.05)) if rare else 0.1, CODE if rare else PROSE)
        assert test.gains
        passed += test.verdict[0] is Verdict.BETTER
    assert passed <= runs * ERROR + 3 * math.sqrt(runs * ERROR)


def test_kinds_of_few_texts_do_not_hold_up_a_version_that_gains_in_all() -> None:
    """The mix of a stream of sums, by kind its share, and mean and deviation of the gain that was measured there."""
    rng = np.random.default_rng(13)
    shares, gains, deviations = [0.78, 0.16, 0.06], [0.102, 0.123, 0.046], [0.085, 0.116, 0.071]
    counts = []
    for _ in range(40):
        test = PairedTest()
        while test.verdict[0] is Verdict.OPEN:
            kind = rng.choice(3, p=shares)
            test.add(float(rng.normal(gains[kind], deviations[kind])), int(kind))
        assert test.verdict[0] is Verdict.BETTER
        counts.append(test.texts)
    assert np.median(counts) <= 120


def test_without_the_kinds_the_same_version_would_pass() -> None:
    """Negative control of the test before: over all texts together it gains."""
    rng = np.random.default_rng(8)
    both = np.stack([rng.normal(0.1, 0.1, 400), rng.normal(-0.02, 0.045, 400)], axis=1).ravel()
    test = SignTest()
    for difference in both:
        test.add(clipped(float(difference)))
    assert test.shows(candidate_error(1))


def test_a_kind_of_text_that_must_be_kept_is_waited_for_and_a_rare_one_is_not() -> None:
    waiting, going = PairedTest(kept=(CODE,)), PairedTest()
    for test in (waiting, going):
        test.add(0.1, 2)  # one text of another kind
        for _ in range(200):
            test.add(0.1, PROSE)
    assert going.verdict[0] is Verdict.BETTER
    assert waiting.verdict[0] is Verdict.OPEN
    assert waiting.doubtful_classes == {CODE}
    for _ in range(200):
        waiting.add(0.0, CODE)
    assert waiting.verdict[0] is Verdict.BETTER


def test_a_loss_within_the_margin_is_none() -> None:
    test = PairedTest()
    for _ in range(500):
        test.add(0.2, PROSE)
        test.add(-MARGIN / 2, CODE)
    assert test.verdict[0] is Verdict.BETTER
