"""Wider with every window of hits, narrower with every miss."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.proto.errors import InvalidArgument
from outrider.proto.policy.window import EdgeView


@dataclass(slots=True)
class AimdWindow:
    """Additive increase, multiplicative decrease (Chiu and Jain 1989: x + a_I, or x times b_D).

    Like TCP's, a window w grows by increase * hits / w: by `increase` when a whole window has hit. A miss makes it
    `decrease` times as wide. The schedule `heuristic` of assisted generation in Hugging Face transformers is a relative
    that increases by 2 after a round of nothing but hits and decreases by 1 otherwise: additive both ways, which
    after a change of subject takes a round for every token that the window is too wide.

    It knows of no link and no price. With m hits to a miss it settles where growth and cut weigh the same,
    w = sqrt(increase * m / (1 - decrease)): 8 drafts for m = 3 with the defaults, where TCP's 1 and 1/2 would give far
    too few. It has a state: each text has one of its own, or texts share one that follow each other.
    """

    start: float = 8.0
    increase: float = 4.0
    decrease: float = 0.8
    most: int = 64
    tokens: float = field(init=False)

    def __post_init__(self) -> None:
        if not (1 <= self.start <= self.most and self.increase > 0 and 0 < self.decrease < 1):
            raise InvalidArgument(
                "the start must be 1 or more and no wider than the most, the increase above 0, the decrease between "
                "0 and 1",
                field="window",
            )
        self.tokens = self.start

    def more(self, view: EdgeView) -> int:
        """Return the tokens to draft now."""
        return max(0, int(self.tokens) - view.in_flight)

    def observe(self, hits: int, missed: bool) -> None:
        """Widen the window by `hits` drafts that a commit accepted, and narrow it where one `missed`."""
        self.tokens = min(float(self.most), self.tokens + self.increase * hits / self.tokens)
        if missed:
            self.tokens = max(1.0, self.tokens * self.decrease)
