"""States of a drafter's versions: candidates prove themselves on the texts of edges, and bad versions are retired."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.coordinator.fake_cluster import ScriptedCluster, ready, write_package
from outrider.coordinator.statistics import FleetStatistics
from outrider.coordinator.version_trials import KEY_LEAD, MAX_VOTERS, TRIAL_S, UNANSWERED_S, VersionState
from outrider.proto.policy.sequential import MAX_SLOWDOWN
from outrider.proto.types import DrafterHits, LeaseRequest, SessionReport, VersionStatus

Serve = Callable[..., None]
PROSE, CODE = 1, 3
DAY_S = 86400.0
WAITING, CANDIDATE, CURRENT, FORMER, RETIRED = VersionState


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
        """Let the catalogue hold these versions, the oldest first."""
        offered = [("swift", version, place) for place, version in enumerate(versions)]
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


# --- candidates ---


def test_the_first_version_is_current_and_the_next_is_its_candidate() -> None:
    fleet = Fleet()
    fleet.publish("1")
    assert fleet.states == {"1": CURRENT}
    fleet.publish("1", "2")
    assert fleet.states == {"1": CURRENT, "2": CANDIDATE}
    assert (fleet.status("2").against, fleet.status("2").texts) == ("1", 0)
    fleet.publish("1", "2")
    assert fleet.states == {"1": CURRENT, "2": CANDIDATE}, "nothing is new"


def test_a_fleet_that_starts_with_several_trusts_the_first_and_tries_the_newest() -> None:
    fleet = Fleet()
    fleet.publish("1", "2", "3")
    assert fleet.states == {"1": CURRENT, "2": RETIRED, "3": CANDIDATE}
    assert fleet.status("2").why == "3 is newer"


def test_one_candidate_at_a_time_and_the_newest_that_waited_is_next() -> None:
    fleet = Fleet()
    fleet.publish("1")
    fleet.publish("1", "2")
    fleet.publish("1", "2", "3", "4")
    assert fleet.states == {"1": CURRENT, "2": CANDIDATE, "3": WAITING, "4": WAITING}
    fleet.until("2", RETIRED, {"1": 0.0, "2": -0.3})
    fleet.publish("1", "2", "3", "4")
    assert fleet.states == {"1": CURRENT, "2": RETIRED, "3": RETIRED, "4": CANDIDATE}
    fleet.publish("1", "2", "3", "4")
    assert fleet.states["4"] is CANDIDATE, "what is retired stays retired"


def test_a_candidate_that_shows_nothing_gives_way_only_to_a_newer_version() -> None:
    fleet = Fleet()
    fleet.publish("1")
    fleet.publish("1", "2")
    fleet.now_s += UNANSWERED_S
    fleet.publish("1", "2")
    assert fleet.states["2"] is CANDIDATE, "nothing waits"
    fleet.publish("1", "2", "3")
    assert (fleet.states["2"], fleet.states["3"]) == (RETIRED, CANDIDATE)
    assert fleet.status("2").why == "no edge has compared it"
    fleet.texts(1, {"1": 0.0, "3": 0.0})
    fleet.publish("1", "2", "3", "4")
    assert fleet.states["4"] is WAITING, "one that is being compared has a week"
    fleet.now_s += TRIAL_S
    fleet.publish("1", "2", "3", "4")
    assert (fleet.states["3"], fleet.states["4"]) == (RETIRED, CANDIDATE)


def test_a_better_candidate_becomes_current_and_the_one_before_stays_beside_it() -> None:
    fleet = Fleet()
    fleet.publish("1")
    fleet.publish("1", "2")
    # A kind of text with 5 % or more of all must be known to keep its rate, which the gain shows as well.
    assert fleet.until("2", CURRENT, {"1": 0.0, "2": 0.15}) <= 60
    assert fleet.states == {"1": FORMER, "2": CURRENT}
    assert "hits +0.1" in fleet.status("2").why
    assert (fleet.status("2").against, fleet.status("2").texts) == ("1", 0), "the comparison goes on from the beginning"


def test_a_candidate_that_is_no_better_never_becomes_current() -> None:
    for seed in range(20):
        fleet = Fleet(seed=seed)
        fleet.publish("1")
        fleet.publish("1", "2")
        for _ in range(4):
            fleet.texts(100, {"1": 0.0, "2": 0.0})
        assert fleet.states["1"] is CURRENT


def test_a_bad_version_published_by_hand_is_retired_within_sixty_texts() -> None:
    for seed in range(10):
        fleet = Fleet(seed=seed)
        fleet.publish("1")
        fleet.publish("1", "bad")
        assert fleet.until("bad", RETIRED, {"1": 0.0, "bad": -0.12}) <= 60
        assert fleet.states["1"] is CURRENT
        assert "hits -0.1" in fleet.status("bad").why


def test_a_current_version_that_turns_out_worse_gives_way_to_the_former_one() -> None:
    fleet = Fleet()
    fleet.publish("1")
    fleet.publish("1", "2")
    fleet.until("2", CURRENT, {"1": 0.0, "2": 0.15})
    assert fleet.until("2", RETIRED, {"1": 0.0, "2": -0.15}) <= 60
    assert fleet.states == {"1": CURRENT, "2": RETIRED}
    assert fleet.status("1").why == "2 turned out worse"


def test_a_candidate_is_compared_with_what_is_current_now() -> None:
    fleet = Fleet()
    fleet.publish("1")
    fleet.publish("1", "2")
    fleet.until("2", CURRENT, {"1": 0.0, "2": 0.15})
    fleet.publish("1", "2", "3")
    fleet.texts(5, {"1": 0.0, "2": -0.1, "3": -0.1})
    assert (fleet.status("3").against, fleet.status("3").texts) == ("2", 5)
    fleet.until("2", RETIRED, {"1": 0.0, "2": -0.15})
    assert (fleet.status("3").against, fleet.status("3").texts) == ("1", 0)


def test_a_third_good_version_retires_the_first() -> None:
    fleet = Fleet()
    fleet.publish("1")
    fleet.publish("1", "2")
    fleet.until("2", CURRENT, {"1": 0.0, "2": 0.15})
    fleet.publish("1", "2", "3")
    fleet.until("3", CURRENT, {"1": 0.0, "2": 0.1, "3": 0.25})
    assert fleet.states == {"1": RETIRED, "2": FORMER, "3": CURRENT}


def test_a_candidate_that_forgets_one_kind_of_text_does_not_become_current() -> None:
    """It gains .15 in prose and loses .02 in code, which is over the margin of .01, though code comes late."""
    for seed in range(8):
        fleet = Fleet(seed=seed)
        fleet.publish("1")
        for prompt in (PROSE, CODE):
            fleet.texts(10, {"1": 0.0}, prompt)
        fleet.publish("1", "2")
        for _ in range(4):
            fleet.texts(60, {"1": 0.0, "2": 0.15}, PROSE)
            assert fleet.states["1"] is CURRENT
            fleet.texts(40, {"1": 0.0, "2": -0.02}, CODE)
        assert fleet.states["1"] is CURRENT
        assert fleet.states["2"] in (CANDIDATE, RETIRED)


def test_without_the_kinds_the_same_candidate_would_become_current() -> None:
    """Negative control of the test before: its texts come without the kind."""
    fleet = Fleet()
    fleet.publish("1")
    fleet.publish("1", "2")
    for _ in range(4):
        fleet.texts(60, {"1": 0.0, "2": 0.15}, 0)
        fleet.texts(40, {"1": 0.0, "2": -0.02}, 0)
    assert fleet.states["2"] is CURRENT


def test_drafting_that_takes_longer_than_the_limit_retires_however_much_it_hits() -> None:
    fleet = Fleet()
    fleet.publish("1")
    fleet.publish("1", "2")
    for _ in range(2):
        fleet.texts(40, {"1": 0.0, "2": 0.02}, **{"1": 0.001, "2": 0.001 * (MAX_SLOWDOWN + 0.2)})
    assert fleet.states["2"] is RETIRED
    assert "drafting takes 1.25 times as long as in 1" in fleet.status("2").why
    noisy = Fleet()
    noisy.publish("1")
    noisy.publish("1", "2")
    noisy.texts(1, {"1": 0.0, "2": 0.15}, **{"1": 0.001, "2": 0.009})
    noisy.texts(60, {"1": 0.0, "2": 0.15}, **{"1": 0.001, "2": 0.001})
    assert noisy.states["2"] is CURRENT, "one slow text of one edge decides nothing"
    within = Fleet()
    within.publish("1")
    within.publish("1", "2")
    for _ in range(2):
        within.texts(40, {"1": 0.0, "2": 0.15}, **{"1": 0.001, "2": 0.001 * (MAX_SLOWDOWN - 0.02)})
    assert within.states["2"] is CURRENT


# --- who votes ---


def test_a_flooding_edge_has_one_vote_a_day() -> None:
    fleet = Fleet()
    fleet.publish("1")
    fleet.publish("1", "2")
    for _ in range(500):
        fleet.statistics.add(fleet.report("flood", {"1": 0.3, "2": -0.4}, tokens=4096))
    assert fleet.states["2"] is CANDIDATE
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
    fleet = Fleet()
    fleet.publish("1")
    fleet.publish("1", "2")
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


@pytest.mark.parametrize(("gain", "seconds"), [(0.4, 0.001), (-0.4, 0.001), (0.0, 0.01)])
def test_one_key_alone_decides_nothing_whatever_edges_it_invents(gain: float, seconds: float) -> None:
    fleet, keyless = Fleet(), Fleet()
    for each, tenant in ((fleet, "mallory"), (keyless, "")):
        each.publish("1")
        each.publish("1", "2")
        flood(each, tenant, gain, **{"1": 0.001, "2": seconds})
    assert fleet.states["2"] is CANDIDATE
    assert fleet.status("2").texts == KEY_LEAD
    assert keyless.states["2"] is not CANDIDATE, "negative control: its edges vote where there are no keys"


def test_a_key_stays_within_its_lead_over_the_most_active_other_across_a_restart(tmp_path: Path) -> None:
    fleet = Fleet()
    fleet.publish("1")
    fleet.publish("1", "2")
    flood(fleet, "mallory", 0.0)
    for edge in range(3):
        fleet.statistics.add(fleet.report(f"pi-{edge}", {"1": 0.0, "2": 0.0}), tenant=f"key-{edge}")
    fleet.statistics.save(tmp_path / "state.json")
    assert "mallory" not in (tmp_path / "state.json").read_text()
    fleet.statistics = fleet.coordinator()
    fleet.statistics.load(tmp_path / "state.json")
    fleet.publish("1", "2")
    flood(fleet, "mallory", 0.0)
    assert fleet.status("2").texts == KEY_LEAD + 1 + 3


LIES = {  # gain of the candidate, and its seconds for a token where the other takes .001
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
    fleet = Fleet(seed=seed)
    fleet.publish("1")
    fleet.publish("1", "2")
    claimed, seconds = LIES[lie]
    for text in range(300):
        for place in range(3 if WHEN[when](text) else 0):
            told = fleet.report(f"m{text}-{place}", {"1": -claimed, "2": claimed}, **{"1": 0.001, "2": seconds})
            fleet.statistics.add(told, tenant=f"mallory-{text % liars}")
        report = fleet.report(f"h{text}", {"1": 0.0, "2": gain}, **{"1": 0.001, "2": 0.001})
        fleet.statistics.add(report, tenant=f"honest-{fleet.rng.integers(honest)}")
        if fleet.states["2"] is not CANDIDATE:
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
            assert votes(tmp_path, gain, honest, 1, lie, when, seed).states["2"] in (CANDIDATE, right), honest


def test_as_many_keys_that_lie_as_others_would_turn_it(tmp_path: Path) -> None:
    assert votes(tmp_path, -1 / 16, 20, 20, "it hits always", "throughout", 0).states["2"] is CURRENT


def test_two_keys_decide_together_and_with_one_alone_its_edges_do() -> None:
    for keys, gain, state in ((2, 0.1, CURRENT), (2, -0.1, RETIRED), (1, 0.1, CURRENT), (1, -0.1, RETIRED)):
        fleet = Fleet()
        fleet.publish("1")
        fleet.publish("1", "2")
        for text in range(200):
            report = fleet.report(f"pi-{text}", {"1": 0.0, "2": gain})
            fleet.statistics.add(report, tenant=f"key-{text % 2}" if keys == 2 else "")  # see `votes_as`
        assert fleet.states["2"] is state, (keys, gain)


def test_a_key_that_comes_later_decides_no_more_alone_than_the_edges_before_it() -> None:
    fleet = Fleet()
    fleet.publish("1")
    fleet.publish("1", "2")
    for text in range(10):
        fleet.statistics.add(fleet.report(f"pi-{text}", {"1": 0.0, "2": -0.1}))
    for text in range(500):
        tenant = ("mallory", "alice")[text % 2]
        gain = 0.4 if tenant == "mallory" else -0.1
        fleet.statistics.add(fleet.report(f"{tenant}-{text}", {"1": 0.0, "2": gain}), tenant=tenant)
    assert fleet.states["2"] in (CANDIDATE, RETIRED)


def test_a_flood_of_one_key_takes_no_votes_from_others() -> None:
    fleet = Fleet()
    fleet.publish("1")
    fleet.publish("1", "2")
    for edge in range(MAX_VOTERS + 10):
        fleet.statistics.add(fleet.report(f"m-{edge}", {"1": 0.0, "2": 0.0}, tokens=8), tenant="mallory")
    for edge in range(100):
        fleet.statistics.add(fleet.report(f"pi-{edge}", {"1": 0.0, "2": 0.4}), tenant=("alice", "bob")[edge % 2])
    assert fleet.states["2"] is CURRENT


@pytest.mark.parametrize(("own", "other"), [(7, 128), (128, 40), (0, 0)])
def test_a_text_counts_only_if_both_were_compared_with_most_of_it(own: int, other: int) -> None:
    fleet = Fleet()
    fleet.publish("1")
    fleet.publish("1", "2")
    hits = (DrafterHits("swift", "1", other // 2, other), DrafterHits("swift", "2", own // 2, own))
    fleet.statistics.add(SessionReport("s", "tiny", "v", edge="pi", drafter_hits=hits))
    assert fleet.status("2").texts == 0


# --- the share of edges, and what a version begins with ---


@pytest.mark.parametrize(("edges", "share"), [(0, 1.0), (2, 1.0), (4, 0.5), (8, 0.25), (20, 0.1), (500, 0.1)])
def test_a_candidate_goes_to_a_tenth_of_the_edges_but_to_two_at_least(edges: int, share: float) -> None:
    versions = FleetStatistics().versions
    versions.look([("swift", "1", 0)], 0.0)
    versions.look([("swift", "2", 1), ("swift", "1", 0)], 0.0)
    assert versions.share("swift", "2", edges) == share
    assert versions.share("swift", "1", edges) == 1.0
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
    assert {prior.drafter_version for prior in fleet.statistics.prior("tiny", (), 0.0).drafters} == {"1"}


# --- the catalogue changes ---


def test_the_former_version_returns_where_the_current_one_is_taken_away() -> None:
    fleet = Fleet()
    fleet.publish("1")
    fleet.publish("1", "2")
    fleet.until("2", CURRENT, {"1": 0.0, "2": 0.15})
    fleet.publish("1")
    assert fleet.states == {"1": CURRENT}
    assert fleet.status("1").against == ""


def test_a_candidate_that_is_taken_away_makes_room_and_begins_again_if_it_returns() -> None:
    fleet = Fleet()
    fleet.publish("1")
    fleet.publish("1", "2")
    fleet.texts(10, {"1": 0.0, "2": 0.0})
    fleet.publish("1")
    assert fleet.states == {"1": CURRENT}
    fleet.publish("1", "2")
    assert (fleet.states["2"], fleet.status("2").texts) == (CANDIDATE, 0)


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
    assert fleet.states == {"0": CURRENT, "1": RETIRED, "2": CANDIDATE}
    fleet.statistics.add(fleet.report("edge-0", {"0": 0.0, "2": 0.02}))
    assert fleet.status("2").texts == 20, "an edge does not vote twice a day because of it"


def test_versions_of_single_keys_in_an_older_releases_state_are_left_out(tmp_path: Path) -> None:
    fleet = Fleet()
    fleet.publish("1")
    fleet.statistics.save(tmp_path / "state.json")
    state = json.loads((tmp_path / "state.json").read_text())
    state["versions"]["swift@" + "5a" * 16] = state["versions"]["swift"]
    (tmp_path / "state.json").write_text(json.dumps(state))
    fleet.statistics = fleet.coordinator()
    fleet.statistics.load(tmp_path / "state.json")
    assert [status.drafter for status in fleet.statistics.version_states] == ["swift"]


def test_without_its_state_a_coordinator_would_try_a_retired_version_again() -> None:
    """Negative control of the test before."""
    fleet = Fleet()
    fleet.publish("0", "1")
    fleet.until("1", RETIRED, {"0": 0.0, "1": -0.3})
    fleet.statistics = fleet.coordinator()
    fleet.publish("0", "1")
    assert fleet.states["1"] is CANDIDATE


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


def test_a_bad_version_reaches_few_edges_is_retired_by_reports_and_stays_so(
    serve: Serve, drafters: Path, tmp_path: Path
) -> None:
    write_package(drafters / "1", version="1")
    fleet, state = Fleet(), tmp_path / "state.json"

    def renamed(report: SessionReport) -> tuple[DrafterHits, ...]:
        return tuple(DrafterHits("tiny-drafter", h.drafter_version, h.hits, h.compared) for h in report.drafter_hits)

    async def send(call: Any, edge: int, gains: dict[str, float]) -> None:
        report = fleet.report(f"edge-{edge}", gains)
        await call("ReportSession", SessionReport("s", "tiny", "v", edge=report.edge, drafter_hits=renamed(report)))

    async def scenario(call: Any) -> None:
        await call("OpenLease", LeaseRequest("tiny", "s"))
        for edge in range(25):
            await send(call, edge, {"1": 0.0})
        updates = call.stream("WatchDrafters", "")
        assert [(m.version, m.share) for m in await anext(updates)] == [("1", 0)]
        write_package(drafters / ".bad", version="bad", sequence=9).rename(drafters / "bad")
        assert [(m.version, m.share) for m in await anext(updates)] == [("1", 0), ("bad", 0.1)]
        for edge in range(60):
            await send(call, edge, {"1": 0.0, "bad": -0.12})
        assert [(m.version, m.share) for m in await anext(updates)] == [("1", 0)], "edges are told within 60 texts"
        status = await call("Status", None)
        assert {v.version: v.state for v in status.versions} == {"1": "current", "bad": "retired"}

    async def restarted(call: Any) -> None:
        assert [m.version for m in await call("ListDrafters", "")] == ["1"]
        await asyncio.sleep(0.3)  # further scans change nothing
        assert [m.version for m in await call("ListDrafters", "")] == ["1"]

    serve(scenario, ScriptedCluster(ready("v")), drafters=(drafters,), state=state)
    serve(restarted, ScriptedCluster(ready("v")), drafters=(drafters,), state=state)
