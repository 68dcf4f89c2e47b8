"""Exploration of the states of a small world, with equal states merged by hash.

A search goes by detours. A run makes one wherever it takes any other than the first of the things that can happen, or
any other than the first option of a choice. All runs of up to so many detours are explored, each to its end; where no
run has more, every run there is has been. (Delay-bounded scheduling: Emmi, Qadeer and Rakamaric, POPL 2011.)
"""

from __future__ import annotations

import hashlib
import itertools
import marshal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from small_rules import CHOICES, Action, Rules, Violation
from small_world import State, World

Step = tuple[Action, tuple[int, ...]]  # what happens, and the choices made within
Start = tuple[State, Any]  # a state, and the way to it: the last step and the way before


@dataclass
class Found:
    """Result of an exploration.

    Attributes:
        states: states that differ.
        transitions: ways from one to another.
        ended: states in which nothing more can happen.
        detours: all runs of up to so many are among them.
        complete: whether there are no other runs at all.
        violation: the first one found; None: there is none.
        path: the way to it.
    """

    states: int = 0
    transitions: int = 0
    ended: int = 0
    detours: int = -1
    complete: bool = False
    violation: Violation | None = None
    path: tuple[Step, ...] = ()


def hash_of(state: State) -> bytes:
    """Return the hash of a state."""
    plain = (state.edge, state.verifiers, [tuple(stream) for stream in state.streams], state.opened, state.left)
    return hashlib.blake2b(marshal.dumps(plain, 2), digest_size=16).digest()


def successors(world: World, state: State) -> Iterator[tuple[Step, State | Violation]]:
    """Yield all that can happen next, and what follows."""
    for action in itertools.chain(world.progress(state), world.faults(state)):
        scripts: list[tuple[int, ...]] = [()]
        while scripts:
            script = scripts.pop()
            try:
                after: State | Violation = world.after(state, action, script)
            except Violation as violation:
                after = violation
            options = list(CHOICES.options)
            made = (*script, *(0 for _ in options[len(script) :]))
            for place in range(len(script), len(options)):
                scripts += [(*made[:place], other) for other in range(1, options[place])]
            yield (action, made), after


class Search:
    """A search through the states of a world."""

    def __init__(self, rules: Rules) -> None:
        self.world = World(rules)
        self.found = Found()
        self._seen: set[bytes] = set()

    def run(self, detours: int | None = None) -> Found:
        """Explore all runs of up to `detours` detours, or all there are, until something is violated."""
        found, starts = self.found, [(self.world.first(), None)]
        while starts and (detours is None or found.detours < detours):
            further: list[Start] = []
            for start in starts:
                self._follow(start, further)
                if found.violation is not None:
                    return found
            found.detours += 1
            starts = further
        found.complete = not starts
        return found

    def _follow(self, start: Start, further: list[Start]) -> None:
        """Go from a state to the end without a detour; add to `further` where detours lead."""
        here, path = start
        passed = set[bytes]()
        while (key := hash_of(here)) not in self._seen:
            self._seen.add(key)
            passed.add(key)
            self.found.states += 1
            ends = not any(True for _ in self.world.progress(here))
            following: Start | None = None
            for step, after in successors(self.world, here):
                self.found.transitions += 1
                if after == here:
                    after = Violation("what happens changes nothing, and happens again")
                if isinstance(after, Violation):
                    return self._fail(after, (step, path))
                if following is None and not ends:
                    following = after, (step, path)
                elif hash_of(after) not in self._seen:
                    further.append((after, (step, path)))
            if following is None:
                return self._end(here, path)
            here, path = following
        return self._fail(Violation("goes round for ever"), path) if key in passed else None

    def _end(self, here: State, path: Any) -> None:
        self.found.ended += 1
        try:
            self.world.check_end(here)
        except Violation as violation:
            self._fail(violation, path)

    def _fail(self, violation: Violation, path: Any) -> None:
        steps = []
        while path is not None:
            step, path = path
            steps.append(step)
        self.found.violation, self.found.path = violation, tuple(reversed(steps))
