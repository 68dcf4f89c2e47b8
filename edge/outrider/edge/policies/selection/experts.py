"""Costs of idle drafters, and weights of drafters as experts: each pays for every token, whoever drafted it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from outrider.edge.policies.selection.base import require_arms
from outrider.proto.errors import InvalidArgument
from outrider.proto.policy.selection import RoundOutcome, SelectionView


@dataclass(slots=True)
class Walk:
    """The rounds of one drafter over a text that does not depend on who drafts.

    With the shared noise a hit is a fixed bit of the position, so the walk is exact, not an estimate: a round takes
    the hits up to the first miss, whose token is the target's own, or all its drafts and one token more. Where the
    target does not wait, it writes the first `lead` tokens after a miss alone, a step for each; rounds begin after
    them, if all of these were hits.

    Attributes:
        in_round: tokens of the round so far.
        since_miss: tokens since the last miss, or since the beginning.
    """

    in_round: int = 0
    since_miss: int = 0

    def prices(
        self, hits: Iterable[bool | None], view: SelectionView, arm: int, unit_s: float = 1.0
    ) -> list[float | None]:
        """Return the time of each further token [n]: a whole round's at its end, none within it; None: not known.

        It is in units of `unit_s` seconds.
        """
        lead, alone = view.lead[arm] if view.lead else 0, view.alone_s / unit_s
        whole, drafts = view.round_s[arm] / unit_s, view.drafts
        in_round, since_miss = self.in_round, self.since_miss
        prices: list[float | None] = []
        for hit in hits:
            price: float | None
            if since_miss < lead:
                price = alone
            elif hit and in_round < drafts:
                price = 0.0
                in_round += 1
            else:
                price = whole
                in_round = 0
            since_miss = since_miss + 1 if hit else 0
            prices.append(None if hit is None else price)
        self.in_round, self.since_miss = in_round, since_miss
        return prices


@dataclass(slots=True, kw_only=True)
class FixedShare:
    """Exponential weights that let an expert come back.

    Freund and Schapire 1997, figure 2: w_i *= exp(-eta * loss_i), after each token. Herbster and Warmuth 1998, figure
    1, fixed share in its uniform form: w_i = (1 - share) w_i + share / K. So no expert ever falls back by more than
    ln(K / share), which is what a change of domain has to make up.

    The loss of a token is the time that an expert needs for it: a whole round where one ends, nothing within one, over
    the longest round of any. Its mean is E[T]/E[N] exactly (`Walk`). Experts read a token at different times; all
    pay for it together, once the last has read it. An expert whose hits are not known sleeps: it pays what the others
    do on average, so that its share of the weight stays as it is (Freund, Schapire, Singer and Warmuth 1997, figure 1).

    Attributes:
        arms: number of experts.
        eta: weight of a loss, in nats.
        share: part of all weight that is spread equally after each token.
    """

    arms: int
    eta: float = 1.5
    share: float = 0.002
    walks: list[Walk] = field(init=False)
    unpaid: list[list[float | None]] = field(init=False)
    _weights: list[float] = field(init=False)  # which add up to 1; unused without a share
    _log_weights: list[float] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        require_arms(self.arms)
        if not 0 <= self.share < 1:
            raise InvalidArgument("must be 0 or more, below 1", field="experts.share")
        self._weights = [1 / self.arms] * self.arms
        self.walks = [Walk() for _ in range(self.arms)]
        self.unpaid = [[] for _ in range(self.arms)]

    @property
    def log_weights(self) -> list[float]:
        """Natural logarithms of the weights, [arms]."""
        if self._log_weights is None:
            self._log_weights = list(map(math.log, self._weights))
        return self._log_weights

    def learn(self, outcome: RoundOutcome) -> None:
        """Learn from the round that has ended, for its own arm and for those that have caught up."""
        view = outcome.view
        longest = max(view.round_s)
        for arm, hits in enumerate(outcome.hits):
            if hits:
                self.unpaid[arm] += self.walks[arm].prices(hits, view, arm, longest)
        tokens = min(map(len, self.unpaid))
        if not tokens:
            return
        for losses in zip(*[losses[:tokens] for losses in self.unpaid], strict=True):
            if None in losses:
                self._pay_awake(losses)
            else:
                self.pay(losses)
        for paid in self.unpaid:
            del paid[:tokens]

    def pay(self, losses: Sequence[float]) -> None:
        """Let experts pay losses [arms] for one token, or for several that nobody has written yet (a prior)."""
        eta, share, least = self.eta, self.share, min(losses)
        if share:  # no weight can vanish, and so none needs a logarithm
            paid = zip(self._weights, losses, strict=True)
            weights = [weight * math.exp(eta * (least - loss)) for weight, loss in paid]
            kept, spread = (1 - share) / sum(weights), share / self.arms
            self._weights, self._log_weights = [kept * weight + spread for weight in weights], None
        else:
            logs = [log - eta * loss for log, loss in zip(self.log_weights, losses, strict=True)]
            top = max(logs)
            total = top + math.log(sum(math.exp(log - top) for log in logs))
            self._log_weights = [log - total for log in logs]

    def _pay_awake(self, losses: Sequence[float | None]) -> None:
        """Let experts pay losses [arms] for one token; None: asleep."""
        awake = [(log, loss) for log, loss in zip(self.log_weights, losses, strict=True) if loss is not None]
        if not awake:
            return
        # The loss of one expert with the weight of all that are awake, where these lose what they do.
        top = max(log for log, _ in awake)
        before = sum(math.exp(log - top) for log, _ in awake)
        after = sum(math.exp(log - top - self.eta * loss) for log, loss in awake)
        common = math.log(before / after) / self.eta
        self.pay([common if loss is None else loss for loss in losses])
