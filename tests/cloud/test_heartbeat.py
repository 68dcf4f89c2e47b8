"""An engine is hung when its loop stands still beyond what its work may take, and sick when its steps go wrong."""

from __future__ import annotations

import pytest

from outrider.cloud.serving.heartbeat import EngineCondition, HealthJudge, HealthRules, Heartbeat

RULES = HealthRules()
EVERY_S = 0.5
WELL, SICK, HUNG, LOST = EngineCondition.WELL, EngineCondition.SICK, EngineCondition.HUNG, EngineCondition.LOST


class Engine:
    """An engine on a virtual clock, whose judge looks every half second."""

    def __init__(self) -> None:
        self.now = 0.0
        self.heart = Heartbeat(lambda: self.now)
        self.judge = HealthJudge(self.heart, RULES, EVERY_S, 0.0)
        self.seen: list[EngineCondition] = []

    def step(self, seconds: float, rows: int = 1, *, reads: bool = False, failed: bool = False) -> None:
        self.heart.begin(rows, reads=reads)
        self.wait(seconds)
        if failed:
            self.heart.fail()
        else:
            self.heart.end()

    def wait(self, seconds: float) -> None:
        """Let time pass, in which the judge looks."""
        end = self.now + seconds
        while (look := (len(self.seen) + 1) * EVERY_S) <= end:
            self.now = look
            self.seen.append(self.judge.look(look))
        self.now = end

    def idle(self, seconds: float) -> None:
        """Turn the loop twice a second with nothing to do."""
        for _ in range(round(2 * seconds)):
            self.heart.beat()
            self.wait(0.5)

    def until(self, state: EngineCondition, at_most_s: float) -> float:
        began = self.now
        while self.judge.look(self.now) is not state:
            assert self.now - began < at_most_s
            self.now += EVERY_S
        return self.now - began


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_a_hung_step_is_noticed_within_seconds_and_given_up_after_a_minute(engine: Engine) -> None:
    for _ in range(20):
        engine.step(0.03)
    engine.heart.begin(1, reads=False)
    assert RULES.hung_s <= engine.until(HUNG, 10.0) < RULES.hung_s + 2
    assert engine.until(LOST, 70.0) > RULES.lost_s - 2


def test_an_engine_that_wakes_is_well_again(engine: Engine) -> None:
    for _ in range(20):
        engine.step(0.03)
    engine.heart.begin(1, reads=False)
    engine.until(HUNG, 10.0)
    engine.heart.end()
    assert engine.judge.look(engine.now + EVERY_S) is WELL


def test_an_idle_engine_and_work_between_steps_are_watched_too(engine: Engine) -> None:
    engine.idle(100.0)
    assert set(engine.seen) == {WELL}
    engine.until(HUNG, 10.0)


LONG_WORK = {
    "first pass": lambda e: e.step(100.0),
    "first prefill of a long prompt": lambda e: ([e.step(0.03) for _ in range(50)], e.step(90.0, 512, reads=True)),
    "graph captured for more rows": lambda e: ([e.step(0.03) for _ in range(50)], e.step(90.0, 9)),
    "slow steps that always were": lambda e: [e.step(30.0) for _ in range(9)],
    "chunks that take longer as the context grows": lambda e: [e.step(1 + i / 5, 512, reads=True) for i in range(90)],
    "a last chunk that is shorter": lambda e: [e.step(4.0 if i % 5 else 1.0, 512, reads=True) for i in range(40)],
    "many rows of the same doubling": lambda e: [e.step(0.4 if i % 3 else 0.8, 8 + i % 8) for i in range(90)],
}


@pytest.mark.parametrize("name", LONG_WORK)
def test_long_work_is_no_false_alarm(engine: Engine, name: str) -> None:
    LONG_WORK[name](engine)
    engine.wait(EVERY_S)
    assert set(engine.seen) == {WELL}


def test_a_process_that_stood_still_has_not_hung(engine: Engine) -> None:
    for _ in range(20):
        engine.step(0.03)
    engine.heart.begin(1, reads=False)
    assert engine.judge.look(engine.now + 45.0) is WELL, "it was stopped, and the judge with it"


def test_steps_that_fail_make_it_sick_until_they_succeed(engine: Engine) -> None:
    for i in range(40):
        engine.step(0.03, failed=i >= 37)
    engine.wait(EVERY_S)
    assert engine.seen[-1] is SICK
    for _ in range(RULES.newest):
        engine.step(0.03)
    engine.wait(EVERY_S)
    assert engine.seen[-1] is WELL


def test_a_single_step_that_fails_or_is_slow_is_no_sickness(engine: Engine) -> None:
    for i in range(200):
        engine.step(2.0 if i == 100 else 0.03, failed=i == 150)
    engine.wait(EVERY_S)
    assert set(engine.seen) == {WELL}


def test_steps_of_ten_times_their_median_make_it_sick(engine: Engine) -> None:
    for _ in range(100):
        engine.step(0.15)
    for _ in range(4):
        engine.step(1.4)
    assert set(engine.seen) == {WELL}
    for _ in range(4):
        engine.step(1.6)
    engine.wait(EVERY_S)
    assert engine.seen[-1] is SICK


def test_a_sick_engine_without_sessions_is_tried_again(engine: Engine) -> None:
    for _ in range(10):
        engine.step(0.03, failed=True)
    engine.idle(RULES.forget_s - 2)
    assert engine.seen[-1] is SICK
    engine.idle(4.0)
    assert engine.seen[-1] is WELL
