"""Goals of service in a verifier's batch: what the next step is held to, so that texts with figures keep their gaps.

A step is held in this order, and only as far as the measured cost of rows says that it must be: the delay for drafts of
others; rows of batch sessions' prompts; drafts, those of batch sessions first and then those of others; and at last
batch sessions sit a step out in rotation, whoever had a commit longest ago before others. A gap that even such a step
cannot keep holds nobody, since goodput counts only what comes in time (WISP, arXiv 2601.11652).

Nobody starves: a batch session takes part in one of `MAX_STEPS_OUT` steps at least, and in every step while its rate is
below half of the median of its class. Within a class the drafts go first that are expected to bring least, over the
rate that their session has already, which is proportional fairness (GoodSpeed, arXiv 2512.09963).
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from outrider.proto.policy.patience import StepCost
from outrider.proto.types import ServiceClass, class_of

if TYPE_CHECKING:
    from outrider.cloud.serving.slots import Slot

MARGIN = 0.9  # of a gap, in which a step is planned to end: the next one may take longer than the measured cost
MAX_STEPS_OUT = 4  # of these, a batch session takes part in one at least
FAIR_SHARE = 0.5  # of the median rate of its class, below which no session is held


@dataclass(frozen=True, slots=True)
class StepGoals:
    """The goals of the sessions that could take part in a step.

    Attributes:
        due_s: time by which a step should end for each session whose gap can be kept, in seconds.
        num_decoding: sessions that decode.
        cost: measured cost of steps that only decode.
    """

    due_s: dict[Slot, float]
    num_decoding: int
    cost: StepCost

    @classmethod
    def of(cls, slots: Sequence[Slot], cost: StepCost) -> Self | None:
        """Return the goals of sessions that run; None: nobody has asked for a service."""
        if all(slot.session.service is None for slot in slots):
            return None
        decoding = [slot for slot in slots if slot.num_uncomputed_tokens <= 1]
        least_s = cost.hoped_seconds(least_rows(decoding))
        gaps = {slot: MARGIN * service.gap_s for slot in decoding if (service := slot.session.service) is not None}
        due_s = {slot: slot.session.ready_since + gap_s for slot, gap_s in gaps.items() if gap_s >= max(least_s, 1e-9)}
        return cls(due_s, len(decoding), cost)

    def begin_by(self, slot: Slot) -> float:
        """Return the time by which a step of all sessions must begin to keep a gap; infinite: there is none to keep."""
        return self.due_s.get(slot, math.inf) - self.cost.hoped_seconds(self.num_decoding)

    def slack_s(self, decoding: Iterable[Slot], now: float) -> float:
        """Return the seconds in which a step that begins now should end; infinite: no session has a gap to keep."""
        return min((self.due_s.get(slot, math.inf) for slot in decoding), default=math.inf) - now

    def taking_part(self, decoding: Sequence[Slot], now: float) -> Sequence[Slot]:
        """Return the sessions that take part in a step that begins now, of those that could."""
        excess = len(decoding) - self._rows_within(self.slack_s(decoding, now), len(decoding))
        batch = [slot for slot in decoding if _class(slot) is ServiceClass.BATCH]
        if excess <= 0 or not batch:
            return decoding
        rates = {slot: slot.session.rate(now) for slot in batch}
        fair = FAIR_SHARE * statistics.median(rates.values())
        longest_first = sorted(batch, key=lambda slot: slot.session.ready_since)
        others = longest_first[math.ceil(len(batch) / MAX_STEPS_OUT) :]
        may_rest = [slot for slot in others if not 0 < rates[slot] < fair]
        resting = set(may_rest[-excess:])
        return [slot for slot in decoding if slot not in resting]

    def rows_to_cut(self, drafts: Sequence[tuple[Slot, int]], spared_s: float, now: float) -> Counter[Slot]:
        """Return how many rows of drafts each session gives up in a step that begins now.

        Args:
            drafts: sessions that take part, and the drafts of each.
            spared_s: time that prompts take in any case, in seconds.
            now: present time.
        """
        rows = sum(1 + num_drafts for _, num_drafts in drafts)
        slack_s = self.slack_s((slot for slot, _ in drafts), now) - spared_s
        excess = rows - self._rows_within(slack_s, rows)
        if excess <= 0:
            return Counter()
        worth = [
            (_class(slot), slot.session.acceptance**place / max(slot.session.rate(now), 1e-9), number)
            for number, (slot, num_drafts) in enumerate(drafts)
            for place in range(1, num_drafts + 1)
        ]
        return Counter(drafts[number][0] for _, _, number in sorted(worth)[:excess])

    def _rows_within(self, seconds: float, most: int) -> int:
        """Return the rows, `most` at most, of a step of so many seconds."""
        return most if seconds == math.inf else bisect_right(range(1, most + 1), seconds, key=self.cost.hoped_seconds)


def least_rows(decoding: Iterable[Slot]) -> int:
    """Return the rows of a step that is held as far as may be."""
    classes = Counter(map(_class, decoding))
    batch = classes[ServiceClass.BATCH]
    return classes.total() - batch + math.ceil(batch / MAX_STEPS_OUT)


def least_gap_s(running: Iterable[Slot], cost: StepCost) -> float:
    """Return the shortest gap that can be kept for one more session, in seconds; 0: no step has been measured."""
    return cost.hoped_seconds(least_rows(running) + 1) / MARGIN


def prompt_order(slot: Slot) -> tuple[bool, float, int]:
    """Return the key that sorts prompts: batch last, the earliest time for a first token first, then the shortest."""
    service = slot.session.service
    first_token_s = service.first_token_s if service is not None else 0.0
    due_s = slot.session.ready_since + first_token_s if first_token_s else math.inf
    return _class(slot) is ServiceClass.BATCH, due_s, slot.num_uncomputed_tokens


def _class(slot: Slot) -> ServiceClass:
    return class_of(slot.session.service)
