"""The fleet's statistics: acceptance by drafter version, bounded, fading, and kept over restarts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from outrider.coordinator.statistics import MAX_EDGES, MAX_ROWS, MEMORY_TOKENS, REPORT_TOKENS, FleetStatistics
from outrider.proto.errors import InvalidArgument
from outrider.proto.types import SessionReport


def report(
    accepted: int, verified: int, *, drafter: str = "d", version: str = "1", model: str = "tiny"
) -> SessionReport:
    return SessionReport(
        session="s",
        model=model,
        verifier="v",
        drafter=drafter,
        drafter_version=version,
        accepted_tokens=accepted,
        verified_tokens=verified,
    )


def test_acceptance_is_accepted_over_judged_of_the_fitting_drafters() -> None:
    statistics = FleetStatistics()
    statistics.add(report(60, 100))
    statistics.add(report(90, 100))
    statistics.add(report(0, 100, drafter="other"))
    prior = statistics.prior("tiny", {("d", "1")}, step_s=0.03)
    assert prior.acceptance == pytest.approx(0.75)
    assert prior.step_s == 0.03


def test_without_news_of_the_fitting_drafters_any_of_the_model_serve_as_prior() -> None:
    statistics = FleetStatistics()
    statistics.add(report(60, 100))
    assert statistics.prior("tiny", {("d", "2")}, 0.0).acceptance == pytest.approx(0.6)
    assert statistics.prior("big", {("d", "1")}, 0.0).acceptance == 0, "another model says nothing"


def test_one_endless_session_cannot_outweigh_all_others() -> None:
    statistics = FleetStatistics()
    for _ in range(3):
        statistics.add(report(0, REPORT_TOKENS))
    statistics.add(report(10**12, 10**12))
    assert statistics.prior("tiny", {("d", "1")}, 0.0).acceptance == pytest.approx(0.25)


def test_old_sessions_fade() -> None:
    statistics = FleetStatistics()
    for accepted in (0, REPORT_TOKENS):
        for _ in range(3 * MEMORY_TOKENS // REPORT_TOKENS):
            statistics.add(report(accepted, REPORT_TOKENS))
    assert statistics.prior("tiny", {("d", "1")}, 0.0).acceptance > 0.9


def test_a_flood_of_invented_drafters_keeps_the_table_bounded() -> None:
    statistics = FleetStatistics()
    for i in range(MAX_ROWS + 10):
        statistics.add(report(1, 1, drafter=f"d{i}"))
    assert len(statistics._rows) == MAX_ROWS
    assert len(statistics.recent) == 64


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("accepted_tokens", {"accepted_tokens": 2, "verified_tokens": 1}),
        ("seconds", {"seconds": float("inf")}),
        ("round_trip_s", {"round_trip_s": -1.0}),
        ("drafter", {"drafter": "x" * 1000}),
        ("session", {"session": ""}),
    ],
)
def test_impossible_numbers_are_refused_by_field_and_not_counted(field: str, wrong: dict[str, object]) -> None:
    statistics = FleetStatistics()
    values: dict[str, object] = {"session": "s", "model": "tiny", "verifier": "v", **wrong}
    with pytest.raises(InvalidArgument) as refusal:
        statistics.add(SessionReport(**values))  # type: ignore[arg-type]
    assert refusal.value.field == f"report.{field}"
    assert not statistics.recent


def test_statistics_survive_a_restart(tmp_path: Path) -> None:
    before, after = FleetStatistics(), FleetStatistics()
    before.add(report(60, 100))
    before.leases_granted = 7
    before.save(tmp_path / "state.json")
    after.load(tmp_path / "state.json")
    assert after.leases_granted == 7
    assert after.prior("tiny", {("d", "1")}, 0.0) == before.prior("tiny", {("d", "1")}, 0.0)
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize(
    "content",
    [
        *(None, "", "{}", "[]", '{"verified": [[1]], "leases_granted": 0}'),
        '{"verified": [], "leases_granted": Infinity}',
        '{"verified": [], "leases_granted": 1e999}',
        '{"verified": [["m", "d", "v", NaN, 5]], "leases_granted": 3}',
        '{"verified": [["m", "d", "v", 1' + "0" * 400 + ', 5]], "leases_granted": 3}',
        "[" * 100_000 + "]" * 100_000,
        '{"verified": [], "leases_granted": 3, "acceptance": ' + "[" * 100_000 + "]" * 100_000 + "}",
    ],
)
def test_a_missing_or_broken_state_file_starts_from_nothing(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "state.json").write_text(content)
    statistics = FleetStatistics()
    statistics.load(tmp_path / "state.json")
    assert statistics.leases_granted == 0


def test_each_edge_is_known_by_its_newest_report_and_the_silent_ones_by_none() -> None:
    now_s = 100.0
    statistics = FleetStatistics(clock=lambda: now_s)
    for name in ("kitchen", "garden", "kitchen", ""):
        now_s += 1
        statistics.add(replace(report(1, 2), edge=name, seconds=now_s))
    now_s += 1
    assert [(e.edge, e.sessions, e.age_s, e.last.seconds) for e in statistics.edges] == [
        ("kitchen", 2, 2.0, 103.0),
        ("garden", 1, 3.0, 102.0),
    ]


def test_a_flood_of_invented_edges_forgets_the_oldest() -> None:
    statistics = FleetStatistics()
    for i in range(MAX_EDGES + 10):
        statistics.add(replace(report(1, 1), edge=f"e{i}"))
    assert len(statistics.edges) == MAX_EDGES
    assert statistics.edges[0].edge == f"e{MAX_EDGES + 9}"
