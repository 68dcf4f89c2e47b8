"""A clock that stands still while anything happens, and the costs of what happens."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass


class VirtualClock:
    """Events in the order of their times, in seconds; those of one time in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def advance(self) -> None:
        """Let the next event happen; raise `RuntimeError` where nothing will ever happen again."""
        if not self._events:
            raise RuntimeError(f"nothing will ever happen again after {self.now:.3f} s")
        self.now, _, event = heapq.heappop(self._events)
        event()


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Durations of the parts of a real run, in seconds: all that a simulation needs to know of the machines.

    Attributes:
        step_s: a target step without its rows.
        row_s: each decoding row of a step.
        min_step_s: the shortest step.
        prefill_row_s: each row of a step that reads a prompt.
        drafting_s: a drafted token.
        catch_up_s: a token that the drafter reads.
        job_s: handing the drafter a job of any size; the edge does not count it as drafting.
        edge_event_s: from a frame's arrival at the edge until the session machine has it.
        cloud_event_s: from a frame's arrival at the verifier until the engine can use it.
        commit_s: from a step's end until its commit is on the wire and the next step may begin.
    """

    step_s: float = 0.012
    row_s: float = 0.001
    min_step_s: float = 0.0
    prefill_row_s: float = 0.0003
    drafting_s: float = 0.0006
    catch_up_s: float = 0.0001
    job_s: float = 0.0002
    edge_event_s: float = 0.0003
    cloud_event_s: float = 0.0003
    commit_s: float = 0.0005

    def batch_s(self, decoding: int, reading: int) -> float:
        """Return the duration of a step with rows of sessions that decode, and of those that read a prompt."""
        return max(self.min_step_s, self.step_s + self.row_s * decoding + self.prefill_row_s * reading)

    def propose_s(self, read: int, drafted: int) -> float:
        """Return the drafter's own time for a job that reads `read` tokens and drafts `drafted`."""
        return self.catch_up_s * max(0, read - 1) + self.drafting_s * drafted
