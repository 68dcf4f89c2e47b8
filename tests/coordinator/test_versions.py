"""States of a drafter's versions: the newest is current at once, and gives way where edges' texts show it worse."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cluster import ScriptedCluster, ready, write_package

from outrider.coordinator.statistics import FleetStatistics
from outrider.coordinator.version_trials import COMPARED_S, COMPARED_TEXTS, KEY_MARGIN, MAX_VOTERS, VersionState
from outrider.proto.cluster_status import VersionStatus
from outrider.proto.policy.sequential import MAX_SLOWDOWN, candidate_error
from outrider.proto.types import DrafterHits, LeaseRequest, SessionReport

Coordinating = Callable[..., AbstractAsyncContextManager[Any]]
PROSE, CODE = 1, 3
DAY_S = 86400.0
CURRENT, PREVIOUS, RETIRED = VersionState


class Fleet:
    """Edges that report texts of one drafter; each text has a hit rate of its own, which its versions share."""

    def __init__(self, votes_a_day: int = 1, seed: int = 0) -> None:
        self.now_s = 1000 * DAY_S
        self.votes_a_day = votes_a_day
        self.rng = np.random.default_rng(seed)
        self.statistics = self.coordinator()

    def coordinator(self) -> FleetStatistics:
        return FleetStatistics(unix_clock=lambda: self.now_s, votes_a_day=self.votes_a_day)

    def publish(self, *versions: str) -> None:
        """Let the catalogue hold these versions, the oldest first, which are numbers or come after them."""
        offered = [("swift", version, int(version) if version.isdigit() else 99) for version in versions]
        self.statistics.look(reversed(offered))

    def report(
        self, edge: str, gains: dict[str, float], prompt: int = PROSE, tokens: int = 128, **times: float
    ) -> SessionReport:
        """Return the report of a text in which each version gains so much over the text's own hit rate."""
        rate = self.rng.uniform(0.4, 0.7)
        hits = tuple(
            DrafterHits(
                "swift", version, int((self.rng.random(tokens) < rate + gain).sum()), tokens, times.get(version, 0)
            )
            for version, gain in gains.items()
        )
        return SessionReport("s", "tiny", "v", edge=edge, drafter_hits=hits, prompt_class=prompt)

    def texts(self, count: int, gains: dict[str, float], prompt: int = PROSE, **times: float) -> None:
        """Report a text of each of `count` edges, on a day of their own."""
        self.now_s += DAY_S
        for edge in range(count):
            self.statistics.add(self.report(f"edge-{edge}", gains, prompt, **times))

    def until(self, version: str, state: VersionState, gains: dict[str, float], limit: int = 2000) -> int:
        """Report texts of one edge after the other until the version is in this state, and return how many it took."""
        for count in range(1, limit + 1):
            self.statistics.add(self.report(f"edge-{count}-{self.now_s}", gains))
            if self.states[version] is state:
                return count
        raise AssertionError(f"still {self.states} after {limit} texts")

    @property
    def states(self) -> dict[str, VersionState]:
        return {version: known.state for _, version, known in self.statistics.versions.known()}

    def status(self, version: str) -> VersionStatus:
        return next(shown for shown in self.statistics.version_states if shown.version == version)


def compared(votes_a_day: int = 1, seed: int = 0) -> Fleet:
    """Return a fleet whose current version, 2, is compared with the one before it."""
    fleet = Fleet(votes_a_day, seed)
    fleet.publish("1")
    fleet.publish("1", "2")
    return fleet


# --- which is current ---


def test_a_newer_version_is_current_at_once_and_compared_with_the_one_before() -> None:
    fleet = Fleet()
    fleet.publish("1")
    assert fleet.states == {"1": CURRENT}
    assert fleet.status("1").against == ""
    fleet.publish("1", "2")
    assert fleet.states == {"1": PREVIOUS, "2": CURRENT}
    assert (fleet.status("2").against, fleet.status("2").texts) == ("1", 0)
    fleet.publish("1", "2")
    assert fleet.states == {"1": PREVIOUS, "2": CURRENT}, "nothing is new"


def test_a_fleet_that_starts_with_several_compares_the_newest_with_the_one_before() -> None:
    fleet = Fleet()
    fleet.publish("1", "2", "3")
    assert fleet.states == {"1": RETIRED, "2": PREVIOUS, "3": CURRENT}
    assert fleet.status("1").why == "3 is newer"
    assert fleet.status("3").against == "2"


