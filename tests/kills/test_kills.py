"""Processes of a fleet die and stop at random; the plan repeats, and the checker sees what must not be."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import islice

import pytest
from kill_check import Held, KillRun, Sent, read_logs
from kill_plan import KINDS, acts
from killed_texts import TextRun
from questions import Question
from run_kills import SPARED, KillOptions, run_kills

MEMBERS = {kind: [f"{kind}-a", f"{kind}-b"] for kind in KINDS} | {"coordinator": ["coordinator"]}
QUESTION = Question("w5", 1, "w1 w2 w3")
WHOLE = TextRun(QUESTION, "daemon-a", 10, [1.0, 1.1, 3.0, 3.1], "w1 w2 w3", done=True, request_id="whole")
LOST = TextRun(QUESTION, "daemon-b", 11, [1.0, 1.1, 1.2], "w1", error="the connection broke", request_id="lost")


def test_a_seed_repeats_its_plan_and_every_process_gets_every_signal() -> None:
    plan = list(islice(acts(4, MEMBERS, 1.0), 300))
    assert plan == list(islice(acts(4, MEMBERS, 1.0), 300))
    assert plan != list(islice(acts(5, MEMBERS, 1.0), 300))
    assert {(act.member, act.signal) for act in plan} == {
        (name, signal) for names in MEMBERS.values() for name in names for signal in ("KILL", "STOP")
    }
    assert all((act.for_s > 0) == (act.signal == "STOP") for act in plan)


def test_spared_processes_are_stopped_and_never_killed() -> None:
    plan = list(islice(acts(4, MEMBERS, 1.0, SPARED), 300))
    assert {act.signal for act in plan if act.member in SPARED} == {"STOP"}
    assert {act.signal for act in plan if act.member == "verifier-b"} == {"KILL", "STOP"}


def test_a_run_in_which_only_killed_daemons_lose_texts_violates_nothing() -> None:
    assert KillRun(runs=[WHOLE, LOST], killed={11}).violations() == []


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"runs": [replace(WHOLE, text="w1 w2 w4")]}, "not its oracle's"),
        ({"runs": [replace(WHOLE, text="w1 w2")]}, "not its oracle's"),
        ({"runs": [LOST], "killed": {10}}, "nobody killed"),
        ({"runs": [replace(LOST, text="w2")], "killed": {11}}, "wrong before it ends"),
        ({"unexpected": {"verifier-a": [-11]}}, "ended by itself"),
        ({"before": {"v": Held(5, 100, 40)}, "after": {"v": Held(5, 200, 40)}}, "has grown"),
        ({"before": {"v": Held(5, 100, 40)}, "after": {"v": Held(5, 100, 80)}}, "descriptors"),
        ({"left": {"outrider": 77}}, "left running"),
        ({"logged": ["a traceback"]}, "logged"),
    ],
)
def test_what_must_not_be_is_a_violation(changes: dict[str, object], names: str) -> None:
    (violation,) = KillRun(**changes).violations()  # type: ignore[arg-type]
    assert names in violation


def test_another_process_of_the_same_name_may_hold_more() -> None:
    run = KillRun(before={"v": Held(5, 100, 40)}, after={"v": Held(6, 400, 90)})
    assert run.violations() == []


def test_the_table_counts_texts_by_what_hit_them() -> None:
    sent = [
        Sent("verifier-a", "verifier", "KILL", 5, 2.0, 2.0),
        Sent("daemon-b", "daemon", "KILL", 11, 1.15, 1.15),
        Sent("link-a", "link", "STOP", 6, 8.0, 9.0),
    ]
    run = KillRun(sent, [WHOLE, LOST], {11}, reopened=[("whole", "a", 2.1), ("whole", "b", 1.0)])
    rows = {(row.process, row.signal): row for row in run.table()}
    killed = rows["verifier", "KILL"]
    assert (killed.sent, killed.texts, killed.same, killed.lost, killed.reopened) == (1, 1, 1, 0, 1)
    assert killed.worst_gap_s == pytest.approx(1.9)
    own = rows["daemon", "KILL"]
    assert (own.sent, own.texts, own.same, own.lost) == (1, 1, 0, 1)
    assert (rows["link", "STOP"].sent, rows["link", "STOP"].texts) == (1, 0)


def test_logs_tell_of_defects_and_of_lost_streams(tmp_path) -> None:
    log = tmp_path / "daemon-a.log"
    log.write_text(
        '{"time":"2026-01-01T00:00:01.000Z","level":"info","message":"the stream is lost: gone",'
        '"session":"s","verifier":"a"}\n'
        '{"time":"2026-01-01T00:00:02.000Z","level":"warning","message":"fine"}\n'
        '{"time":"2026-01-01T00:00:03.000Z","level":"error","message":"x","traceback":"Traceback ..."}\n'
        "Fatal Python error\n"
    )
    defects, lost = read_logs([log, tmp_path / "none"], 0.0)
    assert [line.split(":")[0] for line in defects] == ["daemon-a.log"] * 2
    assert [(session, verifier) for session, verifier, _ in lost] == [("s", "a")]


@pytest.mark.soak
def test_texts_are_their_oracles_while_processes_are_killed_and_stopped(tmp_path) -> None:
    options = KillOptions(kills=16, seed=2, tokens=120)
    run = asyncio.run(run_kills(tmp_path, options))
    assert run.violations() == []
    assert len(run.sent) == 16
    assert {sent.kind for sent in run.sent if sent.signal == "KILL"} == set(KINDS)
    assert sum(each.done for each in run.runs) >= 8
