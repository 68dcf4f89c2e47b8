"""Selectors on hit traces: what they learn, and which is faster on which link and text."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pytest

from outrider.deploy.link.shape import LinkShape
from outrider.edge.selectors import FixedShare, Hedge, MetaSdUcb, default_selector, selector_named
from outrider.proto.policy.selector import RoundOutcome, SelectionView, Selector, StaticSelector
from outrider.proto.session import CatchUpJob, EdgeSession, Selection
from research.simulator.clock import Costs
from research.traces.pool_replay import Stage
from research.traces.recordings import HitTrace, PoolText
from research.traces.traced import Policy, ReplayOutcome, synchronous

PLAIN = Costs(step_s=0.010, row_s=0.001, job_s=0.0, edge_event_s=0.0, cloud_event_s=0.0, commit_s=0.0)
DRAFTS = 6
# Acceptance of each drafter (rows: general, code, docs, prose, math) in each domain (code, docs, prose, math).
DOMAINS = np.array(
    [
        [0.68, 0.68, 0.66, 0.66],
        [0.85, 0.50, 0.45, 0.50],
        [0.50, 0.84, 0.55, 0.45],
        [0.42, 0.55, 0.82, 0.40],
        [0.50, 0.45, 0.40, 0.86],
    ]
)


class Arm(NamedTuple):
    """A drafter's name, and the time of a token that it drafts or reads."""

    name: str
    drafting_s: float
    catch_up_s: float


FAMILY = [Arm(name, 0.0006, 0.0001) for name in ("general", "code", "docs", "prose", "math")]


def link(rtt_ms: float):
    shape = LinkShape.of(rtt_ms=rtt_ms)
    return lambda _: shape


def trace_of(hits: Sequence[bool], agreement: Sequence[float] = (), prompt: int = 40, **fields) -> HitTrace:
    n = len(hits)
    values = {"id": "t", "domain": "", "drafter": "d", "drafter_version": "1", "temperature": 1.0} | fields
    return HitTrace(
        prompt_tokens=prompt,
        tokens=tuple(range(100, 100 + n)),
        hits=tuple(map(bool, hits)),
        confidence=(0.5,) * n,
        agreement=tuple(agreement),
        **values,
    )


def text_of(
    rng: np.random.Generator, stretches: Sequence[tuple[int, int]], acceptance: np.ndarray = DOMAINS
) -> PoolText:
    """Return a text of stretches of (domain, tokens), with scattered agreement and hits that follow it."""
    traces = []
    for of_arm in acceptance:
        mean = np.concatenate([np.full(tokens, of_arm[domain]) for domain, tokens in stretches])
        agreement = rng.beta(3 * mean, 3 * (1 - mean))
        hits = rng.random(len(mean)) < agreement
        traces.append(trace_of(hits, agreement.tolist(), drafter=f"d{len(traces)}"))
    return PoolText(tuple(traces))


def stage_of(arms: Sequence[Arm], shape_at) -> Stage:
    """Return the stage of synchronous rounds of these drafters."""
    costs = [replace(PLAIN, drafting_s=arm.drafting_s, catch_up_s=arm.catch_up_s) for arm in arms]
    return Stage(costs, shape_at, synchronous(DRAFTS))


def play(texts: Sequence[PoolText], arms: Sequence[Arm], selector: Selector, shape_at) -> list[ReplayOutcome]:
    return stage_of(arms, shape_at).chosen(texts, selector)


def oracle(text: PoolText, arms: Sequence[Arm], shape_at) -> ReplayOutcome:
    [best] = stage_of(arms, shape_at).best([text])
    return best


def best_single(texts: Sequence[PoolText], arms: Sequence[Arm], shape_at) -> tuple[int, list[ReplayOutcome]]:
    """Return the drafter that alone would have been the fastest, and its run."""
    stage = stage_of(arms, shape_at)
    runs = {arm: stage.alone(texts, arm) for arm in range(len(arms))}
    arm = min(runs, key=lambda index: sum(run.seconds for run in runs[index]))
    return arm, runs[arm]


# --- what selectors learn ---


