"""The roster of a cluster: silence, restarts, loss for good, and replacement that backs off."""

from __future__ import annotations

from typing import Any

from outrider.coordinator.cluster import VerifierInfo, VerifierState
from outrider.coordinator.roster import Roster


def says(listed: str, /, **fields: Any) -> dict[str, dict[str, Any]]:
    report = {
        "name": listed,
        "address": "127.0.0.1:1",
        "model": "tiny",
        "tokenizer_sha256": "a" * 64,
        "state": "ready",
        "sessions": 1,
        "max_sessions": 4,
        "step_s": 0.1,
        "kv_pages_free": 5,
        "incarnation": "first",
    }
    return {listed: report | fields}


def only(roster: Roster) -> VerifierInfo:
    (info,) = roster.infos
    return info


def test_a_verifier_is_as_it_says_and_down_while_it_is_silent() -> None:
    roster = Roster()
    roster.observe(["a"], {})
    assert (only(roster).state, only(roster).model) == (VerifierState.DOWN, "")
    roster.observe(["a"], says("a"))
    info = only(roster)
    assert (info.state, info.sessions, info.max_sessions, info.kv_pages_free) == (VerifierState.READY, 1, 4, 5)
    roster.observe(["a"], {})
    assert (only(roster).state, only(roster).model) == (VerifierState.DOWN, "tiny"), "its model stays known"
    assert roster.to_respawn(0.0) == (), "Ray restarts it"
    roster.observe(["a"], says("a"))
    assert only(roster).restarts == 0, "there was no new incarnation"


def test_a_new_incarnation_counts_one_restart_and_brings_its_address() -> None:
    roster = Roster()
    roster.observe(["a"], says("a"))
    roster.observe(["a"], {})
    roster.observe(["a"], says("a", incarnation="second", address="127.0.0.1:2"))
    roster.observe(["a"], says("a", incarnation="second", address="127.0.0.1:2"))
    assert (only(roster).restarts, only(roster).address) == (1, "127.0.0.1:2")
    assert only(roster).state is VerifierState.READY


def test_one_that_says_that_it_has_failed_is_down_and_replaced_when_it_is_gone() -> None:
    roster = Roster()
    roster.observe(["a"], says("a"))
    roster.observe(["a"], says("a", state="down"))
    assert only(roster).state is VerifierState.DOWN
    assert roster.leaving == (), "its end is not intended"
    roster.observe([], {})
    assert roster.to_respawn(0.0) == ("a",)
    roster.observe(["a"], says("a", incarnation="second"))
    assert (only(roster).state, only(roster).restarts) == (VerifierState.READY, 1)


def test_an_unreadable_report_or_a_false_name_counts_as_silence() -> None:
    for wrong in (says("a", sessions="many"), says("a", state="fine"), says("a", name="b"), {"a": {}}):
        roster = Roster()
        roster.observe(["a"], wrong)
        assert only(roster).state is VerifierState.DOWN


def test_one_that_vanishes_is_down_and_replaced_later_and_later_until_it_answers() -> None:
    roster = Roster()
    roster.observe(["a"], says("a"))
    roster.observe([], {})
    assert only(roster).state is VerifierState.DOWN
    asked_at_s = [second for second in range(40) if roster.to_respawn(float(second))]
    assert asked_at_s == [0, 1, 3, 7, 15, 31]
    roster.observe(["a"], says("a", incarnation="second"))
    assert only(roster).restarts == 1
    roster.observe([], {})
    assert roster.to_respawn(40.0) == ("a",)


def test_a_replacement_that_dies_while_it_starts_does_not_reset_the_backoff() -> None:
    roster = Roster()
    roster.observe(["a"], says("a"))
    asked_at_s = []
    for second in range(20):
        roster.observe([], {})
        if roster.to_respawn(float(second)):
            asked_at_s.append(second)
            roster.observe(["a"], {})  # it is listed, then dies before it answers
    assert asked_at_s == [0, 1, 3, 7, 15]


def test_one_that_vanishes_while_draining_was_removed_on_purpose_and_is_forgotten() -> None:
    for last_words in (says("a", state="draining"), {}):
        roster = Roster()
        roster.observe(["a"], says("a", state="draining"))
        roster.observe(["a"], last_words)
        roster.observe([], {})
        assert roster.infos == ()
        assert roster.to_respawn(0.0) == ()


def test_an_answer_from_before_the_drain_does_not_make_its_end_a_loss() -> None:
    roster = Roster()
    roster.observe(["a"], says("a"))
    roster.drained("a")
    assert only(roster).state is VerifierState.DRAINING, "before it says so"
    roster.observe(["a"], says("a", state="ready"))
    assert roster.leaving == ("a",)
    roster.observe([], {})
    assert roster.to_respawn(0.0) == ()


def test_a_verifier_that_was_restarted_no_longer_drains() -> None:
    roster = Roster()
    roster.observe(["a"], says("a", state="draining"))
    roster.observe(["a"], says("a", incarnation="second"))
    assert roster.leaving == ()
    roster.observe([], {})
    assert roster.to_respawn(0.0) == ("a",)


def test_what_a_replaced_process_says_late_is_refused_and_counted() -> None:
    roster = Roster()
    roster.observe(["a"], says("a", incarnation="first"))
    roster.observe(["a"], says("a", incarnation="second", address="127.0.0.1:2"))
    roster.observe(["a"], says("a", incarnation="first", sessions=7))
    (info,) = roster.infos
    assert (info.address, info.incarnation, info.sessions) == ("127.0.0.1:2", "second", 1)
    assert (info.restarts, info.fenced) == (1, 1), "the first process woke late; it was not started again"
    roster.observe(["a"], says("a", incarnation="second", address="127.0.0.1:2", sessions=2))
    assert roster.infos[0].sessions == 2
    assert roster.infos[0].fenced == 1


def test_a_sick_verifier_is_reported_so_and_is_no_drain() -> None:
    roster = Roster()
    roster.observe(["a"], says("a", state="sick"))
    assert roster.infos[0].state is VerifierState.SICK
    assert roster.leaving == ()
    roster.observe(["a"], says("a"))
    assert roster.infos[0].state is VerifierState.READY
