"""The slots of API keys over several verifiers: what leases, edges' reports and verifiers' lists make of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_cluster import ready

from outrider.coordinator.cluster import SendAway, VerifierState
from outrider.coordinator.lease_admission import RESUME_S, Caller, CallerAdmission
from outrider.proto.errors import ResourceExhausted
from outrider.proto.plumbing.access import Key, Keys, secret_sha256
from outrider.proto.types import SessionReport

ALICE = Key("alice", secret_sha256("alices"), max_sessions=1)
LEASE_S = 600.0


class Fleet:
    """Two verifiers and a coordinator's admission, which polls them when `poll` is called."""

    def __init__(self, path: Path, *keys: Key) -> None:
        self.now_s = 0.0
        self.path = path / "keys.toml"
        self.write(*(keys or (ALICE,)))
        self.admission = CallerAdmission(Keys.from_file(self.path), clock=lambda: self.now_s)
        self.texts: dict[str, dict[str, dict[str, float]]] = {"a": {}, "b": {}}  # started at, by verifier, key, session

    def write(self, *keys: Key) -> None:
        self.path.write_text("".join(key.toml() for key in keys))
        self.path.chmod(0o600)

    def start(self, verifier: str, session: str, key: str = "alice") -> None:
        self.texts[verifier].setdefault(key, {})[session] = self.now_s

    def end(self, verifier: str, session: str, key: str = "alice") -> None:
        del self.texts[verifier][key][session]

    def lease(self, session: str, verifier: str = "a", key: Key = ALICE) -> None:
        self.admission.grant(Caller(key), session, LEASE_S, verifier)

    def report(self, session: str, key: Key = ALICE) -> None:
        self.admission.settle(Caller(key), SessionReport(session=session, model="tiny", verifier="a"))

    def poll(self, after_s: float = 1.0, **states: Any) -> SendAway:
        self.now_s += after_s
        infos = []
        for name, texts in self.texts.items():
            ages = {key: {one: self.now_s - at for one, at in those.items()} for key, those in texts.items()}
            info = ready(name, texts_of_keys=ages)
            state = states.get(name, VerifierState.READY)
            infos.append(info.down() if state is VerifierState.DOWN else info)
        return self.admission.observe(infos, self.now_s)


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def refused(fleet: Fleet, session: str, verifier: str = "b") -> bool:
    try:
        fleet.lease(session, verifier)
    except ResourceExhausted as error:
        return error.retry_after_s > 0 and "1 sessions" in str(error)
    return False


def flat(away: Mapping[str, frozenset[str]]) -> dict[str, list[str]]:
    return {verifier: sorted(texts) for verifier, texts in away.items()}


def test_an_honest_report_frees_the_slot_at_once_though_the_last_poll_knows_better(fleet: Fleet) -> None:
    for i in range(20):
        fleet.lease(f"s{i}")
        fleet.start("a", f"s{i}")
        assert fleet.poll(0.3) == {}
        fleet.end("a", f"s{i}")
        fleet.report(f"s{i}")


def test_a_slot_is_free_again_when_a_report_never_comes(fleet: Fleet) -> None:
    fleet.lease("s1")
    fleet.start("a", "s1")
    fleet.poll(300.0)
    assert refused(fleet, "s2"), "it goes on"
    fleet.end("a", "s1")
    fleet.poll()
    assert refused(fleet, "s2"), "it may be between two streams"
    fleet.poll(RESUME_S + 1)
    assert not refused(fleet, "s2")


def test_a_lease_that_no_stream_follows_takes_its_slot_for_a_minute(fleet: Fleet) -> None:
    fleet.lease("s1")
    fleet.poll(RESUME_S - 1)
    assert refused(fleet, "s2")
    fleet.poll(2.0)
    assert not refused(fleet, "s2")


