"""An event loop that stands still is noticed from beside it, and one that was merely stopped is not."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

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
