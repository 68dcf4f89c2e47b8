"""Weights of drafters as experts: every one pays for each token what it would have cost, whoever drafted it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.proto.errors import InvalidArgument
from outrider.proto.policy.selection.arms import RoundOutcome, require_arms
from outrider.proto.policy.selection.counterfactual import Walk


@dataclass(slots=True, kw_only=True)
class FixedShare:
    """Exponential weights that let an expert come back.

    Freund and Schapire 1997, figure 2: w_i *= exp(-eta * loss_i), after each token. Herbster and Warmuth 1998, figure
    1, fixed share in its uniform form: w_i = (1 - share) w_i + share / K. So no expert is ever further behind than
    ln(K / share), which is what a change of domain has to make up.

    The loss of a token is the time that an expert needs for it: a whole round where one ends, nothing within one, over
    the longest round of any. Its mean is E[T]/E[N] exactly (`Walk`). Experts hear of a token at different times; all
    pay for it together, once the last has. One of whom nobody knows sleeps: it pays what the others do on average, so
    that its share of the weight stays as it is (Freund, Schapire, Singer and Warmuth 1997, figure 1).

    Attributes:
        arms: how many experts.
        eta: weight of a loss, in nats.
        share: of all weight that is dealt out anew after each token.
        log_weights: [arms] natural logarithms; the weights add up to 1.
    """

    arms: int
    eta: float = 1.5
    share: float = 0.002
    log_weights: list[float] = field(init=False)
    walks: list[Walk] = field(init=False)
    unpaid: list[deque[float | None]] = field(init=False)

    def __post_init__(self) -> None:
        require_arms(self.arms)
        if not 0 <= self.share < 1:
            raise InvalidArgument("must be 0 or more, below 1", field="experts.share")
        self.log_weights = [-math.log(self.arms)] * self.arms
        self.walks = [Walk() for _ in range(self.arms)]
        self.unpaid = [deque() for _ in range(self.arms)]

    def learn(self, outcome: RoundOutcome) -> None:
        """What the round gave, to its own arm and to those that have read along."""
        longest = max(outcome.view.round_s)
        for arm, hits in enumerate(outcome.hits):
            prices = self.walks[arm].prices(hits, outcome.view, arm)
            self.unpaid[arm].extend(None if price is None else price / longest for price in prices)
        for _ in range(min(map(len, self.unpaid))):
            self._pay_awake([losses.popleft() for losses in self.unpaid])

    def pay(self, losses: Sequence[float]) -> None:
        """[arms] each expert's loss of one token, or of several that nobody has written yet (a prior)."""
        logs = [log - self.eta * loss for log, loss in zip(self.log_weights, losses, strict=True)]
        top = max(logs)
        total = sum(math.exp(log - top) for log in logs)
        self.log_weights = [_log_mean(log - top - math.log(total), -math.log(self.arms), self.share) for log in logs]

    def _pay_awake(self, losses: Sequence[float | None]) -> None:
        """[arms] losses of one token; None: asleep."""
        awake = [(log, loss) for log, loss in zip(self.log_weights, losses, strict=True) if loss is not None]
        if not awake:
            return
        # What all that are awake lose together, in the loss of one expert of their weight.
        top = max(log for log, _ in awake)
        before = sum(math.exp(log - top) for log, _ in awake)
        after = sum(math.exp(log - top - self.eta * loss) for log, loss in awake)
        common = math.log(before / after) / self.eta
        self.pay([common if loss is None else loss for loss in losses])


def _log_mean(log_a: float, log_b: float, share: float) -> float:
    """log((1 - share) a + share b), finite also where a is too small for a float and the share is 0."""
    if not share:
        return log_a
    return math.log((1 - share) * math.exp(log_a) + share * math.exp(log_b))
