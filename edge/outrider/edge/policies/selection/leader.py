"""Selectors over weighted experts: follow the leader, which is the default, and Hedge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from outrider.edge.policies.selection.base import idle_by_unread
from outrider.edge.policies.selection.experts import FixedShare
from outrider.edge.policies.selection.rewards import BlockDivergence
from outrider.proto.errors import InvalidArgument
from outrider.proto.policy.selection import RoundOutcome, SelectionView, Selector


@dataclass(slots=True, kw_only=True)
class Leader(Selector):
    """The expert of the greatest weight (Cesa-Bianchi and Lugosi 2006, section 2.2, in place of their weighted mean).

    The weights are `FixedShare`'s: for each drafter the evidence that it is the fastest now, in seconds of real and
    counterfactual rounds. Nothing is tried out and nothing is drawn. A switch costs what any loss does, so the leader
    takes over when the evidence for it is more than eta * switch_s / longest round.

    Attributes:
        experts: experts with their weights.
        stride: uncomputed tokens from which on an idle arm catches up: a pass over a few costs a drafter hardly more
            than one over a single token, and evidence that old still counts.
        doubt: nats below the best weight for each further stride that an arm waits, up to four: it will not overtake
            within few tokens, and catching up takes energy.
        prior: [arms] acceptance of each in the fleet; empty: not known, and the first arm begins.
        prior_tokens: tokens of evidence that the prior counts for.
        subject: nats of weight for every nat a token by which a drafter falls short of the best at the prompt's end,
            where the prompt's subject shows before there is any text. A mixture of the drafters as models of the prompt
            would have one for each of its tokens (Bayes); but to know a prompt is not yet to know the target.
        max_subject: nats that a drafter loses by it at most.
    """

    catches_up: ClassVar[bool] = True
    experts: FixedShare
    stride: int = 4
    prior: tuple[float, ...] = ()
    doubt: float = 6.0
    prior_tokens: float = 12.0
    subject: float = 6.0
    max_subject: float = 3.0
    shortfall: list[float] = field(init=False, default_factory=list)
    _shares: list[float] = field(
        init=False
    )  # of the best weight, from which on an arm catches up, by its unread tokens

    def __post_init__(self) -> None:
        if len(self.prior) not in (0, self.experts.arms):
            raise InvalidArgument("must hold one acceptance for each drafter, or none", field="leader.prior")
        if self.stride < 1:
            raise InvalidArgument("must be 1 token or more", field="leader.stride")
        self._shares = [math.exp(self.doubt * (1 - tokens / self.stride)) for tokens in range(4 * self.stride)]

    def choose(self, view: SelectionView) -> int:
        if self.prior:
            self._pay_for_prior(view)
        weights, current = self.experts.weights, view.current
        leader = weights.index(max(weights))
        if current is None or leader == current:
            return leader
        price = self.experts.eta * view.switch_s[leader] / max(view.round_s)
        return leader if math.log(weights[leader]) - math.log(weights[current]) > price else current

    def read_prompt(self, log_q: Sequence[float]) -> None:
        best = max((value for value in log_q if not math.isnan(value)), default=0.0)
        now = [0.0 if math.isnan(value) else min(self.max_subject, self.subject * (best - value)) for value in log_q]
        before, self.shortfall = self.shortfall or [0.0] * self.experts.arms, now
        self.experts.pay([(new - old) / self.experts.eta for new, old in zip(now, before, strict=True)])

    def score(self, view: SelectionView, chosen: int, unread: Sequence[int]) -> tuple[int, ...]:
        """Return idle arms with `stride` unread tokens or more, most first; arms of little weight need more."""
        del view
        stride, weights, shares = self.stride, self.experts.weights, self._shares
        best, surely = max(weights), len(shares)
        due = [
            (-tokens, arm)
            for arm, tokens in enumerate(unread)
            if tokens >= stride and arm != chosen and (tokens >= surely or weights[arm] >= best * shares[tokens])
        ]
        due.sort()
        return tuple([arm for _, arm in due])

    def learn(self, outcome: RoundOutcome) -> None:
        self.experts.learn(outcome)

    def _pay_for_prior(self, view: SelectionView) -> None:
        """Let the experts pay for the prior once, at the prices of the first view."""
        longest, chain = max(view.round_s), BlockDivergence()
        self.experts.pay(
            [
                self.prior_tokens * view.round_s[arm] / longest / chain.tokens(self.prior[arm], view.drafts)
                for arm in view.arms
            ]
        )
        self.prior = ()


@dataclass(slots=True)
class Hedge(Selector):
    """Freund and Schapire 1997, figure 2: p_i = w_i / sum w, with full information from all that catch up.

    Drawing guards against a text that is written to mislead a selector; `Leader` spares what it costs.
    """

    catches_up: ClassVar[bool] = True
    experts: FixedShare
    rng: np.random.Generator

    def choose(self, view: SelectionView) -> int:
        del view
        chances = np.exp(self.experts.log_weights)
        return int(self.rng.choice(self.experts.arms, p=chances / chances.sum()))

    def score(self, view: SelectionView, chosen: int, unread: Sequence[int]) -> tuple[int, ...]:
        del view
        return idle_by_unread(chosen, unread)

    def learn(self, outcome: RoundOutcome) -> None:
        self.experts.learn(outcome)


def default_selector(arms: int, prior: tuple[float, ...] = ()) -> Selector:
    """Return `Leader`, on hit traces the fastest selector on a mix of domains and where one changes midway.

    Where nothing ever changes MetaSD-UCB ends up ahead of it: staying ready for a change has a small price.

    Args:
        arms: number of drafters.
        prior: [arms] acceptance of each in the fleet; empty: not known.
    """
    return Leader(experts=FixedShare(arms=arms), prior=prior)
