"""Selectors that learn which drafter drafts the next round: pure rules, none changes a token.

`outrider.proto.policy.selector` has the protocol. The objective is committed tokens a second, E[N]/E[T] (renewal
reward), with each drafter's speed, its switch and the link in T. `Leader`, the default, and `Hedge` weigh the drafters
as experts: with shared noise a hit is a fixed bit, so each pays for every token, whoever drafted it. `MetaSdUcb` is the
literature's bandit, which learns from its own rounds alone.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from outrider.proto.errors import ConfigError, InvalidArgument, did_you_mean
from outrider.proto.policy.selector import RoundOutcome, SelectionView, Selector, StaticSelector


def _require_arms(arms: int) -> None:
    if arms < 1:
        raise InvalidArgument("must be 1 or more drafters", field="selector.arms")


def expected_tokens(acceptance: float, drafts: int) -> float:
    """Return E[N], the mean number of committed tokens of a round (Leviathan et al. 2023, equation 1)."""
    return drafts + 1.0 if acceptance >= 1 else (1 - acceptance ** (drafts + 1)) / (1 - acceptance)


@dataclass(slots=True, kw_only=True)
class FixedShare:
    """Exponential weights that let an expert come back.

    Freund and Schapire 1997, figure 2: w_i *= exp(-eta * loss_i), after each token. Herbster and Warmuth 1998, figure
    1, fixed share in its uniform form: w_i = (1 - share) w_i + share / K. So no expert ever falls back by more than
    ln(K / share), which is what a change of domain has to make up.

    The loss of a token is the time that an expert needs for it, over the longest round of any: a whole round where one
    ends, nothing within one, so that its mean is E[T]/E[N]. A round takes the hits up to the first miss, whose token is
    the target's own, or all its drafts and one token more. Where the target does not wait, it writes the first
    `delay_tokens` after a miss alone, a step for each; rounds begin after them, if all of these were hits.

    Experts read a token at different times; all pay for it together, once the last has read it. An expert whose hits
    are not known sleeps: it pays what the others do on average (Freund, Schapire, Singer and Warmuth 1997, figure 1).

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
    _no_delay: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        _require_arms(self.arms)
        if not 0 < self.share < 1:
            raise InvalidArgument("must be above 0, below 1", field="experts.share")
        self.weights = [1 / self.arms] * self.arms
        self.unpaid = [[] for _ in range(self.arms)]
        self._in_round, self._since_miss = [0] * self.arms, [0] * self.arms
        self._no_delay = (0,) * self.arms

    @property
    def log_weights(self) -> list[float]:
        """Natural logarithms of the weights, [arms]."""
        return list(map(math.log, self.weights))

    def learn(self, outcome: RoundOutcome) -> None:
        """Learn from the round that has ended, for its own arm and for those that have caught up."""
        # This runs at every commit, and so without a call for each expert or token.
        view, unpaid, exp, unknown = outcome.view, self.unpaid, math.exp, math.nan
        round_s, drafts, delay_tokens = view.round_s, view.drafts, view.delay_tokens or self._no_delay
        per_s = -self.eta / max(round_s)
        alone = exp(per_s * view.alone_s)
        for arm, hits in enumerate(outcome.hits):
            if not hits:
                continue
            in_round, since_miss, delay = self._in_round[arm], self._since_miss[arm], delay_tokens[arm]
            whole, add = exp(per_s * round_s[arm]), unpaid[arm].append
            for hit in hits:
                if since_miss < delay:
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