@dataclass
class Listening(Selector):
    """Keep the outcomes, and let all idle drafters catch up; the active one is drawn, or always `arm`."""

    catches_up = True

    rng: np.random.Generator
    arm: int | None = None
    outcomes: list[RoundOutcome] = field(default_factory=list)

    def choose(self, view: SelectionView) -> int:
        return int(self.rng.integers(len(view.arms))) if self.arm is None else self.arm

    def score(self, view: SelectionView, chosen: int, unread: Sequence[int]) -> tuple[int, ...]:
        return tuple(arm for arm in view.arms if arm != chosen)

    def learn(self, outcome: RoundOutcome) -> None:
        self.outcomes.append(outcome)

    def by_text(self) -> list[list[RoundOutcome]]:
        """Return the outcomes of each text but the last; one without tokens ends a text where the next one begins."""
        ends = [i + 1 for i, outcome in enumerate(self.outcomes) if not outcome.committed]
        return [self.outcomes[a:b] for a, b in itertools.pairwise((0, *ends))]


@pytest.mark.parametrize("catch_up_s", [0.0, 0.0001, 0.004])
def test_arms_learn_of_every_token_once_and_in_order_even_of_an_unknown_end(catch_up_s) -> None:
    texts = [text_of(np.random.default_rng(seed), [(0, 150)]) for seed in (1, 2, 3)]
    listening = Listening(np.random.default_rng(2))
    play(texts, [arm._replace(catch_up_s=catch_up_s) for arm in FAMILY], listening, link(20))
    _, *played = listening.by_text()  # after the warm-up
    for text, outcomes in zip(texts, played, strict=False):
        learned = [[hit for outcome in outcomes for hit in outcome.hits[arm]] for arm in range(5)]
        assert len(set(map(len, learned))) == 1, "the next text begins with the same token for all"
        assert 140 <= len(learned[0]) <= 150
        for hits, trace in zip(learned, text.traces, strict=True):
            assert all(hit in (None, own) for hit, own in zip(hits, trace.hits, strict=False))
            assert sum(hit is not None for hit in hits) > 100
    assert len(played) == 2


def test_catching_up_while_the_edge_waits_costs_no_time() -> None:
    text = text_of(np.random.default_rng(1), [(0, 150)])
    arms = [arm._replace(catch_up_s=0.00001) for arm in FAMILY]
    [along] = play([text], arms, Listening(np.random.default_rng(0), arm=0), link(20))
    [alone] = play([text], arms, StaticSelector(0), link(20))
    assert along.seconds == pytest.approx(alone.seconds, rel=0.01)


def test_outcomes_count_up_to_the_miss_and_hold_the_agreement_of_all_drafts() -> None:
    hits, agreement = (True, True, False, True, True) * 12, (0.9, 0.8, 0.3, 0.7, 0.6) * 12
    listening = Listening(np.random.default_rng(0), arm=0)
    text = PoolText((trace_of(hits, agreement), trace_of(hits, agreement, drafter="e")))
    play([text] * 2, FAMILY[:2], listening, link(20))
    _, outcomes = listening.by_text()
    rounds = outcomes[3:-2]  # the first has drafts that came behind the Open
    assert len(rounds) > 8
    counts = {(outcome.committed, outcome.verified, outcome.accepted) for outcome in rounds}
    assert counts == {(5, 5, 4)}, "from one miss to the next"
    drafted = (0.7, 0.6, 0.9, 0.8, 0.3, 0.7)  # a step may verify one after the miss
    means = [pytest.approx(sum(drafted[:n]) / n) for n in (5, 6)]
    assert all(outcome.agreement in means for outcome in rounds)


# --- behaviour ---


def seconds_of(texts: Sequence[PoolText], selector: Selector, rtt_ms: float, arms: Sequence[Arm] = FAMILY) -> float:
    return sum(run.seconds for run in play(texts, arms, selector, link(rtt_ms)))


@dataclass
class Chance(StaticSelector):
    """Draw a drafter for each round, uniformly."""

    arms: int = 1
    rng: np.random.Generator = field(default_factory=np.random.default_rng)

    def choose(self, view: SelectionView) -> int:
        return int(self.rng.integers(self.arms))


