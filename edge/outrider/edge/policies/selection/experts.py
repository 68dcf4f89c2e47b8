"""Weights of drafters as experts: each pays for every token, whoever drafted it."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.edge.policies.selection.base import require_arms
from outrider.proto.errors import InvalidArgument
from outrider.proto.policy.selection import RoundOutcome


@dataclass(slots=True, kw_only=True)
class FixedShare:
    """Exponential weights that let an expert come back.

    Freund and Schapire 1997, figure 2: w_i *= exp(-eta * loss_i), after each token. Herbster and Warmuth 1998, figure
    1, fixed share in its uniform form: w_i = (1 - share) w_i + share / K. So no expert ever falls back by more than
    ln(K / share), which is what a change of domain has to make up.

    The loss of a token is the time that an expert needs for it: a whole round where one ends, nothing within one, over
    the longest round of any. Its mean is E[T]/E[N] exactly: with the shared noise a hit is a fixed bit of the position,
    so the rounds of one drafter over a text that does not depend on who drafts are no estimate. A round takes the hits
    up to the first miss, whose token is the target's own, or all its drafts and one token more. Where the target does
    not wait, it writes the first `lead` tokens after a miss alone, a step for each; rounds begin after them, if all of
    these were hits.

    Experts read a token at different times; all pay for it together, once the last has read it. An expert whose hits
    are not known sleeps: it pays what the others do on average, so that its share of the weight stays as it is (Freund,
    Schapire, Singer and Warmuth 1997, figure 1).

    Attributes:
        arms: number of experts.
        eta: weight of a loss, in nats.
        share: part of all weight that is spread equally after each token.
        weights: [arms] weights, which add up to 1.
        unpaid: [arms] exp(-eta * loss) of each token that an expert has read and not paid for; NaN: not known.
    """

    arms: int
    eta: float = 1.5
    share: float = 0.002
    weights: list[float] = field(init=False)
    unpaid: list[list[float]] = field(init=False)
    _in_round: list[int] = field(init=False)  # tokens of each expert's round so far
    _since_miss: list[int] = field(init=False)  # tokens since its last miss, or since the beginning
    _no_lead: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        require_arms(self.arms)
        if not 0 < self.share < 1:
            raise InvalidArgument("must be above 0, below 1", field="experts.share")
        self.weights = [1 / self.arms] * self.arms
        self.unpaid = [[] for _ in range(self.arms)]
        self._in_round, self._since_miss = [0] * self.arms, [0] * self.arms
        self._no_lead = (0,) * self.arms

    @property
    def log_weights(self) -> list[float]:
        """Natural logarithms of the weights, [arms]."""
        return list(map(math.log, self.weights))

    def learn(self, outcome: RoundOutcome) -> None:
        """Learn from the round that has ended, for its own arm and for those that have caught up."""
        # This runs at every commit, and so without a call for each expert or token.
        view, unpaid, exp, unknown = outcome.view, self.unpaid, math.exp, math.nan
        round_s, drafts, lead = view.round_s, view.drafts, view.lead or self._no_lead
        per_s = -self.eta / max(round_s)
        alone = exp(per_s * view.alone_s)
        for arm, hits in enumerate(outcome.hits):
            if not hits:
                continue
            in_round, since_miss, leads = self._in_round[arm], self._since_miss[arm], lead[arm]
            whole, add = exp(per_s * round_s[arm]), unpaid[arm].append
            for hit in hits:
                if since_miss < leads:
                    factor = alone
                elif hit and in_round < drafts:
                    factor = 1.0
                    in_round += 1
                else:
                    factor = whole
                    in_round = 0
                if hit:
                    since_miss += 1
                else:
                    since_miss = 0
                    if hit is None:
                        factor = unknown
                add(factor)
            self._in_round[arm], self._since_miss[arm] = in_round, since_miss
        tokens = min(map(len, unpaid))
        if not tokens:
            return
        weights, share, spread = self.weights, self.share, self.share / self.arms
        for factors in zip(*unpaid, strict=False):
            scaled = list(map(operator.mul, weights, factors))
            total = sum(scaled)
            if total != total:
                scaled = _scaled_awake(weights, factors)
                if not scaled:
                    continue
                total = sum(scaled)
            kept = (1 - share) / total
            weights = [kept * weight + spread for weight in scaled]
        self.weights = weights
        for paid in unpaid:
            del paid[:tokens]

    def pay(self, losses: Sequence[float]) -> None:
        """Let experts pay losses [arms] for one token, or for several that nobody has written yet (a prior)."""
        eta, least, spread = self.eta, min(losses), self.share / self.arms
        weights = [weight * math.exp(eta * (least - loss)) for weight, loss in zip(self.weights, losses, strict=True)]
        kept = (1 - self.share) / sum(weights)
        self.weights = [kept * weight + spread for weight in weights]


def _scaled_awake(weights: Sequence[float], factors: Sequence[float]) -> list[float]:
    """Return weights [arms] times factors; those asleep (NaN) lose what one with the weight of all others does.

    Empty: all are asleep.
    """
    awake = [(weight, factor) for weight, factor in zip(weights, factors, strict=True) if not math.isnan(factor)]
    if not awake:
        return []
    common = sum(weight * factor for weight, factor in awake) / sum(weight for weight, _ in awake)
    return [
        weight * (common if math.isnan(factor) else factor) for weight, factor in zip(weights, factors, strict=True)
    ]
