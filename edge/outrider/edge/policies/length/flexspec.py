"""To the length of most tokens for time and energy together."""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.edge.policies.length.rounds import draft_s, expected_in_flight, waiting_s
from outrider.proto.errors import InvalidArgument
from outrider.proto.policy.measures import ACCEPTANCE_PRIOR
from outrider.proto.policy.window import FIRST_WINDOW, TOKEN_BYTES, EdgeView


@dataclass(frozen=True, slots=True)
class FlexSpecWindow:
    """After FlexSpec (Li et al. 2026, arXiv 2601.00644): the draft length by the channel and by the energy left.

    Theirs is the idea of a controller that sets the length from the state of the channel and the device's energy
    budget; the objective here is written for this system:

        n* = argmax over n of (1 + sum over k <= n of S_k) / (waiting_s + n (draft_s + energy_s)),

    S_k the chance that the first k drafts agree: those in flight as calibrated, each further one times `acceptance`;
    waiting_s holds round trip and step, draft_s drafting, row and uplink. Energy is a price per draft,
    drafting_w * drafting_s, and per byte, byte_j; a joule is worth joule_s (1 - b) / b seconds, b the share of the
    battery that is left: nothing on mains, joule_s at half, ever more as it empties. S_k falls, so the quotient rises
    to its maximum and then falls: the first draft that does not raise it ends the search.

    One draft is made where none is in flight, since nothing else can show that drafts have become better, unless it
    would not pay even with the chance that drafts have before any was seen.

    Attributes:
        most: drafts in flight.
        drafting_w: watts that drafting takes: one core of a phone's or laptop's processor.
        byte_j: joules that a byte takes on the uplink; 3.5 uJ of LTE (Huang et al. 2012, table 4: 438 mW per Mbit/s).
        joule_s: seconds that a joule is worth at half battery.
    """

    most: int = 64
    drafting_w: float = 3.0
    byte_j: float = 3.5e-6
    joule_s: float = 1.0

    def __post_init__(self) -> None:
        prices = (self.drafting_w, self.byte_j, self.joule_s)
        if self.most < 1 or not all(0 <= price < math.inf for price in prices):
            raise InvalidArgument("most must be 1 or more, and prices of energy finite and 0 or more", field="window")

    def energy_s(self, view: EdgeView) -> float:
        """Return the worth of a draft's energy, in seconds."""
        joules = self.drafting_w * view.drafting_s + self.byte_j * TOKEN_BYTES
        worth = self.joule_s * (1 - view.battery) / view.battery if view.battery else math.inf
        return joules * worth if joules else 0.0

    def more(self, view: EdgeView) -> int:
        """Return the tokens to draft now."""
        if not view.step_s:
            return max(0, min(FIRST_WINDOW, self.most) - view.in_flight)
        price_s = draft_s(view) + self.energy_s(view)
        if math.isinf(price_s):
            return 0
        tokens, cost_s = 1 + expected_in_flight(view), waiting_s(view) + view.in_flight * price_s
        chance, count = view.survival, 0
        while view.in_flight + count < self.most:
            chance *= view.acceptance
            if chance * cost_s <= tokens * price_s:
                break
            tokens, cost_s, count = tokens + chance, cost_s + price_s, count + 1
        if not view.in_flight and not count:
            return int(ACCEPTANCE_PRIOR * cost_s > price_s)
        return count
