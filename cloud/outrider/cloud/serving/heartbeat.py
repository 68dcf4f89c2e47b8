"""The heartbeat of an engine's loop, and the judgement of its health by it.

The engine's thread notes every turn of its loop and every step. Whoever judges looks from another thread, at times of
its own, and never waits for the engine. Time counts only as far as the judge could look: where the whole process stood
still, or the machine slept, the engine has not been late.

Long work is no false alarm. A step may take ten times what steps of its kind take, rows beyond theirs counted in
proportion, and never less than `hung_s`. A kind that has not been seen (reading prompts or not, and each doubling of
the rows: the first pass, kernels compiled, CUDA graphs captured) may take `first_s`. Loading comes before the loop.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from outrider.proto.plumbing.loop_watch import HUNG_S, LOST_S, Stillness

KEPT = 256  # steps of a kind that its median rests on
_FEW = 3  # steps before a median is believed


class EngineCondition(Enum):
    """Health of an engine; whoever is not well gets no new sessions."""

    WELL = "well"
    SICK = "sick"  # many steps fail, or take ten times their median
    HUNG = "hung"  # its loop stands still
    LOST = "lost"  # has been for so long that it will not come back


@dataclass(frozen=True, slots=True)
class HealthRules:
    """Bounds of an engine's health; times in seconds.

    Attributes:
        times: multiple of its median at which a step is slow.
        hung_s: least time after which a step, or other work of the loop, counts as hung.
        first_s: the same for a step of a kind that has not been seen.
        slow_s: least time of a slow step.
        lost_s: time after which a hung engine is given up.
        newest: steps looked at, and `bad` that fail or are slow among them make an engine sick.
        forget_s: time without a step after which they are forgotten, so that a sick engine is tried again.
    """

    times: float = 10.0
    hung_s: float = HUNG_S
    first_s: float = 120.0
    slow_s: float = 1.0
    lost_s: float = LOST_S
    newest: int = 8
    bad: int = 3
    forget_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Work:
    """A step: its rows, and whether some of them read a prompt."""

    rows: int
    reads: bool

    @property
    def kind(self) -> tuple[bool, int]:
        """Steps of one kind take times of one order."""
        return self.reads, self.rows.bit_length()


class Heartbeat:
    """Notes of an engine's thread, which any other may read.

    Attributes:
        beats: turns of the loop and steps so far.
        work: step that runs; None: none does.
        done: steps that have ended since the judge last looked, and their seconds; None: it failed.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.beats = 0
        self.work: Work | None = None
        self.done: deque[tuple[Work, float] | None] = deque(maxlen=KEPT)
        self._clock = clock
        self._began = 0.0

    def beat(self) -> None:
        self.work = None
        self.beats += 1

    def begin(self, rows: int, *, reads: bool) -> None:
        """Note that a step begins, of which some rows may read a prompt."""
        self._began = self._clock()
        self.work = Work(rows, reads)
        self.beats += 1

    def end(self) -> None:
        if self.work is not None:
            self.done.append((self.work, self._clock() - self._began))
        self.beat()

    def note(self, rows: int, seconds: float) -> None:
        """Note a step of one session that ran beside others."""
        self.done.append((Work(rows, reads=False), seconds))
        self.beats += 1

    def fail(self) -> None:
        """Note that a step has failed; smaller ones may be tried in its place, whose failures do not count."""
        self.done.append(None)
        self.beat()


class HealthJudge:
    """Judge of one engine, who looks about every `every_s` seconds."""

    def __init__(self, heart: Heartbeat, rules: HealthRules, every_s: float, now: float) -> None:
        self._heart = heart
        self._rules = rules
        self._still = Stillness(every_s, now)
        self._stepped_at = now
        self._newest: deque[bool] = deque(maxlen=rules.newest)  # whether each was bad
        self._of: dict[bool, deque[tuple[int, float]]] = {reads: deque(maxlen=KEPT) for reads in (False, True)}
        self._kinds: set[tuple[bool, int]] = set()

    def look(self, now: float) -> EngineCondition:
        """Return the state of the engine at `now`, in seconds."""
        still_s = self._still.look(self._heart.beats, now)
        self._take_steps(now)
        bound_s = self._bound_s(self._heart.work)
        if still_s > bound_s + self._rules.lost_s:
            return EngineCondition.LOST
        if still_s > bound_s:
            return EngineCondition.HUNG
        return EngineCondition.SICK if sum(self._newest) >= self._rules.bad else EngineCondition.WELL

    def _take_steps(self, now: float) -> None:
        if now - self._stepped_at > self._rules.forget_s:
            self._newest.clear()
        while self._heart.done:
            step = self._heart.done.popleft()
            self._stepped_at = now
            if step is None:
                self._newest.append(True)
                continue
            work, seconds = step
            usual_s = self._usual_s(work)
            slow = usual_s is not None and seconds > max(self._rules.slow_s, self._rules.times * usual_s)
            self._newest.append(slow)
            self._of[work.reads].append((work.rows, seconds))
            self._kinds.add(work.kind)

    def _usual_s(self, work: Work) -> float | None:
        """Return the median time of such steps, with rows beyond theirs in proportion; None: there were too few."""
        of_kind = self._of[work.reads]
        if len(of_kind) < _FEW or work.kind not in self._kinds:
            return None
        return statistics.median(seconds * max(1.0, work.rows / rows) for rows, seconds in of_kind)

    def _bound_s(self, work: Work | None) -> float:
        rules = self._rules
        if work is None:
            return rules.hung_s
        usual_s = self._usual_s(work)
        return rules.first_s if usual_s is None else max(rules.hung_s, rules.times * usual_s)
