"""Which verified rows become lessons."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.cloud.learning.inclusion import BURST_S, FLOOR, Inclusion, LessonKind

A, M, O = LessonKind


def run(
    rate: float, step: list[int], *, steps: int = 3000, step_s: float = 0.01, seed: int = 1
) -> tuple[np.ndarray, np.ndarray, float]:
    """Rows kept and their weights by kind, a second; after the rates are known, for another `steps`."""
    inclusion = Inclusion(lambda _: rate, 0.0, seed)
    kept, weights = np.zeros(3), np.zeros(3)
    for i in range(2 * steps):
        places, of_places = inclusion.draw(step, i * step_s)
        if i >= steps:
            kinds = np.array(step)[places]
            kept += np.bincount(kinds, minlength=3)
            weights += np.bincount(kinds, of_places, minlength=3)
    seconds = steps * step_s
    return kept / seconds, weights / seconds, seconds


def test_below_the_rate_every_row_is_kept_with_weight_one() -> None:
    kept, weights, _ = run(500, [A, A, M, O])
    assert kept.tolist() == pytest.approx([200, 100, 100])
    assert weights.tolist() == pytest.approx(kept.tolist())


def test_above_the_rate_misses_come_first_and_every_kind_keeps_a_share() -> None:
    kept, weights, seconds = run(500, [A] * 20 + [M] * 3 + [O] * 4)
    offered = np.array([2000, 300, 400])
    assert kept.sum() == pytest.approx(500, rel=0.03)
    assert kept[M] == pytest.approx(300, rel=0.03)
    assert kept[A] == pytest.approx(FLOOR * 500, rel=0.15)
    assert kept[O] == pytest.approx(175, rel=0.1)
    # What is kept stands for what was offered; the spread is that of its weights.
    spread = np.sqrt(kept * seconds) / seconds * offered / kept
    assert (np.abs(weights - offered) <= 4 * spread + 0.01 * offered).all()


def test_a_flood_is_held_to_the_rate_before_rates_are_known() -> None:
    inclusion, kept = Inclusion(lambda _: 100.0, 0.0, 1), 0
    for i in range(200):
        kept += len(inclusion.draw([M] * 50, i * 0.01)[0])
    assert kept <= 100 * (BURST_S + 2.0) + 50


def test_a_rate_of_nothing_keeps_nothing() -> None:
    inclusion = Inclusion(lambda _: 0.0, 0.0, 1)
    assert sum(len(inclusion.draw([M, A], i * 0.1)[0]) for i in range(100)) == 0


def test_probabilities_do_not_see_the_rows_that_they_choose_among() -> None:
    quiet, flooded = Inclusion(lambda _: 100.0, 0.0, 1), Inclusion(lambda _: 100.0, 0.0, 1)
    for inclusion in (quiet, flooded):
        for i in range(100):
            inclusion.draw([M], i * 0.1)
    _, of_one = quiet.draw([M], 10.0)
    _, of_many = flooded.draw([M] * 1000, 10.0)
    assert of_one == [1.0]
    assert set(of_many) == {1.0}
