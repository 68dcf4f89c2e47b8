"""Signals end work in steps between two of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

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
