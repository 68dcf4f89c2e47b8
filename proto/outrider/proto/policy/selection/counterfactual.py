"""What an idle drafter would have cost: the rounds of a text had it always been the one that drafts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outrider.proto.policy.selection.arms import SelectionView


@dataclass(slots=True)
class Walk:
    """The rounds of one drafter over a text that does not depend on who drafts.

    With the shared noise a hit is a fixed bit of the position, so the walk is exact, not an estimate: a round takes
    the hits up to the first miss, whose token is the target's own, or all its drafts and one token more. Where the
    target does not wait, it writes the first `lead` tokens after a miss alone, a step for each; rounds begin behind
    them, if all of these were hits.

    Attributes:
        in_round: tokens of the round so far.
        since_miss: tokens since the last miss, or since the beginning.
    """

    in_round: int = 0
    since_miss: int = 0

    def prices(self, hits: Iterable[bool | None], view: SelectionView, arm: int) -> list[float | None]:
        """[n] seconds of each further token: a whole round's where one ends, none within one; None: nobody knows."""
        return [self._price(hit, view, arm) for hit in hits]

    def _price(self, hit: bool | None, view: SelectionView, arm: int) -> float | None:
        alone = self.since_miss < (view.lead[arm] if view.lead else 0)
        last = self.in_round >= view.drafts or not hit
        if alone:
            price = view.alone_s
        else:
            price = view.round_s[arm] if last else 0.0
            self.in_round = 0 if last else self.in_round + 1
        self.since_miss = self.since_miss + 1 if hit else 0
        return None if hit is None else price
