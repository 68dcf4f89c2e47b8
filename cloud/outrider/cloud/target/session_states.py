"""States that a session keeps for layers whose state cannot be cut back; `recurrence.py` says how they are used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

BORDER = 16  # positions between two borders, and rows of a chunk
Key = tuple[int, int]  # number of a layer, and that of a function in it
States = Mapping[Key, torch.Tensor]


@dataclass(frozen=True, slots=True)
class RowArguments:
    """Arguments of a function for the rows of a text, by name; `dimensions` are those along the rows."""

    arguments: Mapping[str, torch.Tensor]
    dimensions: Mapping[str, int]

    def __len__(self) -> int:
        return next((each.shape[self.dimensions[name]] for name, each in self.arguments.items()), 0)

    def part(self, begin: int, end: int) -> RowArguments:
        """Return those of the rows from `begin` to `end`, without a copy."""
        parts = {name: each.narrow(self.dimensions[name], begin, end - begin) for name, each in self.arguments.items()}
        return RowArguments(parts, self.dimensions)

    def copied(self) -> RowArguments:
        return RowArguments({name: each.clone() for name, each in self.arguments.items()}, self.dimensions)

    def followed_by(self, others: RowArguments) -> RowArguments:
        """Return a copy of both."""
        pairs = {name: [self.arguments[name], each] for name, each in others.arguments.items()}
        return RowArguments(
            {name: torch.cat(pair, dim=self.dimensions[name]) for name, pair in pairs.items()}, self.dimensions
        )


@dataclass(slots=True)
class Tail:
    """The state of one function at `border`, and the arguments of the rows from there on.

    Attributes:
        rows: arguments for the positions from `border` on, those of drafts included.
        border: position.
        state: what the function left behind there; None: nothing was before.
    """

    rows: RowArguments
    border: int = 0
    state: torch.Tensor | None = None

    def before(self, position: int) -> RowArguments:
        """Return the rows from the border to `position`."""
        return self.rows.part(0, position - self.border)

    def move(self, border: int, state: torch.Tensor) -> None:
        """Stand at a later border; the caller replaces the rows."""
        self.border, self.state = border, state


@dataclass(slots=True)
class SessionStates:
    """The tails of a session, or of a branch, whose tails have no state and begin where it leaves the session.

    Attributes:
        tails: by function, made when it first runs.
        start: border at which it began.
        given: the states there.
        certain: first position that may be cut back; the border moves no further.
        wanted: borders whose states others may want.
        kept: the states at those that were passed since the cache last looked.
    """

    tails: dict[Key, Tail] = field(default_factory=dict)
    start: int = 0
    given: States = field(default_factory=dict)
    certain: int = 0
    wanted: set[int] = field(default_factory=set)
    kept: dict[int, dict[Key, torch.Tensor]] = field(default_factory=dict)

    @classmethod
    def at(cls, border: int, states: States) -> SessionStates:
        """Return those of a session that goes on at `border` from `states`."""
        return cls(start=border, given=states)

    @property
    def border(self) -> int:
        """Position to which it can be cut back at most."""
        return max((tail.border for tail in self.tails.values()), default=self.start)

    def tail(self, key: Key, empty: RowArguments) -> Tail:
        """Return the tail of a function, whose rows are `empty` at first."""
        if key not in self.tails:
            self.tails[key] = Tail(empty, self.start, self.given.get(key))
        return self.tails[key]

    def read(self, certain: int) -> None:
        """Begin a step whose tokens before position `certain` are the transcript's; keep the states after many."""
        self.certain = certain
        self.wanted = {border for border in self.wanted if border > self.border}
        if certain - self.border > 2 * BORDER:
            self.wanted.add(certain - certain % BORDER)

    def states(self) -> dict[Key, torch.Tensor]:
        """Return the states at `border`; none where a pass has failed before all functions came to it."""
        if any(tail.border != self.border for tail in self.tails.values()):
            return {}
        return {key: tail.state for key, tail in self.tails.items() if tail.state is not None}

    def shift(self, count: int) -> None:
        """Stand `count` positions, a multiple of `BORDER`, further on in the text."""
        for tail in self.tails.values():
            tail.border += count

    def follow(self, branch: SessionStates, base: int) -> None:
        """Go on with what a branch holds from position `base` on."""
        for key, own in branch.tails.items():
            tail = self.tails[key]
            tail.rows = tail.before(base).followed_by(own.rows)
