"""Sequential tests of versions: how often they err, however often one looks, and how soon they decide."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.proto.errors import InvalidArgument
from outrider.proto.policy.sequential import CLIP, ERROR, MAX_STAKE, LossTest, SignTest, candidate_error, class_margin

CODE = 3
Texts = Callable[[np.random.Generator, int], np.ndarray]


def normal(mean: float, deviation: float) -> Texts:
    return lambda rng, n: np.clip(rng.normal(mean, deviation, n), -1, 1)


def rare_gains(rng: np.random.Generator, n: int) -> np.ndarray:
    """Mean 0 in another shape: mostly small losses, now and then a gain nine times as large."""
    return np.where(rng.random(n) < 0.1, 0.225, -0.025)


def is_lost(differences: np.ndarray) -> bool:
    """Whether a version is ever shown to be worse in a sequence that is looked at after each text."""
    test = LossTest()
    for difference in differences:
        test.add(float(difference), CODE)
    return test.lost


def shown(differences: np.ndarray, error: float) -> bool:
    """Whether a sign test shows a gain at any time in a sequence that is looked at after each text."""
    test = SignTest()
    for difference in np.clip(differences / CLIP, -1, 1):
        test.add(float(difference))
        if test.shows(error):
            return True
    return False


# --- how often it errs ---


@pytest.mark.parametrize("texts", [normal(0, 0.127), normal(0, 0.045), rare_gains], ids=["wide", "narrow", "skewed"])
def test_a_worthless_version_hardly_ever_passes_though_one_looks_after_each_text(texts: Texts) -> None:
    rng = np.random.default_rng(1)
    runs, allowed = 1200, 0.05
    passed = sum(shown(texts(rng, 300), allowed) for _ in range(runs))
    # Ville's bound, and three standard deviations of the count.
    assert passed <= runs * allowed + 3 * math.sqrt(runs * allowed)


def test_of_many_worthless_candidates_of_one_name_hardly_ever_any_passes() -> None:
    rng = np.random.default_rng(2)
    fleets, candidates = 150, 12
    passed = sum(
        any(shown(rng.normal(0, 0.1, 120), candidate_error(number)) for number in range(1, candidates + 1))
        for _ in range(fleets)
    )
    assert passed <= fleets * ERROR + 3 * math.sqrt(fleets * ERROR)
    assert sum(candidate_error(number) for number in range(1, 100_000)) == pytest.approx(ERROR, rel=1e-4)


def test_the_same_look_after_each_text_at_a_naive_test_passes_worthless_versions() -> None:
    """Negative control: a t-test at 1 % that is read after each text errs far more often than 1 %."""
    rng = np.random.default_rng(3)
    runs, passed = 400, 0
    for _ in range(runs):
        differences = rng.normal(0, 0.127, 300)
        count = np.arange(1, 301)
        mean = np.cumsum(differences) / count
        deviation = np.sqrt(np.maximum(np.cumsum(differences**2) / count - mean**2, 1e-12) / count)
        passed += bool((mean / deviation)[10:].max() > 2.326)
    assert passed > 5 * ERROR * runs


def test_a_stake_never_depends_on_the_number_that_it_is_bet_on() -> None:
    rng = np.random.default_rng(4)
    one, other = SignTest(), SignTest()
    for number in rng.uniform(-1, 1, 50):
        assert one.stake == other.stake, "whatever comes next"
        one.add(float(number))
        other.add(float(number))
    one.add(1.0)
    before = other.stake
    other.add(-1.0)
    assert other.log_wealth - one.log_wealth == pytest.approx(math.log1p(-before) - math.log1p(before))


@given(st.lists(st.floats(-1, 1, allow_nan=False), max_size=60))
def test_wealth_stays_positive_and_stakes_bounded(numbers: list[float]) -> None:
    test = SignTest()
    for number in numbers:
        assert 0 <= test.stake <= MAX_STAKE
        test.add(number)
        assert math.isfinite(test.log_wealth)
        assert test.max_log_wealth >= max(0.0, test.log_wealth)


# --- how soon it decides ---


@pytest.mark.parametrize(("mean", "deviation", "expected"), [(0.103, 0.127, 25), (0.02, 0.045, 101)])
def test_gains_like_the_measured_ones_show_within_as_many_texts_as_simulated(mean, deviation, expected) -> None:
    rng = np.random.default_rng(5)
    counts = []
    for _ in range(200):
        test = SignTest()
        while not test.shows(candidate_error(1)):
            test.add(float(np.clip(rng.normal(mean, deviation) / CLIP, -1, 1)))
        counts.append(test.count)
    assert np.median(counts) <= 1.1 * expected
    assert np.quantile(counts, 0.9) <= 1.7 * expected


def test_a_version_that_loses_much_is_shown_to_be_worse_within_sixty_texts() -> None:
    rng = np.random.default_rng(6)
    assert sum(is_lost(normal(-0.1, 0.127)(rng, 60)) for _ in range(200)) >= 190


def test_a_good_version_is_hardly_ever_retired() -> None:
    rng = np.random.default_rng(7)
    runs = 400
    retired = sum(is_lost(normal(0.0, 0.1)(rng, 200)) for _ in range(runs))
    assert retired <= ERROR * runs + 3 * math.sqrt(ERROR * runs)


def test_the_errors_that_retire_a_version_add_up_however_many_kinds_come() -> None:
    """Each kind's share is fixed when it first comes: later kinds do not change it, and all fit into a half."""
    for number in (1, 4):
        half = candidate_error(number) / 2
        shares = [candidate_error(place, half) for place in range(1, 17)]
        assert half + sum(shares) < candidate_error(number)
        for place, share in enumerate(shares, 1):
            test = LossTest(number)
            for kind in range(16):
                test.add(0.0, kind)
            evidence = test._of_class[place - 1]
            evidence.max_log_wealth = -math.log(share) - 1e-6
            assert test.lost_class is None
            evidence.max_log_wealth = -math.log(share)
            assert test.lost_class == place - 1


