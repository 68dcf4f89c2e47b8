"""The division of drafting between an edge and a drafter beside the target."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.proto.policy.patience import Division, VerifierView, _with_costs, division_of
from outrider.proto.types import Goal

VIEW = VerifierView(0.8, step_s=0.03, row_s=0.0002, drafting_s=0.002, round_trip_s=0.01, max_drafts=16, here_s=0.002)


def beside_alone(view: VerifierView) -> Division:
    """Costs of a drafter beside the target, at its best length."""
    lengths = range(view.max_drafts + 1)
    costs = [_with_costs(view, Division(n, False, False, 0.0)) for n in lengths]
    return min(costs, key=lambda cost: cost.token_s)


views = st.builds(
    VerifierView,
    acceptance=st.floats(0.1, 0.96),
    step_s=st.floats(0.005, 0.2),
    row_s=st.floats(0.0, 0.002),
    max_drafts=st.integers(1, 16),
    drafting_s=st.one_of(st.floats(0.0002, 0.02), st.just(math.inf)),
    round_trip_s=st.floats(0.0, 0.3),
    here_s=st.floats(0.0001, 0.02),
)


def test_costs_of_drafting_beside_the_target_are_those_of_leviathans_formula() -> None:
    for drafts in (1, 4, 8):
        costs = _with_costs(VIEW, Division(drafts, False, False, 0.0))
        tokens = (1 - VIEW.acceptance ** (drafts + 1)) / (1 - VIEW.acceptance)
        step_s = VIEW.step_s + (drafts + 1) * VIEW.row_s
        assert costs.token_s == pytest.approx((step_s + drafts * VIEW.here_s) / tokens, rel=1e-3)
        assert costs.here_s == pytest.approx(drafts * VIEW.here_s / tokens, rel=1e-3)
        assert costs.step_s == pytest.approx(step_s / tokens, rel=1e-3)


@given(views)
def test_texts_are_as_fast_as_with_a_drafter_beside_the_target_alone(view) -> None:
    division = division_of(view)
    assert division.token_s <= 1.2 * beside_alone(view).token_s, "measurements are rounded"


@given(views, st.floats(0.1, 5.0))
def test_a_higher_price_never_brings_more_drafting_here(view, price) -> None:
    cheap, dear = (division_of(replace(view, price=at)) for at in (price, 2 * price))
    free = division_of(replace(view, price=0.0))
    assert dear.here_s <= 1.02 * cheap.here_s + 1e-9 <= 1.05 * free.here_s + 2e-4


@pytest.mark.parametrize(("round_trip_s", "edge_pays"), [(0.002, True), (0.01, True), (0.3, False)])
def test_an_edge_pays_where_its_drafts_come_in_time(round_trip_s, edge_pays) -> None:
    assert division_of(replace(VIEW, round_trip_s=round_trip_s)).edge_pays is edge_pays


def test_near_edges_take_all_the_drafting_from_a_slow_drafter_beside_the_target() -> None:
    division = division_of(replace(VIEW, here_s=0.008, round_trip_s=0.002))
    assert (division.here_s, division.edge_pays) == (0.0, True)
    assert beside_alone(VIEW).token_s > division.token_s


def test_many_sessions_at_one_thread_leave_the_drafting_to_edges() -> None:
    """A drafter as quick as the edge's is a slow one where 16 sessions wait for it."""
    alone, shared = (division_of(replace(VIEW, sharing=sharing)) for sharing in (1.0, 16.0))
    assert shared.edge_pays
    assert shared.here_s < 0.5 * alone.here_s
    assert shared.waits_for_edge(4, committed=0, since_miss_s=0.0, view=replace(VIEW, sharing=16.0))


def test_without_an_edge_that_drafts_all_is_drafted_here() -> None:
    division = division_of(replace(VIEW, drafting_s=math.inf))
    assert division.drafts > 0
    assert not division.edge_pays


def test_a_session_waits_for_the_edge_where_that_is_cheaper() -> None:
    division = replace(division_of(VIEW), drafts=4, edge_pays=True, price=1.0)
    assert division.waits_for_edge(4, committed=0, since_miss_s=0.006, view=VIEW), "12 ms against 16"
    assert not division.waits_for_edge(1, committed=0, since_miss_s=0.006, view=VIEW), "12 ms against 4"
    assert not division.waits_for_edge(4, committed=0, since_miss_s=0.05, view=VIEW)
    assert not replace(division, edge_pays=False).waits_for_edge(4, 0, 0.006, VIEW)


def test_fewer_drafts_pay_where_all_sessions_wait_for_the_rows_of_each() -> None:
    alone = replace(VIEW, drafting_s=math.inf, price=0.0)
    few, many = (division_of(replace(alone, row_s=sessions * 0.001)) for sessions in (1, 16))
    assert many.drafts < few.drafts


CROWD = replace(
    VIEW, acceptance=0.76, step_s=0.0165, row_s=0.0107, round_trip_s=0.015, here_s=0.00226, sharing=2.5
)  # of 64 sessions


def test_an_edge_pays_in_a_crowd_whose_rows_are_dear() -> None:
    """A step verifies what pays of all that the edge has sent, and the rest costs nobody a row."""
    division = division_of(CROWD)
    assert division.edge_pays
    assert division.here_s == 0.0
    few = min(_with_costs(replace(CROWD, max_drafts=most), division).token_s for most in (1, 2, 3))
    assert _with_costs(CROWD, division).token_s <= 1.02 * few, "whatever a step may verify"


def test_drafts_that_come_too_late_do_not_pay_in_a_crowd_either() -> None:
    assert not division_of(replace(CROWD, drafting_s=0.05)).edge_pays
    assert not division_of(replace(CROWD, round_trip_s=0.5)).edge_pays


@given(views)
def test_goal_efficiency_takes_the_least_cloud_work(view) -> None:
    thrifty = division_of(replace(view, goal=Goal.EFFICIENCY))
    for other in (division_of(view), division_of(replace(view, price=0.0))):
        assert thrifty.step_s + thrifty.here_s <= 1.01 * (other.step_s + other.here_s)


def test_views_are_alike_until_a_measurement_moves() -> None:
    assert VIEW.is_like(replace(VIEW, step_s=0.031, here_s=0.0021, acceptance=0.82))
    for other in (replace(VIEW, here_s=0.004), replace(VIEW, drafting_s=math.inf), replace(VIEW, acceptance=0.7)):
        assert not VIEW.is_like(other)


@pytest.mark.parametrize("seconds", [1e-9, 1e-6])
def test_times_next_to_nothing_are_divided_too(seconds) -> None:
    """An edge may report any time, and must not end its session by it."""
    view = replace(VIEW, drafting_s=seconds, round_trip_s=0.06, here_s=seconds)
    assert division_of(view).token_s > 0
