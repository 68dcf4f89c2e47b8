"""The budget of lessons: a share of the steps' time, whatever a row costs."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.cloud.learning.cpu_share import BURST_S, ROW_S, LessonBudget
from outrider.cloud.learning.inclusion import Inclusion, LessonKind

A, M, O = LessonKind
SHARE, STEP_S = 0.02, 0.01
STEP = [A] * 6 + [M] * 2 + [O] * 4


class Run:
    """Steps one after another, of which rows are kept at some cost."""

    def __init__(self, *, step_s: float = 0.0, row_s: float = 0.0, positions_s: float = 500.0, seed: int = 1) -> None:
        self.now = 0.0
        self.budget = LessonBudget(SHARE, 0.0)
        self.inclusion = Inclusion(lambda now: min(positions_s, self.budget.rows_s(now)), 0.0, seed)
        self.step_s, self.row_s = step_s, row_s
        self.offered, self.kept, self.weights = np.zeros(3), np.zeros(3), np.zeros(3)

    def steps(self, count: int) -> Run:
        for _ in range(count):
            self.now += STEP_S
            paid = self.budget.step(STEP_S)
            kept, weights = self.inclusion.draw(STEP, self.now, paid=paid)
            kinds = np.array(STEP)[kept]
            self.offered += np.bincount(STEP, minlength=3) * paid
            self.kept += np.bincount(kinds, minlength=3)
            self.weights += np.bincount(kinds, weights, minlength=3)
            self.budget.spend(self.step_s + self.row_s * len(kept), len(kept))
        return self

    @property
    def share(self) -> float:
        return self.budget.spent_s / self.budget.steps_s


@pytest.mark.parametrize("row_s", [1e-5, ROW_S, 1e-3, 1e-2])
def test_lessons_cost_no_more_than_their_share_whatever_a_row_costs(row_s) -> None:
    run = Run(row_s=row_s).steps(6000)
    one_step = row_s * len(STEP)
    assert run.budget.spent_s <= SHARE * run.budget.steps_s + SHARE * BURST_S + one_step
    assert run.kept.sum() > 0


def test_costs_that_are_known_late_are_paid_back() -> None:
    run = Run(row_s=1e-5).steps(1000)
    run.budget.spend(1.0)  # in the thread beside the engine's
    kept = run.kept.sum()
    run.steps(int(0.9 / (SHARE * STEP_S)))
    assert run.kept.sum() == kept, "a debt is no money"
    assert run.steps(2000).kept.sum() > kept
    assert run.share <= SHARE + SHARE * BURST_S / run.budget.steps_s + 1e-3


def test_what_the_share_allows_is_used_and_goes_to_misses_first() -> None:
    run = Run(step_s=2e-5, row_s=1e-4).steps(2000)
    before, kept = run.budget.spent_s, run.kept.copy()
    run.steps(6000)
    assert run.budget.spent_s - before == pytest.approx(SHARE * 6000 * STEP_S, rel=0.1)
    of_kinds = run.kept - kept
    assert of_kinds[M] / (2 * 6000) > 4 * of_kinds[A] / (6 * 6000)
    assert of_kinds[A] > 0


def test_cheap_rows_are_kept_at_the_rate_that_was_asked_for() -> None:
    run = Run(row_s=1e-6).steps(3000)
    before = run.kept.sum()
    assert run.steps(3000).kept.sum() - before == pytest.approx(500 * 3000 * STEP_S, rel=0.05)


def test_weights_stand_for_all_rows_of_the_steps_that_were_paid_for() -> None:
    run = Run(step_s=2e-5, row_s=1e-4).steps(2000)
    run.offered[:], run.kept[:], run.weights[:] = 0, 0, 0
    run.steps(12000)
    for kind in (A, M, O):
        chance = run.kept[kind] / run.offered[kind]
        spread = np.sqrt(run.kept[kind]) / chance
        assert abs(run.weights[kind] - run.offered[kind]) < 5 * spread + 0.01 * run.offered[kind]


def test_steps_that_cost_more_than_their_share_by_themselves_stop_no_later_ones() -> None:
    run = Run(step_s=1e-3, row_s=1e-4).steps(3000)
    run.step_s = 2e-5
    kept = run.kept.sum()
    run.steps(60000)
    assert run.kept.sum() > kept + 1000


def test_an_idle_time_saves_up_no_more_than_a_burst() -> None:
    run = Run(row_s=1e-4)
    run.budget.step(1000.0)
    assert run.budget.step(0.0)
    run.budget.spend(SHARE * BURST_S + 1e-6)
    assert not run.budget.step(0.0)
