"""What an idle drafter would have committed: its hits on the text that another's rounds have written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class Walk:
    """The rounds of a drafter had it always been the one, over a text that does not depend on who drafts.

    With the shared noise a hit is a fixed bit of the position, so the walk is exact, not an estimate: a round takes
    the hits up to the first miss, whose token is the target's own, or all its drafts and one token more.
    """

    in_round: int = 0

    def ends(self, hits: Iterable[bool], drafts: int) -> list[bool]:
        """[n] for each further token of the text, whether it is the last of a round of so many drafts."""
        ended = []
        for hit in hits:
            last = self.in_round >= drafts or not hit
            self.in_round = 0 if last else self.in_round + 1
            ended.append(last)
        return ended

    def own_round(self, committed: int) -> list[bool]:
        """[committed] of a round that it really drafted; the walk begins anew after it."""
        self.in_round = 0
        return [False] * (committed - 1) + [True]