# --- kinds of text ---


def test_a_rarer_kind_may_lose_as_much_as_costs_little_over_all() -> None:
    assert [class_margin(share) for share in (1.0, 0.5, 0.2, 0.1, 0.01)] == pytest.approx(
        [0.01, 0.01, 0.025, 0.05, 0.05]
    )


# --- saving, and refusals ---


def test_a_saved_test_goes_on_as_if_nothing_had_happened() -> None:
    rng = np.random.default_rng(10)
    test = LossTest(3)
    for _ in range(30):
        test.add(float(rng.normal(0.05, 0.1)), int(rng.integers(1, 4)))
    restored = LossTest.from_rows(json.loads(json.dumps(test.rows())))
    assert restored.rows() == test.rows()
    assert (restored.number, restored.texts, restored.difference) == (3, 30, test.difference)
    for _ in range(300):
        difference = float(rng.normal(-0.05, 0.05))
        test.add(difference, CODE)
        restored.add(difference, CODE)
        assert (restored.lost, restored.lost_class, restored.evidence) == (test.lost, test.lost_class, test.evidence)
    assert test.lost


def test_a_test_that_an_older_release_saved_keeps_what_spoke_against_a_version() -> None:
    """There each row had a test of the gain before that of the loss, and the first one the kinds to keep."""
    test = LossTest(3)
    for _ in range(10):
        test.add(-0.1, CODE)
    first, *every = test.rows()
    gain = SignTest(10, 4.0, 1.6, 0.5, 0.7).row()
    older = [[*first, 1, 3], *([kind, *gain, *loss] for kind, *loss in every)]
    assert LossTest.from_rows(older).rows() == test.rows()


@pytest.mark.parametrize(
    "rows", [[[1, 0.0]], [[1, 0.0], [-1, 1, 2.0]], [[1, 0.0], [-1, *[1, 5.0, 1.0, 0.0, 0.0] * 2]], [["x", 0.0]], []]
)
def test_a_malformed_saved_test_is_refused(rows: list[list[float]]) -> None:
    with pytest.raises((ValueError, TypeError)):
        LossTest.from_rows(rows)


@pytest.mark.parametrize("difference", [math.nan, 1.5, -math.inf])
def test_a_difference_that_can_be_none_is_refused(difference: float) -> None:
    test = LossTest()
    with pytest.raises(InvalidArgument, match="must be in"):
        test.add(difference)
    with pytest.raises(InvalidArgument, match="must be in"):
        SignTest().add(difference)
    assert test.texts == 0
    with pytest.raises(InvalidArgument, match="1 or more"):
        LossTest(0)
