"""Helpers of several selectors, and the two that learn no rewards: a blind draw, and confidence routing."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from outrider.proto.errors import InvalidArgument
from outrider.proto.policy.selection import RoundOutcome, SelectionView, Selector

MIN_CONFIDENCE = 1e-3  # so that one surprise or one silence does not outweigh all else


def require_arms(arms: int) -> None:
    """Refuse a selector without arms."""
    if arms < 1:
        raise InvalidArgument("must be 1 or more drafters", field="selector.arms")


def best_arm(values: Sequence[float], current: int | None) -> int:
    """Return the arm of the highest value; of equal ones the current arm, which costs no switch, else the first."""
    best = max(values)
    if current is not None and values[current] == best:
        return current
    return values.index(best)


def idle_by_unread(chosen: int, unread: Sequence[int]) -> tuple[int, ...]:
    """Return the idle arms that can catch up, the one that has most to read first."""
    return tuple([arm for _, arm in sorted((-n, arm) for arm, n in enumerate(unread) if n and arm != chosen)])


@dataclass(slots=True)
class RandomSelector(Selector):
    """Selector that draws a drafter uniformly for each round."""

    arms: int
    rng: np.random.Generator

    def __post_init__(self) -> None:
        require_arms(self.arms)

    def choose(self, view: SelectionView) -> int:
        del view
        return int(self.rng.integers(self.arms))

    def learn(self, outcome: RoundOutcome) -> None:
        """Learn nothing."""


@dataclass(slots=True, kw_only=True)
class Routing(Selector):
    """TAPS (Zbib et al. 2026, arXiv 2603.27027), which takes the specialised drafter of the highest mean confidence.

    TAPS lets all of them draft a block and takes the block whose tokens have the highest mean probability. That costs
    every drafter's time in every block; here confidence comes from catching up with the text, which fits into the
    wait for a commit. It is the mean of log max(q, MIN_CONFIDENCE) over an arm's newest `window` tokens, q the
    probability of its own proposal. Hits, speed and the link do not matter: a drafter that is sure and wrong is taken.

    Attributes:
        arms: number of drafters.
        window: newest tokens that count.
        newest: [arms] log q of these tokens, the oldest first.
    """

    catches_up: ClassVar[bool] = True
    arms: int
    window: int = 32
    newest: list[deque[float]] = field(init=False)

    def __post_init__(self) -> None:
        require_arms(self.arms)
        if self.window < 1:
            raise InvalidArgument("must be 1 token or more", field="routing.window")
        self.newest = [deque(maxlen=self.window) for _ in range(self.arms)]

    def choose(self, view: SelectionView) -> int:
        """Choose the surest arm; where none is known yet the current one, else the first."""
        return best_arm([sum(log_q) / len(log_q) if log_q else -math.inf for log_q in self.newest], view.current)

    def score(self, view: SelectionView, chosen: int, unread: Sequence[int]) -> tuple[int, ...]:
        del view
        return idle_by_unread(chosen, unread)

    def learn(self, outcome: RoundOutcome) -> None:
        for log_q, confidence in zip(self.newest, outcome.confidence, strict=False):
            log_q.extend(math.log(max(q, MIN_CONFIDENCE)) for q in confidence if not math.isnan(q))
