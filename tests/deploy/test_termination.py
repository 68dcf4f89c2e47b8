"""Signals end work in steps between two of them, and whatever a command has started is found and ended."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outrider.deploy.process import descendants as module
from outrider.deploy.process.descendants import descendants, kill, until_gone
from outrider.deploy.process.termination import StopAtStep


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Check that the handlers of signals are the same after a test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    assert {number: signal.getsignal(number) for number in before} == before


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_before_the_first_step_there_is_nothing_to_wait_for(number: int) -> None:
    stop = StopAtStep()
    with pytest.raises(KeyboardInterrupt), stop.listening():
        send(number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_after_a_step_the_work_is_asked_to_end_itself(number: int) -> None:
    stop = StopAtStep()
    with stop.listening():
        stop.stepped(1)
        assert not stop.stopping()
        send(number)
        send(number)
        assert stop.stopping()


def test_an_ignored_ctrl_c_stays_ignored_while_sigterm_is_heeded() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        stop = StopAtStep()
        with stop.listening():
            stop.stepped(1)
            send(signal.SIGINT)
            assert not stop.stopping()
            send(signal.SIGTERM)
            assert stop.stopping()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


# --- processes below ---


def named_sleep(tmp_path: Path, name: str) -> str:
    """Return a program of this name that sleeps."""
    sleep = shutil.which("sleep")
    assert sleep is not None
    return shutil.copy(sleep, tmp_path / name)


def names() -> set[str]:
    return {process.name for process in descendants()}


def until(holds: Callable[[], object]) -> None:
    async def wait() -> None:
        async with asyncio.timeout(60):
            while not holds():  # noqa: ASYNC110 - the condition has no event
                await asyncio.sleep(0.01)

    asyncio.run(wait())


def test_children_of_children_are_found_and_killed_also_after_their_parent(tmp_path: Path) -> None:
    program = named_sleep(tmp_path, "deep (x) y")
    parent = subprocess.Popen(["/bin/sh", "-c", f"'{program}' 600 & wait"])
    until(lambda: "deep (x) y" in names())
    family = descendants()
    assert any(process.pid == parent.pid for process in family)
    parent.kill()
    parent.wait()
    assert "deep (x) y" not in names()  # it is no longer below this process
    (deep,) = (process for process in family if process.name == "deep (x) y")
    kill([deep._replace(started=deep.started + 1)])  # another process of that number is left alone
    assert module._read(Path("/proc") / str(deep.pid)) is not None
    kill(family)
    until(lambda: (now := module._read(Path("/proc") / str(deep.pid))) is None or now.state == "Z")


def test_the_end_of_a_process_is_noticed_though_nobody_waits_for_it(tmp_path: Path) -> None:
    child = subprocess.Popen([named_sleep(tmp_path, "head"), "600"])
    until(lambda: "head" in names())

    async def watch() -> None:
        watching = asyncio.create_task(until_gone("head"))
        await asyncio.sleep(0)
        assert not watching.done()
        child.kill()  # a zombie from now on
        async with asyncio.timeout(60):
            await watching

    try:
        asyncio.run(watch())
    finally:
        child.wait()