def test_of_several_that_come_at_once_the_newest_follows_what_was_current() -> None:
    fleet = compared()
    fleet.texts(1, {"1": 0.0, "2": 0.0})
    fleet.publish("1", "2", "3", "4")
    assert fleet.states == {"1": RETIRED, "2": PREVIOUS, "3": RETIRED, "4": CURRENT}
    assert (fleet.status("4").against, fleet.status("3").why) == ("2", "4 is newer")
    fleet.publish("1", "2", "3", "4")
    assert fleet.states["3"] is RETIRED, "what is retired stays retired"


def test_the_next_is_not_compared_with_a_version_that_no_edge_has_drafted_with() -> None:
    fleet = compared()
    fleet.texts(3, {"1": 0.0})
    fleet.publish("1", "2", "3")
    assert fleet.states == {"1": PREVIOUS, "2": RETIRED, "3": CURRENT}
    assert (fleet.status("3").against, fleet.status("2").why) == ("1", "3 is newer")


def test_a_version_with_a_lower_number_does_not_become_current() -> None:
    fleet = Fleet()
    fleet.publish("2")
    fleet.publish("1", "2")
    assert fleet.states == {"2": CURRENT, "1": RETIRED}
    by_hand = Fleet()
    by_hand.publish("a")
    by_hand.publish("b", "a")
    assert by_hand.states == {"a": PREVIOUS, "b": CURRENT}, "what came later"