def contenders(seed: int) -> dict[str, Callable[[], Selector]]:
    """Return factories of selectors of the five drafters, by name."""
    return {
        **{arm.name: lambda i=i: StaticSelector(i) for i, arm in enumerate(FAMILY)},
        "chance": lambda: Chance(arms=5, rng=np.random.default_rng(seed)),
        "MetaSD-UCB": lambda: MetaSdUcb(arms=5),
        "Hedge": lambda: Hedge(FixedShare(arms=5), np.random.default_rng(seed)),
        "default": lambda: default_selector(5),
    }


def shares_of_oracle(
    make: Callable[[np.random.Generator], list[PoolText]], rtt_ms: float, seeds: range
) -> dict[str, float]:
    """Return each contender's speed over the oracle's, on all texts of all seeds."""
    spent: dict[str, float] = dict.fromkeys(contenders(0), 0.0)
    best = 0.0
    for seed in seeds:
        texts = make(np.random.default_rng(seed))
        best += sum(oracle(text, FAMILY, link(rtt_ms)).seconds for text in texts)
        for name, selector in contenders(seed).items():
            spent[name] += seconds_of(texts, selector(), rtt_ms)
    return {name: best / seconds for name, seconds in spent.items()}


def test_on_mixed_domains_the_default_beats_each_drafter_and_no_selector_beats_it() -> None:
    shares = shares_of_oracle(
        lambda rng: [text_of(rng, [(int(domain), 200)]) for domain in rng.permutation(4)], 50, range(2)
    )
    table = "\n".join(f"{name:16s} {share:.3f}" for name, share in sorted(shares.items(), key=lambda item: item[1]))
    assert shares["default"] > 0.97 * max(shares.values()), table
    assert shares["default"] > 1.2 * max(shares[arm.name] for arm in FAMILY), table
    assert shares["default"] > 0.82, table
    assert shares["chance"] < shares["MetaSD-UCB"], table


@pytest.mark.parametrize("domain", range(4))
def test_the_default_is_near_the_best_drafter_of_an_unknown_domain(domain) -> None:
    rng = np.random.default_rng(domain)
    texts = [text_of(rng, [(domain, 300)]) for _ in range(2)]
    arm, runs = best_single(texts, FAMILY, link(50))
    assert arm == domain + 1
    assert sum(run.seconds for run in runs) > 0.95 * seconds_of(texts, default_selector(5), 50)


def test_after_a_change_of_domain_the_default_is_soon_near_the_best_drafter() -> None:
    mine = best = stuck = 0.0
    for seed in range(3):
        rng = np.random.default_rng(seed)
        before, after = (int(domain) for domain in rng.permutation(4)[:2])
        text = text_of(rng, [(before, 160), (after, 224)])
        best_run = play([text], FAMILY, StaticSelector(after + 1), link(50))[0].arrivals
        run = play([text], FAMILY, default_selector(5), link(50))[0].arrivals
        still = play([text], FAMILY, StaticSelector(before + 1), link(50))[0].arrivals
        settled, end = 160 + 64, 383
        best += best_run[end] - best_run[settled]
        mine += run[end] - run[settled]
        stuck += still[end] - still[settled]
    assert best / mine > 0.9
    assert best / stuck < 0.7, "a drafter that stays costs time"


UNEQUAL = [Arm("fast", 0.0005, 0.0001), Arm("slow and better", 0.015, 0.001)]


@pytest.mark.parametrize(("rtt_ms", "better"), [(2, 0), (200, 1)])
@pytest.mark.parametrize("make", [lambda: default_selector(2), lambda: MetaSdUcb(arms=2)], ids=["default", "MetaSD"])
def test_a_slower_better_drafter_wins_on_a_long_link_and_loses_on_a_short_one(make, rtt_ms, better) -> None:
    texts = [text_of(np.random.default_rng(seed), [(0, 400)], np.array([[0.6], [0.9]])) for seed in range(3)]
    arm, _ = best_single(texts, UNEQUAL, link(rtt_ms))
    assert arm == better
    selector = make()
    choices = [play([text], UNEQUAL, selector, link(rtt_ms))[0].active for text in texts]
    late = np.concatenate([choice[100:] for choice in choices])
    assert (late == better).mean() > 0.85


