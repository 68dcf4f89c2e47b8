"""The tests of a candidate: it passes only where it gains over all texts and keeps its hits in every kind of them."""

from __future__ import annotations

import math

import numpy as np

from outrider.cloud.learning.judge import PairedTest, Verdict
from outrider.proto.policy.sequential import ERROR, MARGIN, SignTest, candidate_error, class_margin, clipped

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


def test_a_kind_of_text_that_stays_as_it_was_lets_gains_elsewhere_pass() -> None:
    rng = np.random.default_rng(9)
    test = PairedTest()
    for _ in range(1000):
        test.add(float(rng.normal(0.1, 0.1)), PROSE)
        test.add(float(rng.normal(0.0, 0.03)), CODE)
    assert test.verdict[0] is Verdict.BETTER


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
