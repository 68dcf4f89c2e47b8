"""Confidence routing: the drafter that is surest of itself on the newest text."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import ClassVar

from outrider.edge.policies.selection.base import best_arm, idle_by_uncomputed_tokens, require_arms
from outrider.proto.errors import InvalidArgument
from outrider.proto.policy.selection import RoundOutcome, SelectionView, Selector

MIN_CONFIDENCE = 1e-3  # so that one surprise or one silence does not outweigh all else


@dataclass(slots=True, kw_only=True)
class Routing(Selector):
    """TAPS (Zbib et al. 2026, arXiv 2603.27027): take the specialised drafter of the highest mean confidence.

    TAPS lets all of them draft a block and takes the block whose tokens have the highest mean probability. That costs
    every drafter's time in every block; here confidence comes from catching up with the text, which fits into the
    wait for a verdict. It is the mean of log max(q, MIN_CONFIDENCE) over an arm's newest `window` tokens, q the
    probability of its own proposal. Hits, speed and the link teach it nothing: a drafter that is sure and wrong is
    taken.

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

    def score(self, view: SelectionView, chosen: int) -> tuple[int, ...]:
        """Return all idle arms, the one with the most uncomputed tokens first."""
        return idle_by_uncomputed_tokens(view, chosen)

    def learn(self, outcome: RoundOutcome) -> None:
        """Learn from the round that has ended."""
        for log_q, confidence in zip(self.newest, outcome.confidence, strict=False):
            log_q.extend(math.log(max(q, MIN_CONFIDENCE)) for q in confidence if not math.isnan(q))