@dataclass(slots=True, kw_only=True)
class Leader(Selector):
    """The expert of the greatest weight (Cesa-Bianchi and Lugosi 2006, section 2.2, in place of their weighted mean).

    Nothing is tried out and nothing is drawn. A switch costs what any loss does, so the leader takes over when the
    evidence for it is more than eta * switch_s / longest round.

    Attributes:
        experts: experts with their weights.
        stride: uncomputed tokens from which on an idle arm catches up: a pass over a few costs a drafter hardly more
            than one over a single token.
        doubt: nats below the best weight for each further stride that an arm waits, up to four: it will not overtake
            within few tokens, and catching up takes energy.
        prior: [arms] acceptance of each in the fleet; empty: not known, and the first arm begins.
        prior_tokens: tokens of evidence that the prior counts for.
        subject: nats of weight for every nat a token by which a drafter falls short of the best at the prompt's end,
            where the prompt's subject shows before there is any text.
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
    _shares: list[float] = field(init=False)  # of the best weight, by unread tokens: an arm with more catches up

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
        longest = max(view.round_s)
        self.experts.pay(
            [
                self.prior_tokens * view.round_s[arm] / longest / expected_tokens(self.prior[arm], view.drafts)
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
        """Return all idle arms that can catch up, the one that has most to read first."""
        del view
        return tuple([arm for _, arm in sorted((-n, arm) for arm, n in enumerate(unread) if n and arm != chosen)])

    def learn(self, outcome: RoundOutcome) -> None:
        self.experts.learn(outcome)


def block_divergence(outcome: RoundOutcome) -> float:
    """Return a round's reward, MetaSD's block divergence, estimated from the drafts' own probabilities.

    For a target p and a drafter q at one prefix, TV = sum |p - q| / 2, and k drafts, it is 1/k sum_j (1 - TV_j). Of a
    draft x ~ q, min(1, p(x) / q(x)) has the mean 1 - TV, so the mean over all drafts of a block is unbiased. The mean
    over the verified ones is not, since a block is cut short where agreement was low. With shared noise a draft is
    accepted with a chance between (1 - TV) / (1 + TV) and 1 - TV: block divergence ranks drafters there, but promises
    more than E[N].

    Where probabilities are not known the share of verified drafts that were accepted stands in for them.
    """
    if outcome.agreement == outcome.agreement:  # not NaN
        return outcome.agreement
    return outcome.accepted / outcome.verified if outcome.verified else 0.0


@dataclass(slots=True, kw_only=True)
class MetaSdUcb(Selector):
    """MetaSD-UCB (arXiv 2604.05417): tries every arm once, then takes the one worth most at its reward's upper bound.

    The bound is mean_i + strength * sqrt(2 ln t / n_i) over the rounds so far: UCB1 of Auer et al. 2002, whose strength
    of 1 is for rewards scattered over all of [0, 1]. The paper ranks by the bound itself, as if all drafters were
    equally fast and switches were free. Here it is an acceptance, whose E[N]/E[T] ranks: only E[N] is learned, since
    the seconds of a round are known for each arm before it is chosen.

    Attributes:
        arms: number of drafters.
        strength: weight of the exploration.
        stay_rounds: rounds that a choice is expected to last, which share its switch.
        pulls: [arms] rounds of each.
        sums: [arms] sum of their rewards.
    """

    arms: int
    strength: float = 0.3
    stay_rounds: float = 8.0
    pulls: list[int] = field(init=False)
    sums: list[float] = field(init=False)

    def __post_init__(self) -> None:
        _require_arms(self.arms)
        self.pulls, self.sums = [0] * self.arms, [0.0] * self.arms

    def choose(self, view: SelectionView) -> int:
        """Choose an arm; of equal ones the current, which costs no switch, else the first."""
        if 0 in self.pulls:
            return self.pulls.index(0)
        worths = [
            expected_tokens(min(1.0, bound), view.drafts) / (round_s + switch_s / self.stay_rounds)
            for bound, round_s, switch_s in zip(self.bounds(), view.round_s, view.switch_s, strict=True)
        ]
        best = max(worths)
        return view.current if view.current is not None and worths[view.current] == best else worths.index(best)

    def bounds(self) -> list[float]:
        """Return upper bounds of the arms' mean rewards [arms]."""
        log_rounds = 2 * math.log(sum(self.pulls))
        return [
            total / n + self.strength * math.sqrt(log_rounds / n)
            for total, n in zip(self.sums, self.pulls, strict=True)
        ]

    def learn(self, outcome: RoundOutcome) -> None:
        self.pulls[outcome.arm] += 1
        self.sums[outcome.arm] += block_divergence(outcome)


def default_selector(arms: int, prior: tuple[float, ...] = ()) -> Selector:
    """Return `Leader`, on hit traces the fastest selector on a mix of domains and where one changes midway."""
    return Leader(experts=FixedShare(arms=arms), prior=prior)


MakeSelector = Callable[[int, np.random.Generator], Selector]
"""Called with the number of drafters and the generator to draw from."""

SELECTORS: Mapping[str, MakeSelector] = {
    "leader": lambda arms, _rng: default_selector(arms),
    "static": lambda _arms, _rng: StaticSelector(),
    "hedge": lambda arms, rng: Hedge(FixedShare(arms=arms), rng),
    "metasd-bd": lambda arms, _rng: MetaSdUcb(arms=arms),
}


def selector_named(name: str) -> MakeSelector:
    """Return what makes the selector of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in SELECTORS:
        near = did_you_mean(name, SELECTORS)
        raise ConfigError(f"{name!r} is none of {', '.join(SELECTORS)}{near}", field="selector")
    return SELECTORS[name]
