"""A simulated fleet under faults in every state: what must always hold does, and planted defects are found."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from outrider.bench.chaos.__main__ import main
from outrider.bench.chaos.faults import PAIRS
from outrider.bench.chaos.report import ChaosSummary, run_in_processes, run_schedules
from outrider.bench.chaos.schedule import Schedule
from outrider.cloud.session_events import SessionEvents
from outrider.cloud.slots import Slots
from outrider.coordinator.admission import CallerAdmission
from outrider.coordinator.places import KeyPlaces
from outrider.proto.session.received import ReceivedDrafts
from outrider.proto.session.stream import EdgeStream
from outrider.proto.session.text import EdgeText
from outrider.proto.session.verifier import VerifierSession
from outrider.proto.types import Commit

ENOUGH = 300  # schedules within which each defect is found
TRIED = 20  # schedules that run before the next look
# === defects that could slip into shipped code ===================================================================

Plant = Callable[[pytest.MonkeyPatch], None]


def keep_dead_drafts(patch: pytest.MonkeyPatch) -> None:
    """The verifier forgets to drop the drafts of a chain that has missed."""

    def compare(self: ReceivedDrafts, position: int, hit: bool) -> bool:
        self.acceptance.add(hit)
        return hit

    patch.setattr(ReceivedDrafts, "_compare", compare)


def apply_commits_of_older_streams(patch: pytest.MonkeyPatch) -> None:
    """The edge applies what still comes from streams that it has left."""
    patch.setattr(EdgeStream, "carries", lambda self, frame: True)
    patch.setattr(EdgeStream, "serves", lambda self, commit: True)


def keep_the_place(patch: pytest.MonkeyPatch) -> None:
    """The verifier does not free the slot of a stream that is gone."""
    patch.setattr(SessionEvents, "close", lambda self, key: None)


def keep_the_pages(patch: pytest.MonkeyPatch) -> None:
    """A slot that is freed keeps its KV pages."""
    patch.setattr(Slots, "_give_back", lambda self, slot: None)


def keep_the_lease(patch: pytest.MonkeyPatch) -> None:
    """The coordinator counts a session for its key for ever."""
    patch.setattr(CallerAdmission, "settle", lambda self, caller, report: None)
    patch.setattr(KeyPlaces, "_expire", lambda self, now_s: None)


def repeat_a_token(patch: pytest.MonkeyPatch) -> None:
    """The edge hands on tokens that it has had, where a commit comes again."""

    def follow(self: EdgeStream, commit: Commit) -> int:
        return 0

    patch.setattr(EdgeStream, "follow", follow)


def lose_a_token_on_resume(patch: pytest.MonkeyPatch) -> None:
    """The verifier takes over one token more than the edge has."""
    opened = VerifierSession.opened

    def open_too_far(self: VerifierSession):
        if self._resumed:
            self.transcript.append(1)
        return opened(self)

    patch.setattr(VerifierSession, "opened", open_too_far)


def lose_goaway(patch: pytest.MonkeyPatch) -> None:
    """A session that is evicted is not told so."""
    patch.setattr(Slots, "evict", lambda self, slot, reason: self.release(slot))


def finish_without_usage(patch: pytest.MonkeyPatch) -> None:
    """The last commit's tokens are missing from the usage."""
    end = EdgeText.end

    def finish(self: EdgeText, finish=None, error=None):
        self.statistics.committed -= finish is not None
        return end(self, finish, error)

    patch.setattr(EdgeText, "end", finish)


def reopen_for_nothing(patch: pytest.MonkeyPatch) -> None:
    """The edge gives a text up where another stream would help."""
    patch.setattr("outrider.proto.session.stream._may_heal", lambda error: False)


def take_commits_of_the_turn_before(patch: pytest.MonkeyPatch) -> None:
    """The edge takes commits of a turn that was left for those of the next, where that has no stream yet."""
    patch.setattr(EdgeStream, "serves", lambda self, commit: commit.turn == self.turn)


# Each with the faults that bring it to light.
DEFECTS: dict[Plant, tuple[str, ...]] = {
    keep_dead_drafts: ("drafter",),
    apply_commits_of_older_streams: ("late", "cancel"),
    keep_the_place: ("break",),
    keep_the_pages: ("break",),
    keep_the_lease: ("die",),
    repeat_a_token: ("copies",),
    lose_a_token_on_resume: ("break",),
    lose_goaway: ("crowd",),
    finish_without_usage: ("break",),
    reopen_for_nothing: ("kill",),
    take_commits_of_the_turn_before: ("cancel",),
}


# === what holds ==================================================================================================


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "outrider")  # until the test ends


def shown(summary: ChaosSummary) -> str:
    return "\n".join(summary.lines())


@pytest.mark.timeout(900)
def test_a_thousand_schedules_break_nothing() -> None:
    summary = run_schedules(0, 1000)
    print(shown(summary))
    assert not summary.found, shown(summary)
    assert len(summary.missed) < len(PAIRS) / 4, "faults are aimed at states that they rarely meet"


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_schedules_show_every_fault_in_every_state() -> None:
    summary = run_in_processes(1_000_000, 100_000, processes=2)
    print(shown(summary))
    assert not summary.found, shown(summary)
    assert not summary.missed, shown(summary)


@pytest.mark.parametrize("plant", DEFECTS, ids=lambda plant: plant.__name__)
def test_a_planted_defect_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    for first in range(0, ENOUGH, TRIED):
        if run_schedules(first, TRIED, DEFECTS[plant]).found:
            return
    pytest.fail(f"{ENOUGH} schedules do not find it: {plant.__doc__}")


def test_a_schedule_is_the_same_each_time() -> None:
    def events(seed: int) -> list[str]:
        schedule = Schedule(seed, traced=True)
        schedule.run()
        return schedule.world.trace or []

    assert events(7) == events(7) != events(8)


def test_a_seed_is_replayed_with_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "7"]) == 0
    told = capsys.readouterr().out
    assert "opens a stream to" in told
    assert "seed 7: all holds" in told


def test_what_does_not_hold_is_printed_with_its_replay(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [keep_the_place] = [plant for plant in DEFECTS if plant.__name__ == "keep_the_place"]
    keep_the_place(monkeypatch)
    assert main(["--schedules", "5"]) == 1
    told = capsys.readouterr().out
    seed = told.rpartition("--seed ")[2].strip()
    assert main(["--seed", seed]) == 1
    assert f"seed {seed}: Violation: " in capsys.readouterr().out
