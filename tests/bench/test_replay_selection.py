"""Selectors on hit traces: rounds by hand, what arms hear, and who is faster on which link and text."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from outrider.bench.replay.selection import Text, Track, best_single, joined, oracle, play, texts_of
from outrider.bench.replay.traces import HitTrace
from outrider.bench.simulator.costs import Costs
from outrider.deploy.link.shape import LinkShape
from outrider.edge.policies.selection import (
    Alignment,
    BlockEfficiency,
    DiscountedUcb,
    Exp3,
    FixedShare,
    Hedge,
    MetaSdUcb,
    RandomSelector,
    SequentialHalving,
    SlidingUcb,
    Thompson,
    default_selector,
)
from outrider.proto.errors import ConfigError
from outrider.proto.policy.selection import Arm, RoundOutcome, SelectionView, Selector, StaticSelector

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
FAMILY = [Arm(name, 0.0006, 0.0001) for name in ("general", "code", "docs", "prose", "math")]


def link(rtt_ms: float):
    shape = LinkShape.of(rtt_ms=rtt_ms)
    return lambda _: shape


def track_of(hits: Sequence[bool], agreement: Sequence[float] = (), prompt: int = 40, **fields) -> Track:
    n = len(hits)
    values = {"id": "t", "domain": "", "drafter": "d", "drafter_version": "1", "temperature": 1.0} | fields
    trace = HitTrace(
        prompt_tokens=prompt,
        tokens=tuple(range(100, 100 + n)),
        hits=tuple(map(bool, hits)),
        confidence=(0.5,) * n,
        agreement=tuple(agreement),
        **values,
    )
    return Track(trace)


def text_of(rng: np.random.Generator, stretches: Sequence[tuple[int, int]], acceptance: np.ndarray = DOMAINS) -> Text:
    """Stretches of (domain, tokens), with scattered agreement and hits that follow it."""
    tracks = []
    for of_arm in acceptance:
        mean = np.concatenate([np.full(tokens, of_arm[domain]) for domain, tokens in stretches])
        agreement = rng.beta(3 * mean, 3 * (1 - mean))
        tracks.append(track_of(rng.random(len(mean)) < agreement, agreement.tolist()))
    return Text(tuple(tracks), tuple(itertools.accumulate(tokens for _, tokens in stretches[:-1])))


# --- by hand ---

TWO = [Arm("a", 0.001, 0.0005), Arm("b", 0.002, 0.01)]
HAND = Text((track_of([1, 1, 0, 1, 1, 1, 0], prompt=10), track_of([0, 1, 1, 1, 0, 1, 1], prompt=10)))


def test_rounds_draft_wait_and_commit_as_counted_by_hand() -> None:
    run = play(HAND, TWO, StaticSelector(0), link(20), PLAIN, 2)
    assert [(r.at, r.committed) for r in run.rounds] == [(0, 3), (3, 3), (6, 1)]
    round_s = 2 * 0.001 + 0.020 + 0.010 + 3 * 0.001
    last_s = 0.001 + 0.020 + 0.010 + 2 * 0.001  # one draft is left to make
    assert [r.seconds for r in run.rounds] == pytest.approx([10 * 0.0005 + round_s, round_s, last_s])
    assert run.tokens == 7
    assert run.elapsed()[-1] == pytest.approx(run.seconds)
    assert run.choices() == [0] * 7
    assert run.switches == 0


def test_a_switch_reads_what_the_others_have_committed() -> None:
    class Turns(StaticSelector):
        def learn(self, outcome: RoundOutcome) -> None:
            self.arm = 1 - self.arm

    run = play(HAND, TWO, Turns(0), link(20), PLAIN, 2)
    assert [r.arm for r in run.rounds] == [0, 1, 0]
    assert [(r.at, r.committed) for r in run.rounds] == [(0, 3), (3, 2), (5, 2)]
    assert run.rounds[1].seconds == pytest.approx(13 * 0.01 + 2 * 0.002 + 0.020 + 0.010 + 3 * 0.001)
    assert run.rounds[2].seconds == pytest.approx(2 * 0.0005 + 2 * 0.001 + 0.020 + 0.010 + 3 * 0.001)


def test_a_silent_drafter_ends_its_round_early() -> None:
    track = track_of([1, 0, 1, 1], silent=(False, True, False, False))
    [first, *_] = play(Text((track,)), TWO[:1], StaticSelector(0), link(20), PLAIN, 3).rounds
    assert first.committed == 2
    assert first.seconds == pytest.approx(40 * 0.0005 + 0.001 + 0.020 + 0.010 + 2 * 0.001)


@dataclass
class Listening(Selector):
    """Chooses at random, reads with everybody, and notes what it is told."""

    rng: np.random.Generator
    outcomes: list[RoundOutcome] = field(default_factory=list)

    def choose(self, view: SelectionView) -> int:
        return int(self.rng.integers(len(view.arms)))

    def score(self, view: SelectionView, chosen: int) -> tuple[int, ...]:
        return tuple(arm for arm in view.arms if arm != chosen)

    def learn(self, outcome: RoundOutcome) -> None:
        self.outcomes.append(outcome)


@pytest.mark.parametrize("catch_up_s", [0.0, 0.0001, 0.005])
def test_arms_hear_every_token_that_they_have_not_drafted_once_and_in_order(catch_up_s) -> None:
    text = text_of(np.random.default_rng(1), [(0, 150)])
    arms = [replace(arm, catch_up_s=catch_up_s) for arm in FAMILY]
    listening = Listening(np.random.default_rng(2))
    run = play(text, arms, listening, link(20), PLAIN, DRAFTS)
    for arm, track in enumerate(text.tracks):
        at = 0
        for entry, outcome in zip(run.rounds, listening.outcomes, strict=True):
            heard = outcome.hits[arm]
            mine = entry.arm == arm
            heard = tuple(hit for hit in heard if hit is not None)  # of the text's end perhaps
            read = heard[:-1] if mine else heard  # its round's last token is the target's, whatever it would have said
            assert read == track.trace.hits[at : at + len(read)]
            at += len(heard)
            if mine:
                assert heard[-1] is (outcome.accepted == entry.committed)
                assert at == entry.at + entry.committed, "it has caught up with the text"
        assert at > 0


def test_at_the_end_of_a_text_nothing_is_left_to_be_heard_of_it() -> None:
    listening = Listening(np.random.default_rng(2))
    slow = [replace(arm, catch_up_s=0.004) for arm in FAMILY]
    for seed in (1, 2):
        listening.outcomes.clear()
        text = text_of(np.random.default_rng(seed), [(0, 150)])
        play(text, slow, listening, link(20), PLAIN, DRAFTS)
        for arm in range(5):
            heard = [hit for outcome in listening.outcomes for hit in outcome.hits[arm]]
            assert len(heard) == 150
        assert any(None in hits for hits in listening.outcomes[-1].hits)


def test_reading_along_never_takes_longer_than_the_wait() -> None:
    text = Text((track_of([1] * 60, prompt=1), track_of([1] * 60, prompt=1)))

    class Stays(Listening):
        def choose(self, view: SelectionView) -> int:
            return 0

    stays = Stays(np.random.default_rng(0))
    slow_reader = [TWO[0], Arm("b", 0.001, 0.02)]
    run = play(text, slow_reader, stays, link(20), PLAIN, 2)
    assert run.seconds == play(text, slow_reader, StaticSelector(0), link(20), PLAIN, 2).seconds
    heard = [[hit for hit in outcome.hits[1] if hit is not None] for outcome in stays.outcomes]
    assert max(map(len, heard)) == 1, "0.033 s hold one token of 0.02 s"


def test_catching_up_starts_with_the_prompt_and_costs_what_the_wait_does_not_hide() -> None:
    told: list[list[float]] = []

    class Reader(StaticSelector):
        catches_up = True

        def read_prompt(self, log_q: Sequence[float]) -> None:
            told.append(list(log_q))

    first, second = (
        replace(track.trace, prompt_log_q=log_q) for track, log_q in zip(HAND.tracks, (-2.5, -1.5), strict=True)
    )
    text = Text((Track(first), Track(second)))
    costs = replace(PLAIN, prefill_row_s=0.0003)
    alone = play(text, TWO, StaticSelector(0), link(20), costs, 2)
    along = play(text, TWO, Reader(0), link(20), costs, 2)
    assert told == [[-2.5, -1.5]]
    waiting_s = 0.020 + 0.010 + 10 * 0.0003
    both_s = 10 * (0.0005 + 0.01)
    assert along.seconds - alone.seconds == pytest.approx(both_s - waiting_s - 10 * 0.0005)
    assert play(text, TWO, Reader(0), link(200), costs, 2).seconds == pytest.approx(
        play(text, TWO, StaticSelector(0), link(200), costs, 2).seconds
    )


def test_what_a_commit_tells_is_counted_as_the_target_judges() -> None:
    listening = Listening(np.random.default_rng(0))
    play(Text((track_of([1, 1, 0, 1, 1], [0.9, 0.8, 0.3, 0.7, 0.6]),)), TWO[:1], listening, link(20), PLAIN, 4)
    first, second = listening.outcomes
    assert (first.committed, first.accepted, first.verified) == (3, 2, 3)
    assert first.agreement == pytest.approx((0.9 + 0.8 + 0.3 + 0.7) / 4)
    assert (second.committed, second.accepted, second.verified) == (2, 2, 2)


# --- texts ---


def test_traces_of_drafters_meet_by_prompt() -> None:
    one, other = track_of([1, 0]).trace, track_of([0, 1], drafter="e").trace
    [text] = texts_of({"d": [one], "e": [other]})
    assert [track.trace.drafter for track in text.tracks] == ["d", "e"]
    with pytest.raises(ConfigError, match="every prompt with every drafter"):
        texts_of({"d": [one], "e": [replace(other, id="u")]})
    with pytest.raises(ConfigError, match="must be on one text"):
        texts_of({"d": [one], "e": [replace(other, tokens=(1, 2))]})


def test_joined_texts_change_where_they_meet() -> None:
    rng = np.random.default_rng(0)
    texts = [text_of(rng, [(0, 30)]), text_of(rng, [(1, 20)]), text_of(rng, [(2, 10)])]
    text = joined(texts)
    assert text.changes == (30, 50)
    assert text.tracks[3].trace.hits == sum((part.tracks[3].trace.hits for part in texts), ())
    assert len(text.tracks[3].agreement) == text.tokens == 60
    with pytest.raises(ConfigError, match="the same drafters"):
        joined([])


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"text\.changes"):
        Text((track_of([1, 1]),), (2,))
    with pytest.raises(ConfigError, match=r"trace\.agreement"):
        track_of([1, 1], [0.5])
    with pytest.raises(ConfigError, match="one for each track"):
        play(HAND, TWO[:1], StaticSelector(0), link(20), PLAIN, 2)
    with pytest.raises(ConfigError, match="drafts"):
        play(HAND, TWO, StaticSelector(0), link(20), PLAIN, 0)


# --- behaviour ---


def seconds_of(texts: Sequence[Text], selector: Selector, rtt_ms: float, arms: Sequence[Arm] = FAMILY) -> float:
    return sum(play(text, arms, selector, link(rtt_ms), PLAIN, DRAFTS).seconds for text in texts)


def contenders(seed: int) -> dict[str, Callable[[], Selector]]:
    """By name; made anew for each seed, five arms each."""
    return {
        **{arm.name: lambda i=i: StaticSelector(i) for i, arm in enumerate(FAMILY)},
        "random": lambda: RandomSelector(5, np.random.default_rng(seed)),
        "MetaSD-UCB (BD)": lambda: MetaSdUcb(arms=5),
        "MetaSD-UCB (BE)": lambda: MetaSdUcb(arms=5, reward=BlockEfficiency()),
        "discounted UCB": lambda: DiscountedUcb(arms=5),
        "sliding UCB": lambda: SlidingUcb(arms=5),
        "EXP3": lambda: Exp3(arms=5, rng=np.random.default_rng(seed)),
        "Thompson": lambda: Thompson(arms=5, rng=np.random.default_rng(seed)),
        "halving": lambda: SequentialHalving(arms=5),
        "Hedge": lambda: Hedge(FixedShare(arms=5), np.random.default_rng(seed)),
        "default": lambda: default_selector(5),
    }


def shares_of_oracle(
    make: Callable[[np.random.Generator], list[Text]], rtt_ms: float, seeds: range
) -> dict[str, float]:
    """Each contender's speed over the oracle's, on all texts of all seeds."""
    spent: dict[str, float] = dict.fromkeys(contenders(0), 0.0)
    best = 0.0
    for seed in seeds:
        texts = make(np.random.default_rng(seed))
        best += sum(oracle(text, FAMILY, link(rtt_ms), PLAIN, DRAFTS).seconds for text in texts)
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
    assert shares["random"] < shares["MetaSD-UCB (BD)"], table


def test_the_default_stays_above_every_single_drafter_over_many_texts() -> None:
    rng = np.random.default_rng(5)
    texts = [text_of(rng, [(int(domain), 100)]) for domain in rng.integers(0, 4, 24)]
    _, runs = best_single(texts, FAMILY, link(20), PLAIN, DRAFTS)
    alone = sum(run.seconds for run in runs)
    assert seconds_of(texts, default_selector(5), 20) < alone / 1.15
    assert seconds_of(texts, Hedge(FixedShare(arms=5), np.random.default_rng(0)), 20) < alone / 1.15


@pytest.mark.parametrize("domain", range(4))
def test_the_default_is_near_the_best_drafter_of_a_domain_that_it_is_not_told(domain) -> None:
    rng = np.random.default_rng(domain)
    texts = [text_of(rng, [(domain, 300)]) for _ in range(3)]
    arm, runs = best_single(texts, FAMILY, link(50), PLAIN, DRAFTS)
    assert arm == domain + 1
    assert sum(run.seconds for run in runs) > 0.95 * seconds_of(texts, default_selector(5), 50)


def test_after_a_change_of_domain_the_default_is_soon_near_the_oracle() -> None:
    mine = best = stuck = 0.0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        before, after = (int(domain) for domain in rng.permutation(4)[:2])
        text = text_of(rng, [(before, 160), (after, 224)])
        best_run = oracle(text, FAMILY, link(50), PLAIN, DRAFTS).elapsed()
        run = play(text, FAMILY, default_selector(5), link(50), PLAIN, DRAFTS).elapsed()
        still = play(text, FAMILY, StaticSelector(before + 1), link(50), PLAIN, DRAFTS).elapsed()
        settled, end = 160 + 64, 383
        best += best_run[end] - best_run[settled]
        mine += run[end] - run[settled]
        stuck += still[end] - still[settled]
    assert best / mine > 0.9
    assert best / stuck < 0.7, "who does not change pays for it"


def test_the_oracle_takes_the_best_of_every_stretch() -> None:
    text = text_of(np.random.default_rng(0), [(0, 200), (3, 200)])
    choices = oracle(text, FAMILY, link(50), PLAIN, DRAFTS).choices()
    assert set(choices[:190]) == {1}
    assert set(choices[210:]) == {4}


UNEQUAL = [Arm("fast", 0.0005, 0.0001), Arm("slow and better", 0.015, 0.001)]


@pytest.mark.parametrize(("rtt_ms", "better"), [(2, 0), (200, 1)])
@pytest.mark.parametrize("make", [lambda: default_selector(2), lambda: MetaSdUcb(arms=2)], ids=["default", "MetaSD"])
def test_a_slower_better_drafter_wins_on_a_long_link_and_loses_on_a_short_one(make, rtt_ms, better) -> None:
    texts = [text_of(np.random.default_rng(seed), [(0, 400)], np.array([[0.6], [0.9]])) for seed in range(3)]
    arm, _ = best_single(texts, UNEQUAL, link(rtt_ms), PLAIN, DRAFTS)
    assert arm == better
    selector = make()
    choices = [play(text, UNEQUAL, selector, link(rtt_ms), PLAIN, DRAFTS).choices() for text in texts]
    late = np.concatenate([choice[100:] for choice in choices])
    assert (late == better).mean() > 0.85


def test_alignment_alone_takes_the_slower_drafter_on_a_short_link_too() -> None:
    text = text_of(np.random.default_rng(0), [(0, 600)], np.array([[0.6], [0.9]]))
    choices = play(text, UNEQUAL, MetaSdUcb(arms=2, objective=Alignment()), link(2), PLAIN, DRAFTS).choices()
    assert np.mean(choices[200:]) > 0.85


def test_after_a_change_of_link_the_default_switches_drafter_within_64_tokens() -> None:
    shares = []
    for seed in range(4):
        text = text_of(np.random.default_rng(seed), [(0, 800)], np.array([[0.6], [0.9]]))
        changes_at_s = play(text, UNEQUAL, StaticSelector(0), link(2), PLAIN, DRAFTS).elapsed()[400]
        run = play(
            text,
            UNEQUAL,
            default_selector(2),
            lambda time, at=changes_at_s: LinkShape.of(rtt_ms=2 if time < at else 200),
            PLAIN,
            DRAFTS,
        )
        change = next(i for i, elapsed in enumerate(run.elapsed()) if elapsed >= changes_at_s)
        shares.append(np.mean(run.choices()[change + 64 :]))
        assert np.mean(run.choices()[50 : change - 10]) < 0.15
    assert np.mean(shares) > 0.85


def test_regret_of_ucb_grows_like_a_logarithm_and_that_of_chance_in_line() -> None:
    arms = [Arm(name, 0.0006, 0.0) for name in ("best", "middle", "worst")]
    early, late = (dict.fromkeys(("ucb", "random", "default"), 0.0) for _ in range(2))
    for seed in range(2):
        text = text_of(np.random.default_rng(seed), [(0, 8_000)], np.array([[0.85], [0.7], [0.55]]))
        best = play(text, arms, StaticSelector(0), link(50), PLAIN, DRAFTS).elapsed()
        selectors = {
            "ucb": MetaSdUcb(arms=3, strength=0.6, objective=Alignment()),
            "random": RandomSelector(3, np.random.default_rng(seed)),
            "default": default_selector(3),
        }
        for name, selector in selectors.items():
            regret = play(text, arms, selector, link(50), PLAIN, DRAFTS).regret(best)
            early[name] += regret[799]
            late[name] += regret[-1]
    assert late["ucb"] < 5 * early["ucb"], "from 800 to 8000 tokens"
    assert late["random"] > 8 * early["random"]
    assert early["default"] < 0.7 * early["ucb"]
    assert late["default"] < 0.1 * late["random"], "it stays ready for a change, at the price of a small slope"
