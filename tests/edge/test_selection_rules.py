"""Drafter selectors: each formula by hand on a short history, and what choosing and scoring promise."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from outrider.edge.selectors import (
    SELECTORS,
    FixedShare,
    Hedge,
    Leader,
    MetaSdUcb,
    block_divergence,
    default_selector,
    selector_named,
)
from outrider.proto.errors import ConfigError, InvalidArgument
from outrider.proto.policy.selector import RoundCosts, RoundOutcome, SelectionView, StaticSelector


def view_of(*round_s: float, switch_s: tuple[float, ...] = (), drafts: int = 4, **fields) -> SelectionView:
    switch_s = switch_s or (0.0,) * len(round_s)
    return SelectionView(drafts, round_s, switch_s, **fields)


EVEN = view_of(0.1, 0.1)


def outcome_of(
    arm: int, agreement: float = math.nan, view: SelectionView = EVEN, accepted: int = 2, verified: int = 3, hits=()
) -> RoundOutcome:
    return RoundOutcome(view, arm, accepted + 1, verified, accepted, agreement, view.round_s[arm], hits)


class Dice:
    """A generator that always gives the same answer, and notes what it was asked."""

    def __init__(self, answer) -> None:
        self.answer = answer

    def choice(self, arms, p):
        self.p = p
        return self.answer


# --- the view ---


def test_a_round_takes_drafting_round_trip_and_step_and_a_switch_has_to_catch_up() -> None:
    costs = RoundCosts((0.001, 0.01), (0.0002, 0.002), 0.04, 0.02, 0.001)
    view = SelectionView.of_rounds(costs, (0, 30), drafts=5, current=0)
    assert view.waiting_s == pytest.approx(0.066)
    assert view.round_s == pytest.approx((0.071, 0.116))
    assert view.switch_s == pytest.approx((0.0, 0.06))


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: SelectionView(4, (-1.0,), (0.0,)), "view.round_s"),
        (lambda: SelectionView(4, (math.nan,), (0.0,)), "view.round_s"),
        (lambda: SelectionView(4, (0.1,), (math.inf,)), "view.switch_s"),
        (lambda: SelectionView(4, (), ()), "view.round_s"),
        (lambda: SelectionView(4, (0.1,), (0.0, 0.0)), "view.round_s"),
        (lambda: MetaSdUcb(arms=0), "selector.arms"),
        (lambda: FixedShare(arms=0), "selector.arms"),
        (lambda: FixedShare(arms=2, share=1.0), "experts.share"),
        (lambda: FixedShare(arms=2, share=0.0), "experts.share"),
        (lambda: default_selector(2, (0.5,)), "leader.prior"),
        (lambda: Leader(experts=FixedShare(arms=2), stride=0), "leader.stride"),
    ],
)
def test_a_selector_that_cannot_be_names_the_field(make, field) -> None:
    with pytest.raises(InvalidArgument) as caught:
        make()
    assert caught.value.field == field


def test_static_stays() -> None:
    assert StaticSelector(1).choose(EVEN) == 1
    assert StaticSelector(1).score(EVEN, 0, (9, 9)) == ()


# --- upper confidence bounds ---

HISTORY = ((0, 0.4), (1, 0.2), (0, 0.3))


def trained(selector, history=HISTORY):
    for arm, reward in history:
        selector.learn(outcome_of(arm, reward))
    return selector


def test_metasd_adds_strength_times_the_root_of_two_log_t_over_n() -> None:
    selector = trained(MetaSdUcb(arms=2, strength=0.3))
    assert list(selector.bounds()) == pytest.approx([0.6644441, 0.6446911])
    assert selector.choose(EVEN) == 0
    assert trained(MetaSdUcb(arms=2, strength=0.4)).choose(EVEN) == 1


def test_metasd_tries_every_arm_once_and_equal_arms_cost_no_switch() -> None:
    selector = MetaSdUcb(arms=3)
    view = view_of(0.1, 0.1, 0.1)
    for arm in range(3):
        assert selector.choose(view) == arm
        selector.learn(outcome_of(arm, 0.5, view))
    assert selector.choose(view_of(0.1, 0.1, 0.1, current=2)) == 2


def test_metasd_divides_expected_tokens_by_the_round_and_a_share_of_the_switch() -> None:
    selector = trained(MetaSdUcb(arms=2, strength=0.0), ((0, 0.5), (1, 0.75)))
    even = 1.75 / 2.3125  # tokens of two drafts that hit half of the time, over those at three quarters
    for slack, chosen in ((0.99, 0), (1.01, 1)):
        view = view_of(0.1 * even * slack, 0.09, switch_s=(0.0, 0.08), drafts=2)
        assert selector.choose(view) == chosen


# --- full information ---


def test_the_delay_of_a_stream_is_what_the_link_takes_in_steps() -> None:
    costs = RoundCosts((0.001, 0.01), (0.0, 0.002), round_trip_s=0.06, step_s=0.03, row_s=0.002)
    view = SelectionView.of_stream(costs, (0, 5), drafts=4, current=1)
    assert view.delay_tokens == (2, 3)
    assert view.alone_s == pytest.approx(0.032)
    assert view.round_s == pytest.approx((0.04, 0.04)), "a step with four drafts and the target's own row"
    assert view.switch_s == pytest.approx((0.0, 0.01))
    quick = SelectionView.of_stream(costs._replace(step_s=0.01), (0, 5), drafts=4, current=1)
    assert quick.round_s == pytest.approx((0.02, 0.04))


def test_experts_without_logarithms_pay_as_their_definition_says() -> None:
    rng = np.random.default_rng(5)
    experts, logs = FixedShare(arms=5, eta=1.5, share=0.002), np.full(5, -math.log(5))
    for n in range(3000):
        losses = rng.choice([0.0, 0.0, 0.7, 1.0, 40.0 if n % 500 == 7 else 0.3], 5)
        experts.pay(losses.tolist())
        weights = np.exp(logs - 1.5 * losses - np.max(logs - 1.5 * losses))
        logs = np.log((1 - 0.002) * weights / weights.sum() + 0.002 / 5)
        assert experts.log_weights == pytest.approx(logs.tolist(), abs=1e-9)
    experts.pay([3000.0] * 4 + [2000.0])
    assert experts.log_weights == pytest.approx([math.log(0.002 / 5)] * 4 + [math.log(1 - 0.002 * 4 / 5)])


def test_no_expert_falls_further_behind_than_the_share_allows() -> None:
    experts = FixedShare(arms=4, share=0.01)
    for _ in range(2000):
        experts.pay([1.0, 0.0, 1.0, 1.0])
    assert min(experts.log_weights) > math.log(0.01 / 4)
    hardly = FixedShare(arms=2, eta=2.0, share=1e-300)
    for _ in range(2000):
        hardly.pay([1.0, 0.0])
    assert hardly.log_weights == pytest.approx([math.log(0.5e-300 / (1 - math.exp(-2))), 0.0])


class DefinedLeader:
    """The leader as the docstrings of `Leader` and `FixedShare` define it, in losses and logarithms, arm by arm."""

    def __init__(self, arms: int, eta: float = 1.5, share: float = 0.002, doubt: float = 6.0) -> None:
        self.eta, self.share, self.doubt = eta, share, doubt
        self.logs = [-math.log(arms)] * arms
        self.walks = [(0, 0)] * arms
        self.unpaid: list[list[float | None]] = [[] for _ in range(arms)]

    def learn(self, view: SelectionView, hits) -> None:
        longest = max(view.round_s)
        for arm, own in enumerate(hits):
            self.unpaid[arm] += [self.loss(view, arm, hit, longest) for hit in own]
        while all(self.unpaid):
            self.pay([losses.pop(0) for losses in self.unpaid])

    def loss(self, view: SelectionView, arm: int, hit: bool | None, longest: float) -> float | None:
        in_round, since_miss = self.walks[arm]
        if since_miss < (view.delay_tokens[arm] if view.delay_tokens else 0):
            loss = view.alone_s / longest
        elif hit and in_round < view.drafts:
            loss, in_round = 0.0, in_round + 1
        else:
            loss, in_round = view.round_s[arm] / longest, 0
        self.walks[arm] = in_round, since_miss + 1 if hit else 0
        return None if hit is None else loss

    def pay(self, losses: list[float | None]) -> None:
        awake = [(math.exp(log), loss) for log, loss in zip(self.logs, losses, strict=True) if loss is not None]
        if not awake:
            return
        after = sum(weight * math.exp(-self.eta * loss) for weight, loss in awake)
        common = math.log(sum(weight for weight, _ in awake) / after) / self.eta
        paid = [
            math.exp(log - self.eta * (common if loss is None else loss))
            for log, loss in zip(self.logs, losses, strict=True)
        ]
        spread = self.share / len(paid)
        self.logs = [math.log((1 - self.share) * weight / sum(paid) + spread) for weight in paid]

    def choose(self, view: SelectionView) -> int:
        leader = max(view.arms, key=lambda arm: self.logs[arm])
        if view.current is None:
            return leader
        price = self.eta * view.switch_s[leader] / max(view.round_s)
        return leader if self.logs[leader] - self.logs[view.current] > price else view.current

    def score(self, chosen: int, unread: list[int], stride: int = 4) -> tuple[int, ...]:
        best = max(self.logs)
        due = [
            (-tokens, arm)
            for arm, tokens in enumerate(unread)
            if arm != chosen and tokens >= min(4, 1 + (best - self.logs[arm]) / self.doubt) * stride
        ]
        return tuple(arm for _, arm in sorted(due))


def decisions(leader: Leader | DefinedLeader, seed: int) -> list[object]:
    """Return the decisions of a leader on a random stream of observations, and its weights as far as they are read."""
    rng = np.random.default_rng(seed)
    arms, current, made = 5, None, []
    skill, behind = rng.uniform(0.3, 0.95, arms), [0] * arms
    for n in range(400):
        if n % 80 == 79:
            skill = rng.permutation(skill)
        view = view_of(
            *rng.uniform(0.03, 0.05, arms),
            switch_s=tuple(rng.uniform(0, 0.02, arms)),
            current=current,
            delay_tokens=() if n % 100 < 50 else tuple(rng.integers(0, 3, arms).tolist()),
            alone_s=0.02,
        )
        current = leader.choose(view)
        tokens = int(rng.integers(1, 6))
        behind = [tokens + more for more in behind]
        due = (
            leader.score(current, behind) if isinstance(leader, DefinedLeader) else leader.score(view, current, behind)
        )
        made.append((current, due))
        hits: list[list[bool | None]] = [[] for _ in range(arms)]
        for arm in {current, *due}:
            known = (rng.random(behind[arm]) < skill[arm]).tolist()
            hits[arm] = [None if rng.random() < 0.03 else hit for hit in known]
            behind[arm] = 0
        if isinstance(leader, DefinedLeader):
            leader.learn(view, hits)
        else:
            leader.learn(outcome_of(current, view=view, hits=hits))
    return made


def test_the_leader_decides_as_it_is_defined() -> None:
    switches = 0
    for seed in range(10):
        leader, defined = Leader(experts=FixedShare(arms=5)), DefinedLeader(5)
        made = decisions(leader, seed)
        assert made == decisions(defined, seed)
        assert leader.experts.log_weights == pytest.approx(defined.logs, abs=1e-9)
        chosen = [arm for arm, _ in made]
        switches += sum(one != other for one, other in itertools.pairwise(chosen))
    assert switches > 50, "else hardly anything is compared"
    assert decisions(DefinedLeader(5, eta=1.6), 0) != decisions(DefinedLeader(5), 0)
    assert decisions(DefinedLeader(5, share=0.003), 0) != decisions(DefinedLeader(5), 0)
    assert decisions(DefinedLeader(5, doubt=5.0), 0) != decisions(DefinedLeader(5), 0)


def test_hedge_draws_by_weight_and_catches_up_with_every_idle_arm() -> None:
    dice = Dice(1)
    hedge = Hedge(FixedShare(arms=2, eta=1.0, share=1e-12), dice)
    hedge.experts.pay([math.log(3), 0.0])
    assert hedge.choose(EVEN) == 1
    assert dice.p == pytest.approx([0.25, 0.75])
    assert hedge.score(view_of(*[0.1] * 4), 2, (0, 3, 9, 5)) == (3, 1)


def test_a_prior_begins_with_the_fastest_that_it_knows_at_the_prices_of_the_day() -> None:
    view = view_of(0.1, 0.1, drafts=2)
    leader = Leader(experts=FixedShare(arms=2, eta=2.0, share=1e-12), prior=(0.5, 0.9), prior_tokens=12)
    assert leader.choose(view) == 1
    difference = leader.experts.log_weights[1] - leader.experts.log_weights[0]
    assert difference == pytest.approx(4.8581967)
    leader.choose(view)
    assert leader.experts.log_weights[1] - leader.experts.log_weights[0] == difference, "it counts once"
    assert default_selector(2, (0.5, 0.9)).choose(view_of(0.1, 1.0)) == 0
    assert default_selector(2).choose(view) == 0


@pytest.mark.parametrize("name", sorted(SELECTORS))
def test_every_selector_has_a_name_and_can_choose_and_learn(name) -> None:
    selector = selector_named(name)(3, np.random.default_rng(0))
    view = view_of(0.1, 0.1, 0.1)
    for _ in range(12):
        arm = selector.choose(view)
        assert arm in view.arms
        bits = [() for _ in view.arms]
        bits[arm] = (True, False)
        selector.learn(outcome_of(arm, 0.5, view, hits=tuple(bits)))


def test_an_unknown_selector_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="'best' is none of leader, static") as refused:
        selector_named("best")
    assert refused.value.field == "selector"


# --- the reward of a round ---


def test_a_round_gives_its_agreement_or_else_the_share_of_verified_drafts() -> None:
    assert block_divergence(outcome_of(0, 0.7, accepted=1, verified=2)) == 0.7
    assert block_divergence(outcome_of(0, math.nan, accepted=1, verified=2)) == 0.5
    assert block_divergence(outcome_of(0, math.nan, accepted=0, verified=0)) == 0.0, "a drafter that was silent"