def test_a_better_version_stays_and_the_one_before_retires_after_enough_texts() -> None:
    fleet = compared()
    for _ in range(5):
        fleet.texts(COMPARED_TEXTS // 5 - 1, {"1": 0.0, "2": 0.05})
        fleet.publish("1", "2")
    assert fleet.states == {"1": PREVIOUS, "2": CURRENT}
    fleet.texts(5, {"1": 0.0, "2": 0.05})
    fleet.publish("1", "2")
    assert fleet.states == {"1": RETIRED, "2": CURRENT}
    assert fleet.status("2").why.startswith("hits +0.0")
    assert fleet.status("2").why.endswith(f"against 1 in {COMPARED_TEXTS} texts")
    assert (fleet.status("2").against, fleet.status("1").why) == ("", "2 is not shown to be worse")


def test_a_comparison_without_texts_ends_after_a_week() -> None:
    fleet = compared()
    fleet.now_s += COMPARED_S - 1
    fleet.publish("1", "2")
    assert fleet.states == {"1": PREVIOUS, "2": CURRENT}
    fleet.now_s += 1
    fleet.publish("1", "2")
    assert fleet.states == {"1": RETIRED, "2": CURRENT}


def test_a_bad_version_published_by_hand_is_retired_within_sixty_texts() -> None:
    for seed in range(10):
        fleet = Fleet(seed=seed)
        fleet.publish("1")
        fleet.publish("1", "bad")
        assert fleet.until("bad", RETIRED, {"1": 0.0, "bad": -0.12}) <= 60
        assert fleet.states["1"] is CURRENT
        assert "hits -0.1" in fleet.status("bad").why
        assert (fleet.status("1").why, fleet.status("1").against) == ("bad turned out worse", "")


def test_a_version_that_turns_out_worse_after_it_was_better_gives_way_as_well() -> None:
    fleet = compared()
    fleet.texts(20, {"1": 0.0, "2": 0.05})
    assert fleet.until("2", RETIRED, {"1": 0.0, "2": -0.15}) <= 100
    assert fleet.states == {"1": CURRENT, "2": RETIRED}


def test_each_comparison_of_a_name_needs_more_evidence_than_the_one_before() -> None:
    fleet = Fleet()
    versions = [str(number) for number in range(1, 8)]
    for count in range(1, len(versions) + 1):
        fleet.publish(*versions[:count])
        fleet.texts(1, dict.fromkeys(versions, 0.0))
    (known,) = [known for _, version, known in fleet.statistics.versions.known() if version == "7"]
    assert known.comparison is not None
    assert known.comparison.test.number == 6
    first = Fleet()
    first.publish("6", "7")
    counts = [each.until("7", RETIRED, {"6": 0.0, "7": -0.1}) for each in (first, fleet)]
    assert counts[0] < counts[1]
    assert sum(candidate_error(number) for number in range(1, 10_000)) < 0.01


def test_a_version_that_forgets_a_kind_of_text_is_retired_though_it_gains() -> None:
    fleet = compared()
    for _ in range(5):
        fleet.texts(40, {"1": 0.0, "2": 0.15}, PROSE)
        fleet.texts(20, {"1": 0.0, "2": -0.15}, CODE)
    assert fleet.states == {"1": CURRENT, "2": RETIRED}
    assert fleet.status("2").why.endswith(f"of class {CODE}")


def test_without_the_kinds_the_same_version_would_stay() -> None:
    """Negative control of the test before: its texts come without the kind."""
    fleet = compared()
    for _ in range(5):
        fleet.texts(40, {"1": 0.0, "2": 0.15}, 0)
        fleet.texts(20, {"1": 0.0, "2": -0.15}, 0)
    assert fleet.states["2"] is CURRENT


def test_drafting_that_takes_longer_than_the_limit_retires_however_much_it_hits() -> None:
    fleet = compared()
    for _ in range(2):
        fleet.texts(40, {"1": 0.0, "2": 0.15}, **{"1": 0.001, "2": 0.001 * (MAX_SLOWDOWN + 0.2)})
    assert fleet.states["2"] is RETIRED
    assert "drafting takes 1.25 times as long as in 1" in fleet.status("2").why
    noisy = compared()
    noisy.texts(1, {"1": 0.0, "2": 0.15}, **{"1": 0.001, "2": 0.009})
    noisy.texts(60, {"1": 0.0, "2": 0.15}, **{"1": 0.001, "2": 0.001})
    assert noisy.states["2"] is CURRENT, "one slow text of one edge decides nothing"
    within = compared()
    for _ in range(2):
        within.texts(40, {"1": 0.0, "2": 0.15}, **{"1": 0.001, "2": 0.001 * (MAX_SLOWDOWN - 0.02)})
    assert within.states["2"] is CURRENT


# --- who votes ---


def test_a_flooding_edge_has_one_vote_a_day() -> None:
    fleet = compared()
    for _ in range(500):
        fleet.statistics.add(fleet.report("flood", {"1": 0.3, "2": -0.4}, tokens=4096))
    assert fleet.states["2"] is CURRENT
    assert fleet.status("2").texts == 1
    fleet.now_s += DAY_S
    fleet.statistics.add(fleet.report("flood", {"1": 0.3, "2": -0.4}))
    assert fleet.status("2").texts == 2
    trusting = Fleet(votes_a_day=500)  # negative control: with as many votes the flood decides
    trusting.publish("1")
    trusting.publish("1", "2")
    for _ in range(500):
        trusting.statistics.add(trusting.report("flood", {"1": 0.3, "2": -0.4}))
    assert trusting.states["2"] is RETIRED


def test_an_edge_votes_once_under_each_key_and_one_without_a_name_never() -> None:
    fleet = compared()
    for tenant in ("a", "a", "b"):
        fleet.statistics.add(fleet.report("pi", {"1": 0.0, "2": 0.0}), tenant=tenant)
    fleet.statistics.add(fleet.report("", {"1": 0.0, "2": 0.0}))
    assert fleet.status("2").texts == 2


def flood(fleet: Fleet, tenant: str, gain: float, days: int = 10, **times: float) -> None:
    """Report texts of invented edges of one key, day by day."""
    for day in range(days):
        fleet.now_s += DAY_S
        for edge in range(50):
            report = fleet.report(f"{tenant}-{day}-{edge}", {"1": 0.0, "2": gain}, **times)
            fleet.statistics.add(report, tenant=tenant)


@pytest.mark.parametrize(("gain", "seconds"), [(-0.4, 0.001), (0.0, 0.01)])
def test_one_key_alone_decides_nothing_whatever_edges_it_invents(gain: float, seconds: float) -> None:
    fleet, keyless = compared(), compared()
    for each, tenant in ((fleet, "mallory"), (keyless, "")):
        flood(each, tenant, gain, **{"1": 0.001, "2": seconds})
    assert fleet.states["2"] is CURRENT
    assert fleet.status("2").texts == KEY_MARGIN
    assert keyless.states["2"] is RETIRED, "negative control: its edges vote where there are no keys"


def test_a_key_stays_within_its_lead_over_the_most_active_other_across_a_restart(tmp_path: Path) -> None:
    fleet = compared()
    flood(fleet, "mallory", 0.0, days=3)
    for edge in range(3):
        fleet.statistics.add(fleet.report(f"pi-{edge}", {"1": 0.0, "2": 0.0}), tenant=f"key-{edge}")
    fleet.statistics.save(tmp_path / "state.json")
    assert "mallory" not in (tmp_path / "state.json").read_text()
    fleet.statistics = fleet.coordinator()
    fleet.statistics.load(tmp_path / "state.json")
    fleet.publish("1", "2")
    flood(fleet, "mallory", 0.0, days=3)
    assert fleet.status("2").texts == KEY_MARGIN + 1 + 3


LIES = {  # gain of the current version, and its seconds for a token where the other takes .001
    "it hits always": (1.0, 0.001),
    "it hits never": (-1.0, 0.001),
    "it is slow": (0.0, 0.01),
}
WHEN: dict[str, Callable[[int], bool]] = {
    "throughout": lambda text: True,
    "early": lambda text: text < 10,
    "late": lambda text: text >= 25,
    "in turns": lambda text: text % 20 < 10,
}


def votes(tmp_path: Path, gain: float, honest: int, liars: int, lie: str, when: str, seed: int) -> Fleet:
    """Return a fleet after up to 300 texts of `honest` keys, with three beside each by keys that lie."""
    fleet = compared(seed=seed)
    claimed, seconds = LIES[lie]
    for text in range(300):
        for place in range(3 if WHEN[when](text) else 0):
            told = fleet.report(f"m{text}-{place}", {"1": -claimed, "2": claimed}, **{"1": 0.001, "2": seconds})
            fleet.statistics.add(told, tenant=f"mallory-{text % liars}")
        report = fleet.report(f"h{text}", {"1": 0.0, "2": gain}, **{"1": 0.001, "2": 0.001})
        fleet.statistics.add(report, tenant=f"honest-{fleet.rng.integers(honest)}")
        if fleet.states["2"] is RETIRED:
            break
        if text == 30:
            fleet.statistics.save(tmp_path / "state.json")
            fleet.statistics = fleet.coordinator()
            fleet.statistics.load(tmp_path / "state.json")
            fleet.publish("1", "2")
    return fleet


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize(("gain", "right"), [(1 / 16, CURRENT), (-1 / 16, RETIRED)])
def test_no_lies_of_one_key_turn_the_verdict_of_others(
    tmp_path: Path, gain: float, right: VersionState, lie: str, when: str
) -> None:
    for seed in range(2):
        assert votes(tmp_path, gain, 20, 1, lie, when, seed).states["2"] is right, "nor hold it up"
        for honest in (1, 4):
            assert votes(tmp_path, gain, honest, 1, lie, when, seed).states["2"] in (CURRENT, right), honest


def test_as_many_keys_that_lie_as_others_would_turn_it(tmp_path: Path) -> None:
    assert votes(tmp_path, -1 / 16, 20, 20, "it hits always", "throughout", 0).states["2"] is CURRENT
    assert votes(tmp_path, 1 / 16, 20, 20, "it hits never", "throughout", 0).states["2"] is RETIRED


def test_two_keys_decide_together_and_with_one_alone_its_edges_do() -> None:
    for keys, gain, state in ((2, 0.1, CURRENT), (2, -0.1, RETIRED), (1, 0.1, CURRENT), (1, -0.1, RETIRED)):
        fleet = compared()
        for text in range(200):
            report = fleet.report(f"pi-{text}", {"1": 0.0, "2": gain})
            fleet.statistics.add(report, tenant=f"key-{text % 2}" if keys == 2 else "")  # see `votes_as`
        assert fleet.states["2"] is state, (keys, gain)


def test_a_key_that_comes_later_decides_no_more_alone_than_the_edges_before_it() -> None:
    fleet = compared()
    for text in range(10):
        fleet.statistics.add(fleet.report(f"pi-{text}", {"1": 0.0, "2": 0.1}))
    for text in range(500):
        tenant = ("mallory", "alice")[text % 2]
        gain = -0.4 if tenant == "mallory" else 0.1
        fleet.statistics.add(fleet.report(f"{tenant}-{text}", {"1": 0.0, "2": gain}), tenant=tenant)
    assert fleet.states["2"] is CURRENT


def test_a_flood_of_one_key_takes_no_votes_from_others() -> None:
    fleet = compared()
    for edge in range(MAX_VOTERS + 10):
        fleet.statistics.add(fleet.report(f"m-{edge}", {"1": 0.0, "2": 0.0}, tokens=8), tenant="mallory")
    for edge in range(100):
        fleet.statistics.add(fleet.report(f"pi-{edge}", {"1": 0.0, "2": -0.4}), tenant=("alice", "bob")[edge % 2])
    assert fleet.states["2"] is RETIRED


@pytest.mark.parametrize(("own", "other"), [(7, 128), (128, 40), (0, 0)])
def test_a_text_counts_only_if_both_were_compared_with_most_of_it(own: int, other: int) -> None:
    fleet = compared()
    hits = (DrafterHits("swift", "1", other // 2, other), DrafterHits("swift", "2", own // 2, own))
    fleet.statistics.add(SessionReport("s", "tiny", "v", edge="pi", drafter_hits=hits))
    assert fleet.status("2").texts == 0


# --- the share of edges, and what a version begins with ---


@pytest.mark.parametrize(("edges", "share"), [(0, 1.0), (2, 1.0), (4, 0.5), (8, 0.25), (20, 0.1), (500, 0.1)])
def test_a_previous_version_goes_to_a_tenth_of_the_edges_but_to_two_at_least(edges: int, share: float) -> None:
    versions = FleetStatistics().versions
    versions.look([("swift", "1", 0)], 0.0)
    versions.look([("swift", "2", 1), ("swift", "1", 0)], 0.0)
    assert versions.share("swift", "1", edges) == share
    assert versions.share("swift", "2", edges) == 1.0
    assert versions.share("swift", "3", edges) == versions.share("other", "1", edges) == 0.0


def test_a_version_begins_with_half_its_parents_weight_and_leaves_nothing() -> None:
    fleet = Fleet()
    fleet.publish("1")
    fleet.texts(30, {"1": 0.0})
    before = fleet.statistics.acceptance.total("swift", "1")
    fleet.publish("1", "2")
    began = fleet.statistics.acceptance.total("swift", "2")
    assert (began.rate, began.trials) == (pytest.approx(before.rate), pytest.approx(before.trials / 2))
    fleet.until("2", RETIRED, {"1": 0.0, "2": -0.3})
    assert fleet.statistics.acceptance.total("swift", "2").trials == 0
    fleet.texts(3, {"1": 0.0, "2": -0.3})  # of edges that have not heard yet
    assert fleet.statistics.acceptance.total("swift", "2").trials == 0
    assert {prior.drafter_version for prior in fleet.statistics.acceptance.prior("tiny", 0, 0)} == {"1"}


def test_a_previous_version_that_returns_keeps_its_own_hits() -> None:
    fleet = compared()
    fleet.until("2", RETIRED, {"1": 0.0, "2": -0.3})
    assert fleet.statistics.acceptance.total("swift", "1").trials > 128


# --- the catalogue changes ---


def test_the_previous_version_returns_where_the_current_one_is_taken_away() -> None:
    fleet = compared()
    fleet.publish("1")
    assert fleet.states == {"1": CURRENT}
    assert (fleet.status("1").against, fleet.status("1").why) == ("", "the version before it is gone")


def test_a_retired_version_returns_only_where_no_other_is_left() -> None:
    fleet = Fleet()
    fleet.publish("1", "bad")
    fleet.until("bad", RETIRED, {"1": 0.0, "bad": -0.3})
    fleet.publish("bad")
    assert fleet.states == {"bad": CURRENT}
    fleet.publish("1", "bad")
    fleet.publish("1", "bad", "badder")
    fleet.until("badder", RETIRED, {"bad": 0.0, "badder": -0.3})
    fleet.publish("2", "badder")
    assert fleet.states == {"1": RETIRED, "2": CURRENT, "badder": RETIRED}


def test_a_comparison_ends_where_either_version_is_taken_away() -> None:
    fleet = compared()
    fleet.texts(10, {"1": 0.0, "2": 0.0})
    fleet.publish("1")
    assert fleet.states == {"1": CURRENT}
    fleet.publish("1", "2")
    assert (fleet.states["2"], fleet.status("2").texts) == (CURRENT, 0)
    fleet.texts(10, {"1": 0.0, "2": 0.0})
    fleet.publish("2")
    assert fleet.states == {"2": CURRENT}
    assert (fleet.status("2").against, fleet.status("2").texts) == ("", 0)


# --- restarts ---


def test_states_and_evidence_survive_a_restart(tmp_path: Path) -> None:
    fleet = Fleet()
    fleet.publish("0", "1")
    fleet.until("1", RETIRED, {"0": 0.0, "1": -0.3})
    fleet.publish("0", "1", "2")
    fleet.texts(20, {"0": 0.0, "2": 0.02})
    fleet.statistics.save(tmp_path / "state.json")
    before = fleet.statistics.version_states
    fleet.statistics = fleet.coordinator()
    fleet.statistics.load(tmp_path / "state.json")
    fleet.publish("0", "1", "2")
    assert fleet.statistics.version_states == before
    assert fleet.states == {"0": PREVIOUS, "1": RETIRED, "2": CURRENT}
    fleet.statistics.add(fleet.report("edge-0", {"0": 0.0, "2": 0.02}))
    assert fleet.status("2").texts == 20, "an edge does not vote twice a day because of it"


def test_without_its_state_a_coordinator_would_offer_a_retired_version_again() -> None:
    """Negative control of the tests before."""
    fleet = Fleet()
    fleet.publish("0", "1")
    fleet.until("1", RETIRED, {"0": 0.0, "1": -0.3})
    fleet.statistics = fleet.coordinator()
    fleet.publish("0", "1")
    assert fleet.states["1"] is CURRENT


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: line["versions"]["2"].update(state="splendid"),
        lambda line: line["versions"]["2"]["comparison"].update(test=[[0]]),
        lambda line: line["versions"]["2"]["comparison"].pop("votes"),
        lambda line: line.update(versions=[]),
    ],
)
def test_damaged_states_begin_with_nothing(tmp_path: Path, damage: Callable[[dict[str, Any]], object]) -> None:
    fleet = Fleet()
    fleet.publish("1", "2")
    path = tmp_path / "state.json"
    fleet.statistics.save(path)
    saved = json.loads(path.read_text())
    damage(saved["versions"]["swift"])
    path.write_text(json.dumps(saved))
    fleet.statistics = fleet.coordinator()
    fleet.statistics.load(path)
    assert fleet.states == {}


# --- over the wire ---


async def test_a_bad_version_is_retired_by_reports_of_a_tenth_of_the_edges_and_stays_so(
    coordinating: Coordinating, drafters: Path, tmp_path: Path
) -> None:
    write_package(drafters / "1", version="1")
    fleet, state = Fleet(), tmp_path / "state.json"

    def renamed(report: SessionReport) -> tuple[DrafterHits, ...]:
        return tuple(DrafterHits("tiny-drafter", h.drafter_version, h.hits, h.compared) for h in report.drafter_hits)

    async def send(call: Any, edge: int, gains: dict[str, float]) -> None:
        report = fleet.report(f"edge-{edge}", gains)
        await call("ReportSession", SessionReport("s", "tiny", "v", edge=report.edge, drafter_hits=renamed(report)))

    options = {"drafters": (drafters,), "state": state}
    async with coordinating(ScriptedCluster(ready("v")), **options) as call:
        await call("OpenLease", LeaseRequest("tiny", "s"))
        for edge in range(25):
            await send(call, edge, {"1": 0.0})
        updates = call.stream("WatchDrafters", "")
        assert [(m.version, m.share) for m in await anext(updates)] == [("1", 0)]
        write_package(drafters / ".bad", version="bad", sequence=9).rename(drafters / "bad")
        assert [(m.version, m.share) for m in await anext(updates)] == [("bad", 0), ("1", 0.1)]
        for edge in range(60):
            await send(call, edge, {"1": 0.0, "bad": -0.12})
        assert [(m.version, m.share) for m in await anext(updates)] == [("1", 0)], "edges are told within 60 texts"
        status = await call("Status", None)
        assert {v.version: v.state for v in status.versions} == {"1": "current", "bad": "retired"}

    async with coordinating(ScriptedCluster(ready("v")), **options) as call:
        assert [m.version for m in await call("ListDrafters", "")] == ["1"]
        await asyncio.sleep(0.3)  # further scans change nothing
        assert [m.version for m in await call("ListDrafters", "")] == ["1"]
