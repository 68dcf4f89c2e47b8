"""SIGTERM ends a command in order: it unwinds, and work in steps ends between two of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from outrider.deploy.termination import StopAtStep, Terminated, sigterm_unwinds


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Check that the handlers of signals are the same after a test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    assert {number: signal.getsignal(number) for number in before} == before


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_sigterm_unwinds_once_and_cannot_disturb_the_unwinding() -> None:
    ended = []

    def work() -> None:
        try:
            send(signal.SIGTERM)
        finally:
            send(signal.SIGTERM)
            ended.append(True)

    with pytest.raises(Terminated), sigterm_unwinds():
        work()
    assert ended


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)])
def test_before_the_first_step_there_is_nothing_to_wait_for(number: int, error: type[BaseException]) -> None:
    stop = StopAtStep()
    with pytest.raises(error), stop.listening():
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
