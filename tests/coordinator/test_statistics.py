"""The fleet's statistics: acceptance by drafter version, bounded, fading, and kept over restarts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from outrider.coordinator.statistics import MAX_EDGES, FleetStatistics
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


def text(hits: int, prompt: int = 1, link: int = 0, drafter: str = "d") -> SessionReport:
    """Return the report of a text in which a drafter hit so many of 64 tokens."""
    return replace(
        report(10 * hits, 640, drafter=drafter),
        drafter_hits=(DrafterHits(drafter, "1", hits, 64),),
        prompt_class=prompt,
        link_class=link,
    )


def hit_rate(statistics: FleetStatistics, prompt: int = 0, link: int = 0) -> float:
    """Return the drafter's rate of hits that the next text is told."""
    priors = statistics.acceptance.prior("tiny", prompt, link)
    return next(each for each in priors if each.drafter == "d").acceptance


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
    for rate in (hit_rate(statistics), hit_rate(statistics, 1)):
        assert 0.75 * 0.8 < rate <= 0.75


def test_a_key_that_is_alone_makes_a_prior_and_renews_it() -> None:
    statistics = FleetStatistics()
    for hits in (48, 16):
        for _ in range(600):
            statistics.add(text(hits), {("d", "1")}, tenant="alice")
        assert hit_rate(statistics) == pytest.approx(hits / 64, abs=0.05)


def test_keys_with_equally_many_texts_count_in_full() -> None:
    statistics = FleetStatistics()
    for number in range(90):
        statistics.add(text((64, 32, 0)[number % 3]), {("d", "1")}, tenant=f"key-{number % 3}")
    (prior,) = statistics.acceptance.prior("tiny", 0, 0)
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
    assert hit_rate(again, 1) == hit_rate(statistics, 1) > 0.75 * 0.7


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
    before.add(text(48))
    before.leases_granted = 7
    before.save(tmp_path / "state.json")
    after.load(tmp_path / "state.json")
    assert after.leases_granted == 7
    assert hit_rate(after) == hit_rate(before) == 0.75
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


WHOLE = '{"leases_granted": %s, "edges": 0, "versions": {}, "acceptance": %s}'


@pytest.mark.parametrize(
    "content",
    [
        *(None, "", "{}", "[]", WHOLE % (3, "[[1]]")),
        WHOLE % ("Infinity", "[]"),
        WHOLE % ("1e999", "[]"),
        WHOLE % (3, '[["m", "d", "v", 1, 0, NaN, 5, ""]]'),
        WHOLE % (3, '[["m", "d", "v", 1, 0, 1, 1' + "0" * 400 + ', ""]]'),
        "[" * 100_000 + "]" * 100_000,
        WHOLE % (3, "[" * 100_000 + "]" * 100_000),
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


def test_coordinators_in_containers_never_write_one_file_together(tmp_path: Path, monkeypatch) -> None:
    beside: list[str] = []
    replace_file = Path.replace

    def note(path: Path, target: Path) -> Path:
        beside.append(path.name)
        return replace_file(path, target)

    monkeypatch.setattr(Path, "replace", note)
    for _ in range(2):  # both are process 1 of their containers
        FleetStatistics().save(tmp_path / "state.json")
    assert len(set(beside)) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_a_state_that_cannot_be_saved_leaves_nothing_beside_it(tmp_path: Path) -> None:
    (tmp_path / "state.json").mkdir()
    with pytest.raises(OSError, match="state"):
        FleetStatistics().save(tmp_path / "state.json")
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
