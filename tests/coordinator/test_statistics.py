"""The fleet's statistics: acceptance by drafter version, bounded, fading, and kept over restarts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.coordinator.statistics import MAX_EDGES, MAX_ROWS, MEMORY_TOKENS, REPORT_TOKENS, FleetStatistics
from outrider.proto.errors import InvalidArgument
from outrider.proto.types import DrafterHits, SessionReport


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


def text(hits: int, prompt: int = 1, link: int = 0, drafter: str = "d") -> SessionReport:
    """Return the report of a text in which a drafter hit so many of 64 tokens."""
    return replace(
        report(10 * hits, 640, drafter=drafter),
        drafter_hits=(DrafterHits(drafter, "1", hits, 64),),
        prompt_class=prompt,
        link_class=link,
    )


def hit_rates(statistics: FleetStatistics, prompt: int = 0, link: int = 0) -> tuple[float, float]:
    """Return the prior's rates of verified drafts and of the drafter's hits."""
    prior = statistics.prior("tiny", {("d", "1")}, 0.03, prompt, link)
    return prior.acceptance, next(each for each in prior.drafters if each.drafter == "d").acceptance


@pytest.mark.parametrize("lies_first", [False, True])
@pytest.mark.parametrize("lie", ["in their kinds of text", "in all kinds of text", "of invented drafters too"])
def test_one_key_has_a_small_share_of_a_prior_however_much_it_reports(lie: str, lies_first: bool) -> None:
    statistics = FleetStatistics()
    kinds = [(1, 0)] if lie == "in their kinds of text" else [(prompt, link) for prompt in range(16) for link in (0, 5)]
    drafters = ["d", *(f"invented-{number}" for number in range(30))] if lie == "of invented drafters too" else ["d"]

    def honest() -> None:
        for number in range(270):
            statistics.add(text(48), {("d", "1")}, tenant=f"key-{number % 9}")

    def flood() -> None:
        for number in range(3000):
            told = text(0, *kinds[number % len(kinds)], drafters[number % len(drafters)])
            statistics.add(told, {("d", "1")}, tenant="mallory")

    for reports in (flood, honest, flood) if lies_first else (honest, flood):
        reports()
    for rate in (*hit_rates(statistics), hit_rates(statistics, 1)[1]):
        assert 0.75 * 0.8 < rate <= 0.75


def test_a_key_that_is_alone_makes_a_prior_and_renews_it() -> None:
    statistics = FleetStatistics()
    for hits in (48, 16):
        for _ in range(600):
            statistics.add(text(hits), {("d", "1")}, tenant="alice")
        assert hit_rates(statistics)[1] == pytest.approx(hits / 64, abs=0.05)


def test_keys_with_equally_many_texts_count_in_full() -> None:
    statistics = FleetStatistics()
    for number in range(90):
        statistics.add(text((64, 32, 0)[number % 3]), {("d", "1")}, tenant=f"key-{number % 3}")
    (prior,) = statistics.prior("tiny", {("d", "1")}, 0.03).drafters
    assert prior.acceptance == pytest.approx(0.5)
    assert prior.trials > 0.9 * 90 * 64


def test_shares_of_keys_last_over_a_restart_without_their_names(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    statistics, again = FleetStatistics(), FleetStatistics()
    for number in range(100):
        statistics.add(text(48), {("d", "1")}, tenant=f"alice-{number % 4}")
        statistics.add(text(0), {("d", "1")}, tenant="mallory")
    statistics.save(path)
    assert "mallory" not in path.read_text()
    again.load(path)
    for each in (statistics, again):
        for _ in range(1000):
            each.add(text(0), {("d", "1")}, tenant="mallory")
    assert hit_rates(again, 1) == hit_rates(statistics, 1)
    assert min(hit_rates(again, 1)) > 0.75 * 0.7


def test_a_state_of_an_older_release_without_keys_is_read(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    statistics, again = FleetStatistics(), FleetStatistics()
    for _ in range(10):
        statistics.add(text(48), {("d", "1")})
    statistics.save(path)
    state = json.loads(path.read_text())
    for rows in ("verified", "acceptance"):
        state[rows] = [row[:-1] for row in state[rows]]
    path.write_text(json.dumps(state))
    again.load(path)
    assert hit_rates(again) == hit_rates(statistics) == pytest.approx((0.75, 0.75))


def test_whoever_invents_drafters_pushes_out_no_rows_of_other_keys() -> None:
    statistics = FleetStatistics()
    statistics.add(report(60, 100), tenant="alice")
    for i in range(2 * MAX_ROWS):
        statistics.add(report(0, 100, drafter=f"d{i}"), tenant="mallory")
    assert statistics.prior("tiny", {("d", "1")}, 0.0).acceptance == pytest.approx(0.6)


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
