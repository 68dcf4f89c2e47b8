"""An event loop that stands still is noticed from beside it; and cores of a container are counted."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading

import pytest

from outrider.proto.plumbing import cores
from outrider.proto.plumbing.cores import available_cores, computing_cores, limit_spinning
from outrider.proto.plumbing.loop_watch import HUNG_S, LOOK_S, LOST_S, LoopWatch

HERE = threading.get_ident()


class Scene:
    """A loop that turns or not, watched on a virtual clock."""

    def __init__(self) -> None:
        self.watch = LoopWatch("a", lambda: None)
        self.now = self.watch._still._looked_at
        self.lost = False

    def pass_time(self, seconds: float, *, turning: bool) -> None:
        for _ in range(round(seconds / LOOK_S)):
            self.now += LOOK_S
            self.watch._beats += turning
            self.lost |= self.watch.look(self.now, HERE)


def test_a_loop_is_hung_after_five_seconds_and_lost_a_minute_later() -> None:
    scene = Scene()
    scene.pass_time(100.0, turning=True)
    scene.pass_time(HUNG_S, turning=False)
    assert not scene.watch.hung
    scene.pass_time(2 * LOOK_S, turning=False)
    assert scene.watch.hung
    scene.pass_time(LOST_S - 2 * LOOK_S, turning=False)
    assert not scene.lost
    scene.pass_time(2 * LOOK_S, turning=False)
    assert scene.lost


def test_a_loop_that_turns_again_is_well() -> None:
    scene = Scene()
    scene.pass_time(30.0, turning=False)
    assert scene.watch.hung
    scene.pass_time(LOOK_S, turning=True)
    assert not scene.watch.hung
    scene.pass_time(60.0, turning=False)
    assert not scene.lost, "it counts from its last turn"


def test_a_process_that_is_stopped_again_and_again_has_not_hung() -> None:
    scene = Scene()
    for _ in range(100):
        scene.now += 600.0  # SIGSTOP, or the machine slept: the watch is the first to run
        scene.lost |= scene.watch.look(scene.now, HERE)
        assert not scene.watch.hung
        scene.pass_time(LOOK_S, turning=True)
    assert not scene.lost


PROGRAM = """
import asyncio, time
from outrider.proto.plumbing.loop_watch import LoopWatch, end_process

async def main():
    with LoopWatch("a", end_process, hung_s=1.0, lost_s=1.0):
        await asyncio.sleep(1)
        print("goes on", flush=True)
        blocks()

def blocks():
    time.sleep(600)

asyncio.run(main())
"""


def test_a_call_that_blocks_for_ever_ends_the_process_and_is_named() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], timeout=120, check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (1, "goes on\n")
    assert "the event loop of a stands still" in ended.stderr
    assert "in blocks" in ended.stderr


def test_the_watch_ends_with_its_loop() -> None:
    def watching() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "outrider-loop-watch"]

    async def left_without_stopping() -> None:
        LoopWatch("a", lambda: None).begin()

    before = set(watching())
    asyncio.run(left_without_stopping())
    for thread in set(watching()) - before:
        thread.join(60)
        assert not thread.is_alive()


# --- cores ---


@pytest.mark.parametrize(
    ("cpu_max", "expected"),
    [
        ("max 100000", 8),
        ("300000 100000", 3),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("1600000 100000", 8),
        ("", 8),
    ],
)
def test_a_container_has_no_more_cores_than_its_quota(tmp_path, monkeypatch, cpu_max, expected) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    (tmp_path / "cpu.max").write_text(cpu_max)
    assert available_cores(tmp_path / "cpu.max") == expected
    assert available_cores(tmp_path / "nowhere") == 8


@pytest.mark.parametrize(("available", "processes", "each"), [(1, 1, 1), (2, 1, 1), (8, 1, 7), (8, 2, 3), (4, 9, 1)])
def test_what_computes_leaves_a_core_to_the_rest(monkeypatch, available, processes, each) -> None:
    monkeypatch.setattr(cores, "available_cores", lambda: available)
    assert computing_cores(processes) == each


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({}, {"GOMP_SPINCOUNT": "30000"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "passive"}, {"OMP_WAIT_POLICY": "passive"}),
    ],
)
def test_idle_threads_spin_briefly_unless_the_environment_says_otherwise(monkeypatch, given, left) -> None:
    environment = dict(given)
    monkeypatch.setattr(os, "environ", environment)
    limit_spinning()
    assert environment == left
