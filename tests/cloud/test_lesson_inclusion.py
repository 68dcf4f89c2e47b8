"""Which verified rows become lessons: as many as are asked for, or as a share of the steps' time pays for."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.cloud.learning.inclusion import BURST_S, FLOOR, ROW_S, Inclusion, LessonKind

A, M, O = LessonKind
SHARE, STEP_S = 0.02, 0.01
STEP = [A] * 6 + [M] * 2 + [O] * 4


class Run:
    """Steps one after another, of which rows are kept, at a cost if one is given."""

    def __init__(
        self, *, rate: float = 500.0, share: float = SHARE, own_s: float = 0.0, row_s: float = 0.0, seed: int = 1
    ) -> None:
        self.now = self.steps_s = self.spent_s = 0.0
        self.inclusion = Inclusion(rate, share, 0.0, seed)
        self.own_s, self.row_s = own_s, row_s
        self.offered, self.kept, self.weights = np.zeros(3), np.zeros(3), np.zeros(3)

    def steps(self, count: int, step: list[int] = STEP) -> Run:
        for _ in range(count):
            self.now += STEP_S
            self.steps_s += STEP_S
            kept, weights = self.inclusion.draw(step, self.now, STEP_S)
            kinds = np.array(step)[kept]
            self.offered += np.bincount(step, minlength=3) * (self.inclusion._saved_s >= 0)
            self.kept += np.bincount(kinds, minlength=3)
            self.weights += np.bincount(kinds, weights, minlength=3)
            self.spend(self.own_s + self.row_s * len(kept), len(kept))
        return self

    def spend(self, cpu_s: float, rows: int = 0) -> None:
        self.inclusion.spend(cpu_s, rows)
        self.spent_s += cpu_s

    def count_from_here(self) -> Run:
        for counted in (self.offered, self.kept, self.weights):
            counted[:] = 0
        return self


def free(rate: float, seed: int = 1) -> Run:
    """Return a run of rows that cost nothing."""
    return Run(rate=rate, share=1e6, seed=seed)


# --- the rate that is asked for ---


def test_below_the_rate_every_row_is_kept_with_weight_one() -> None:
    run = free(500).steps(3000, [A, A, M, O]).count_from_here().steps(3000, [A, A, M, O])
    assert run.kept.tolist() == pytest.approx([6000, 3000, 3000])
    assert run.weights.tolist() == pytest.approx(run.kept.tolist())


def test_above_the_rate_misses_come_first_and_every_kind_keeps_a_share() -> None:
    step = [A] * 20 + [M] * 3 + [O] * 4
    run = free(500).steps(3000, step).count_from_here().steps(3000, step)
    kept, seconds = run.kept / (3000 * STEP_S), 3000 * STEP_S
    assert kept.sum() == pytest.approx(500, rel=0.03)
    assert kept[M] == pytest.approx(300, rel=0.03)
    assert kept[A] == pytest.approx(FLOOR * 500, rel=0.15)
    assert kept[O] == pytest.approx(175, rel=0.1)
    # What is kept stands for what was offered; the spread is that of its weights.
    offered = np.array([2000, 300, 400])
    spread = np.sqrt(kept * seconds) / seconds * offered / kept
    assert (np.abs(run.weights / seconds - offered) <= 4 * spread + 0.01 * offered).all()


def test_a_flood_is_held_to_the_rate_before_rates_are_known() -> None:
    assert free(100).steps(200, [M] * 50).kept.sum() <= 100 * (BURST_S + 2.0) + 50


def test_a_rate_of_nothing_keeps_nothing() -> None:
    assert free(0).steps(1000).kept.sum() == 0


def test_probabilities_do_not_see_the_rows_that_they_choose_among() -> None:
    quiet, flooded = (free(200).steps(1000, [M]).inclusion for _ in range(2))
    _, of_one = quiet.draw([M], 10.0, STEP_S)
    _, of_many = flooded.draw([M] * 1000, 10.0, STEP_S)
    assert of_one == [1.0]
    assert set(of_many) == {1.0}


# --- the rate that is paid for ---


@pytest.mark.parametrize("row_s", [1e-5, ROW_S, 1e-3, 1e-2])
def test_lessons_cost_no_more_than_their_share_whatever_a_row_costs(row_s: float) -> None:
    run = Run(row_s=row_s).steps(6000)
    assert run.spent_s <= SHARE * run.steps_s + SHARE * BURST_S + row_s * len(STEP)
    assert run.kept.sum() > 0


def test_costs_that_are_known_late_are_paid_back() -> None:
    run = Run(row_s=1e-5).steps(1000)
    run.spend(1.0)  # in the thread beside the engine's
    kept = run.kept.sum()
    run.steps(int(0.9 / (SHARE * STEP_S)))
    assert run.kept.sum() == kept, "a debt is no money"
    assert run.steps(2000).kept.sum() > kept
    assert run.spent_s / run.steps_s <= SHARE + SHARE * BURST_S / run.steps_s + 1e-3


def test_what_the_share_allows_is_used_and_goes_to_misses_first() -> None:
    run = Run(own_s=2e-5, row_s=1e-4).steps(2000).count_from_here()
    before = run.spent_s
    run.steps(6000)
    assert run.spent_s - before == pytest.approx(SHARE * 6000 * STEP_S, rel=0.1)
    assert run.kept[M] / (2 * 6000) > 4 * run.kept[A] / (6 * 6000)
    assert run.kept[A] > 0


def test_weights_stand_for_all_rows_of_the_steps_that_were_paid_for() -> None:
    run = Run(own_s=2e-5, row_s=1e-4).steps(2000).count_from_here().steps(12000)
    for kind in (A, M, O):
        chance = run.kept[kind] / run.offered[kind]
        spread = np.sqrt(run.kept[kind]) / chance
        assert abs(run.weights[kind] - run.offered[kind]) < 5 * spread + 0.01 * run.offered[kind]


def test_steps_that_cost_more_than_their_share_by_themselves_stop_no_later_ones() -> None:
    run = Run(own_s=1e-3, row_s=1e-4).steps(3000)
    run.own_s = 2e-5
    kept = run.kept.sum()
    assert run.steps(60000).kept.sum() > kept + 1000


def test_an_idle_time_saves_up_no_more_than_a_burst() -> None:
    inclusion = Inclusion(500.0, SHARE, 0.0, 1)
    inclusion.draw([], 1000.0, 1000.0)
    assert inclusion.draw([M], 1000.0, 0.0)[0]
    inclusion.spend(SHARE * BURST_S + 1e-6)
    assert not inclusion.draw([M], 1000.0, 0.0)[0]