def test_texts_of_a_verifier_that_is_away_keep_their_slots_while_their_leases_last(fleet: Fleet) -> None:
    fleet.lease("s1")
    fleet.start("a", "s1")
    fleet.poll()
    fleet.poll(200.0, a=VerifierState.DOWN)
    assert refused(fleet, "s2")
    fleet.poll(LEASE_S, a=VerifierState.DOWN)
    assert not refused(fleet, "s2"), "nothing locks a key out for ever"


def test_a_coordinator_that_starts_anew_counts_what_verifiers_list(fleet: Fleet) -> None:
    fleet.start("a", "s1")
    fleet.poll()
    assert fleet.admission.running() == {"alice": 1}
    assert refused(fleet, "s2")
    fleet.lease("s1", "b")  # its own slot


def test_what_a_key_has_too_much_ends_no_text_of_another_key_with_that_name(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, ALICE, replace(ALICE, name="mallory", sha256=secret_sha256("mallorys")))
    fleet.start("a", "victim")
    for session in ("old", "victim"):
        fleet.start("a", session, "mallory")
        fleet.now_s += 1.0
    fleet.poll()
    assert flat(fleet.poll()) == {"a": ["mallory/victim"]}


def test_a_session_is_admitted_only_by_its_own_key() -> None:
    info = replace(ready("a"), admitted={"alice/s": 3, "mallory/s": 1 << 31, "alone": 2})
    assert [info.admitted_epoch(key, "s") for key in ("alice", "mallory", "bob", "")] == [3, 1 << 31, -1, -1]
    assert (info.admitted_epoch("", "alone"), info.admitted_epoch("alice", "alone")) == (2, -1)


def test_reports_of_a_key_that_was_caught_are_not_believed(fleet: Fleet) -> None:
    for session, verifier in (("s1", "a"), ("s2", "b")):  # each is reported as ended while it runs
        fleet.lease(session, verifier)
        fleet.start(verifier, session)
        fleet.report(session)
        fleet.now_s += 0.1
    fleet.poll(0.1)
    for session in ("s1", "s2"):
        fleet.report(session)
    assert refused(fleet, "s3")
    assert flat(fleet.poll()) == {"b": ["alice/s2"]}


def test_a_text_that_moves_counts_once_and_is_never_sent_away(fleet: Fleet) -> None:
    fleet.lease("s1")
    fleet.start("a", "s1")
    fleet.poll()
    fleet.lease("s1", "b")
    fleet.start("b", "s1")  # verifier a has not noticed yet
    for _ in range(3):
        assert fleet.poll() == {}
    assert fleet.admission.running() == {"alice": 1}


def test_texts_of_a_key_that_is_taken_away_are_sent_away_and_those_of_others_stay(tmp_path: Path) -> None:
    bob = Key("bob", secret_sha256("bobs"))
    fleet = Fleet(tmp_path, ALICE, bob)
    for verifier, session, key in (("a", "s1", "alice"), ("a", "b1", "bob"), ("b", "b2", "bob"), ("a", "n1", "new")):
        fleet.start(verifier, session, key)
    assert fleet.poll() == fleet.poll() == {}
    fleet.write(ALICE)
    assert fleet.poll() == {}
    assert flat(fleet.poll()) == {"a": ["bob/b1"], "b": ["bob/b2"]}, "one that another coordinator may know stays"


def test_a_file_of_keys_that_is_broken_for_a_moment_sends_nobody_away(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.start("a", "s1")
    fleet.poll()
    fleet.path.write_text("")
    assert fleet.poll() == {}
    fleet.write(ALICE)
    assert fleet.poll() == fleet.poll() == {}


def test_a_lower_limit_holds_for_what_goes_on(tmp_path: Path) -> None:
    three = Key("alice", ALICE.sha256, max_sessions=3)
    fleet = Fleet(tmp_path, three)
    for i, verifier in enumerate("aba"):
        fleet.lease(f"s{i}", verifier, three)
        fleet.start(verifier, f"s{i}")
        assert fleet.poll() == {}
    fleet.write(ALICE)
    fleet.poll()
    assert flat(fleet.poll()) == {"a": ["alice/s2"], "b": ["alice/s1"]}, "the oldest stays"
