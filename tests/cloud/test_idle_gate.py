"""Training waits while verifiers are busy, is not starved for ever, and says so; all by a clock of the test."""

from __future__ import annotations

import itertools

import pytest

from outrider.cloud.learning.cpu_share import LOOK_S, OPEN, RESTING, WAITING, IdleGate


class Machine:
    """A machine of two cores with verifiers that use `loads` cores each, and a gate that a trainer asks."""

    def __init__(self, max_load: float = 0.7, max_wait_s: float = 60.0, **loads: float) -> None:
        self.now = 100.0
        self.loads = loads
        self.used = dict.fromkeys(loads, 1000.0)
        self.looks = 0
        self.gate = IdleGate(self._look, lambda: self.now, 2, max_load, max_wait_s)

    def _look(self) -> dict[str, float]:
        self.looks += 1
        return {name: self.used[name] for name in self.loads}

    def run(self, seconds: float, every_s: float = 0.5) -> list[float]:
        """Ask for leave while time passes, and return when it was given."""
        opened, end = [], self.now + seconds
        while self.now < end:
            if self.gate.opens():
                opened.append(self.now)
            self.now += every_s
            for name, load in self.loads.items():
                self.used[name] = self.used.get(name, 0.0) + load * every_s
        return opened


def test_training_runs_beside_idle_verifiers_and_stops_while_they_are_busy() -> None:
    machine = Machine(a=0.1, b=0.2)
    machine.run(10)
    assert machine.gate.load == pytest.approx(0.15)
    assert machine.gate.state == OPEN
    machine.loads["b"] = 1.8
    machine.run(2 * LOOK_S)
    assert machine.run(20) == []
    assert machine.gate.load == pytest.approx(0.95)
    assert machine.gate.state == WAITING
    assert machine.gate.waited_s > 20
    machine.loads["b"] = 0.0
    assert machine.run(4 * LOOK_S)
    assert machine.gate.state == OPEN
    assert machine.gate.waited_s == 0
    assert machine.gate.hurried == 0


def test_a_fleet_that_never_idles_is_learned_from_once_in_a_while(caplog) -> None:
    machine = Machine(max_wait_s=30.0, a=2.0)
    opened = machine.run(301)
    assert len(opened) == machine.gate.hurried == 10
    assert {round(b - a) for a, b in itertools.pairwise(opened)} == {30}
    assert machine.gate.state == WAITING, "such a step is no idle time"
    assert "no idle time for 30 s, as verifiers take 100 %" in caplog.text


def test_the_first_step_waits_until_the_load_is_known() -> None:
    machine = Machine(a=0.0)
    assert not machine.gate.opens()
    assert machine.gate.load is None
    first, *_ = machine.run(10)
    assert first == 100.0 + LOOK_S


def test_time_with_nothing_to_learn_from_is_no_waiting() -> None:
    machine = Machine(max_wait_s=30.0, a=2.0)
    machine.run(29)
    machine.gate.rest()
    assert machine.gate.state == RESTING
    assert machine.gate.waited_s == 0
    assert machine.run(29) == []


def test_verifiers_are_asked_now_and_then_and_not_where_training_never_waits() -> None:
    machine = Machine(a=0.1)
    machine.run(20, every_s=0.01)
    assert machine.looks <= 20 / LOOK_S + 1
    eager = Machine(max_load=1.0, a=2.0)
    assert len(eager.run(10)) == 20
    assert eager.looks == 0


def test_verifiers_that_come_go_and_restart_are_counted_from_there() -> None:
    machine = Machine(a=1.0)
    machine.run(10)
    machine.loads["new"], machine.used["new"] = 0.5, 5000.0
    machine.run(2 * LOOK_S)
    assert machine.gate.load == pytest.approx(0.75)
    assert machine.gate.watched == 2
    machine.used["new"] = 0.0  # its process was started again
    machine.run(4 * LOOK_S)
    assert machine.gate.load == pytest.approx(0.75)
    del machine.loads["a"]
    machine.run(2 * LOOK_S)
    assert machine.gate.load == pytest.approx(0.25)
    assert machine.gate.watched == 1