def test_after_a_change_of_link_the_default_switches_drafter_within_64_tokens() -> None:
    shares = []
    for seed in range(2):
        text = text_of(np.random.default_rng(seed), [(0, 800)], np.array([[0.6], [0.9]]))
        changes_at_s = play([text], UNEQUAL, StaticSelector(0), link(2))[0].arrivals[400]
        shape_at = lambda time, at=changes_at_s: LinkShape.of(rtt_ms=2 if time < at else 200)  # noqa: E731
        [run] = play([text], UNEQUAL, default_selector(2), shape_at)
        change = next(i for i, elapsed in enumerate(run.arrivals) if elapsed >= changes_at_s)
        shares.append(np.mean(run.active[change + 64 :]))
        assert np.mean(run.active[50 : change - 10]) < 0.15
    assert np.mean(shares) > 0.85


def test_regret_of_ucb_grows_like_a_logarithm_and_that_of_chance_in_line() -> None:
    arms = [Arm(name, 0.0006, 0.0) for name in ("best", "middle", "worst")]
    text = text_of(np.random.default_rng(0), [(0, 8_000)], np.array([[0.85], [0.7], [0.55]]))
    best = np.array(play([text], arms, StaticSelector(0), link(50))[0].arrivals)
    selectors = {
        "ucb": MetaSdUcb(arms=3, strength=0.6),
        "chance": Chance(arms=3, rng=np.random.default_rng(0)),
        "default": default_selector(3),
    }
    regret = {name: play([text], arms, each, link(50))[0].arrivals - best for name, each in selectors.items()}
    early, late = ({name: each[token] for name, each in regret.items()} for token in (799, -1))
    assert late["ucb"] < 5 * early["ucb"], "from 800 to 8000 tokens"
    assert late["chance"] > 8 * early["chance"]
    assert early["default"] < 0.7 * early["ucb"]
    assert late["default"] < 0.1 * late["chance"], "it stays ready for a change, at the price of a small slope"


# --- what the edge need not compute again ---


def played(selector: Callable[[], Selector]) -> list[ReplayOutcome]:
    """Texts with four domains over three links."""
    rng = np.random.default_rng(3)
    texts = [text_of(rng, [(domain, 90)]) for domain in range(4)]
    costs = [replace(PLAIN, drafting_s=arm.drafting_s, catch_up_s=arm.catch_up_s) for arm in FAMILY]
    stages = [Stage(costs, link(rtt_ms), Policy()) for rtt_ms in (2, 10, 60)]
    return [run for stage in stages for run in stage.chosen(texts, selector())]


def test_a_window_asked_once_an_event_decides_as_if_asked_each_time(monkeypatch) -> None:
    def runs() -> list[ReplayOutcome]:
        return played(lambda: default_selector(len(FAMILY)))

    def asked() -> int:
        return len(questions)

    questions: list[None] = []
    ask = EdgeSession._tokens
    monkeypatch.setattr(EdgeSession, "_tokens", lambda self, drafter: questions.append(None) or ask(self, drafter))
    kept = runs()
    few = asked()
    kept_allowance = EdgeSession._allowance
    monkeypatch.setattr(EdgeSession, "_allowance", lambda self: self._review() or kept_allowance(self))
    assert runs() == kept
    assert asked() - few > few
    monkeypatch.undo()
    monkeypatch.setattr(EdgeSession, "_review", lambda self: None)
    with pytest.raises((AssertionError, RuntimeError)):  # an answer that is kept for good is another
        assert runs() == kept


@pytest.mark.parametrize("selector", ["leader", "hedge"])
def test_idle_drafters_asked_for_once_a_commit_catch_up_as_if_asked_each_time(monkeypatch, selector) -> None:
    def runs() -> list[ReplayOutcome]:
        return played(lambda: selector_named(selector)(len(FAMILY), np.random.default_rng(1)))

    def forget(self: Selection, transcript: Sequence[int]) -> CatchUpJob | None:
        self._due = None
        return next_catch_up(self, transcript)

    def stale(self: Selection, transcript: Sequence[int]) -> CatchUpJob | None:
        self._due = [] if self._view is not None else None
        return next_catch_up(self, transcript)

    next_catch_up = Selection.next_catch_up
    kept = runs()
    monkeypatch.setattr(Selection, "next_catch_up", forget)
    assert runs() == kept
    monkeypatch.setattr(Selection, "next_catch_up", stale)
    assert runs() != kept, "drafters that are not asked for again never catch up"
