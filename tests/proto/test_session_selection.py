"""Several drafters in one session: which is active, what the idle ones read, and that the text stays what it is."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from bad_link import Faults
from checked_simulation import CheckedSimulation, open_frame, own_text, rules
from hand_driven import HandDrivenEdge, committed
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_drafters import drafter_of, hashing_oracle

from outrider.edge.selectors import FixedShare, Hedge, Leader, MetaSdUcb
from outrider.proto.errors import InvalidArgument
from outrider.proto.policy.selector import RoundCosts, RoundOutcome, SelectionView, Selector, StaticSelector
from outrider.proto.session import Selection
from outrider.proto.types import Commit, FinishReason, Opened, Patience, Sampling, token_ids


class AnyDrafter(StaticSelector):
    """Draws a drafter for each round."""

    def __init__(self, arms: int, rng: np.random.Generator) -> None:
        self.arms, self.rng = arms, rng

    def choose(self, view: SelectionView) -> int:
        return int(self.rng.integers(self.arms))


SELECTORS = {
    "any": AnyDrafter,
    "metasd": lambda arms, rng: MetaSdUcb(arms=arms),
    "hedge": lambda arms, rng: Hedge(FixedShare(arms=arms), rng),
    "leader": lambda arms, rng: Leader(experts=FixedShare(arms=arms)),
}


def pool(oracle, rights, seed, **options):
    """Drafters that are right with these chances, each with a seed of its own."""
    return [drafter_of(oracle, seed + 100 * i, right, **options) for i, right in enumerate(rights)]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    selector=st.sampled_from(sorted(SELECTORS)),
    rights=st.lists(st.sampled_from([0.0, 0.4, 0.8, 1.0]), min_size=2, max_size=4),
    link=st.sampled_from(
        [
            Faults(),
            Faults(delay_s=0.001),
            Faults(delay_s=0.1, jitter_s=0.05, duplicated=0.2, reordered=0.2),
            Faults(delay_s=0.03, breaks_every_s=0.3, goaway_every_s=0.7),
        ]
    ),
    dies_after=st.sampled_from([math.inf, math.inf, 0, 5, 20]),
    silent=st.sampled_from([0.0, 0.3]),
)
def test_the_text_is_the_targets_own_whoever_drafts(seed, selector, rights, link, dies_after, silent) -> None:
    oracle, frame = hashing_oracle(seed), open_frame()
    first, *others = pool(oracle, rights, seed, silent=silent)
    others[-1] = drafter_of(oracle, seed + 7, rights[-1], dies_after=dies_after)
    simulation = CheckedSimulation(
        frame,
        oracle,
        first,
        others=others,
        selector=SELECTORS[selector](len(rights), np.random.default_rng(seed)),
        link=link,
        seed=seed,
    )
    assert simulation.run() == own_text(oracle, frame, rules())
    assert len(simulation.failed) <= 1, "a broken drafter is asked for nothing more"


def test_the_better_drafter_becomes_active_and_every_hit_is_learned_once_and_right() -> None:
    oracle, frame = hashing_oracle(3, eos_odds=0.0), open_frame(sampling=Sampling(max_tokens=400))
    heard: list[list[bool | None]] = [[], []]

    class Listening(Leader):
        def learn(self, outcome: RoundOutcome) -> None:
            for arm, hits in enumerate(outcome.hits):
                heard[arm] += hits
            Leader.learn(self, outcome)

    bad, good = pool(oracle, (0.3, 0.9), 5)
    truth: list[list[bool]] = [[], []]
    said = {}

    def remembering(index, drafter):
        """Proposes the same after a prefix every time, as with shared noise."""

        def propose(prefix, count):
            drafts = ()
            for _ in range(count):
                key = (index, prefix + token_ids(drafts))
                if key not in said:
                    said[key] = drafter(key[1], 1)
                drafts += said[key]
            return drafts

        return propose

    drafters = [remembering(0, bad), remembering(1, good)]
    simulation = CheckedSimulation(
        frame,
        oracle,
        drafters[0],
        others=drafters[1:],
        selector=Listening(experts=FixedShare(arms=2)),
        verifier=rules(context_length=512),
    )
    text = simulation.run()
    for arm, drafter in enumerate(drafters):
        prefix = frame.prompt
        for token in text:
            truth[arm].append(drafter(prefix, 1)[0].id == token)
            prefix += (token,)
        known = [(i, hit) for i, hit in enumerate(heard[arm]) if hit is not None]
        assert all(truth[arm][i] == hit for i, hit in known)
        assert len(known) > 300, "nearly every token is known of every drafter"
    counts = simulation.edge.statistics
    assert counts.of("b").committed > 0.9 * len(text)
    assert sum(counts.of(arm).committed for arm in "ab") == len(text)
    assert counts.of("a").hits / counts.of("a").compared == pytest.approx(sum(truth[0]) / len(text), abs=0.05)
    assert counts.switches >= 1
    assert counts.read > 300, "the idle one catches up"


def test_one_drafter_is_never_teacher_forced_and_nobody_catches_up() -> None:
    oracle, frame = hashing_oracle(4), open_frame(sampling=Sampling(max_tokens=60))
    simulation = CheckedSimulation(frame, oracle, drafter_of(oracle, 4, 0.8))
    jobs = []
    edge = simulation.edge
    draft = simulation.drafters.draft
    simulation.drafters.draft = lambda job: jobs.append(job) or draft(job)
    simulation.drafters.catch_up = jobs.append
    simulation.run()
    assert len(jobs) > 5
    assert all(job.teacher_forced == 0 and job.skip == 0 and job.drafter == 0 for job in jobs)
    assert edge.statistics.read == 0


def test_a_selector_without_catch_up_costs_no_reading_and_late_ones_read_at_once() -> None:
    oracle, frame = hashing_oracle(6, eos_odds=0.0), open_frame(sampling=Sampling(max_tokens=120))

    class Second(StaticSelector):
        """Chooses the other one from the second choice on."""

        def choose(self, view: SelectionView) -> int:
            return 0 if view.current is None else 1

    simulation = CheckedSimulation(
        frame, oracle, drafter_of(oracle, 1, 0.5), others=[drafter_of(oracle, 2, 0.9)], selector=Second()
    )
    assert simulation.run() == own_text(oracle, frame, rules())
    statistics = simulation.edge.statistics
    assert (statistics.read, statistics.switches) == (0, 1)
    assert statistics.of("b").committed > 60


def test_views_are_of_rounds_where_the_verifier_waits_for_drafts_else_of_a_stream() -> None:
    def looked_at(delay_s: float, patience: Patience | None = None) -> SelectionView:
        class Looking(Leader):
            def choose(self, view: SelectionView) -> int:
                views.append(view)
                return Leader.choose(self, view)

        views: list[SelectionView] = []
        oracle = hashing_oracle(8, eos_odds=0.0)
        frame = open_frame(sampling=Sampling(max_tokens=80), patience=patience)
        CheckedSimulation(
            frame,
            oracle,
            drafter_of(oracle, 1, 0.6),
            others=[drafter_of(oracle, 2, 0.6)],
            selector=Looking(experts=FixedShare(arms=2)),
            link=Faults(delay_s=delay_s),
            step_s=0.03,
        ).run()
        return views[-1]

    assert looked_at(0.005).delay_tokens == ()
    far = looked_at(0.06)
    assert set(far.delay_tokens) <= {4, 5}, "120 ms of link in steps of 30 ms"
    assert far.alone_s == pytest.approx(0.03, rel=0.2)
    assert looked_at(0.06, Patience(math.inf, 4)).delay_tokens == (), "the verifier waits, since the text asks it to"
    assert looked_at(0.06, Patience(0.0, 4)).delay_tokens


def test_a_drafter_that_has_read_everything_is_not_asked_to_catch_up() -> None:
    class Eager(StaticSelector):
        catches_up = True

        def score(self, view: SelectionView, chosen: int, unread: Sequence[int]) -> tuple[int, ...]:
            return tuple(arm for arm in view.arms if arm != chosen)

    oracle, frame = hashing_oracle(8, eos_odds=0.0), open_frame(sampling=Sampling(max_tokens=80))
    first, *others = pool(oracle, [0.6, 0.6, 0.6], 1)
    simulation = CheckedSimulation(
        frame, oracle, first, others=others, selector=Eager(), link=Faults(delay_s=0.06), step_s=0.03
    )
    assert simulation.run() == own_text(oracle, frame, rules())
    assert simulation.edge.statistics.read > 100, "both of the others, prompt and text"


def test_a_selection_without_drafters_or_with_another_ones_vectors_is_refused() -> None:
    for names, steered, field in (
        ((), 0, "selection.names"),
        (("a", "a"), 0, "selection.names"),
        (("a", "b"), 2, "selection.steered"),
    ):
        with pytest.raises(InvalidArgument) as refused:
            Selection(StaticSelector(), names, steered=steered)
        assert refused.value.field == field


def test_a_selector_learns_the_outcome_of_commits(monkeypatch) -> None:
    outcomes: list[RoundOutcome] = []

    class Listening(Selector):
        def choose(self, view: SelectionView) -> int:
            return 0

        def learn(self, outcome: RoundOutcome) -> None:
            outcomes.append(outcome)

    oracle, frame = hashing_oracle(2, eos_odds=0.0), open_frame(sampling=Sampling(max_tokens=80))
    drafters = pool(oracle, (0.8, 0.8), 1)
    simulation = CheckedSimulation(frame, oracle, drafters[0], others=drafters[1:], selector=Listening(), send_q=True)
    simulation.run()
    statistics = simulation.edge.statistics
    assert sum(outcome.accepted for outcome in outcomes) == statistics.accepted
    assert {outcome.verified - outcome.accepted for outcome in outcomes} == {0, 1}, "a miss ends what is compared"
    assert sum(outcome.verified for outcome in outcomes) < statistics.verified
    assert all(outcome.seconds > 0 for outcome in outcomes)
    assert outcomes[-1].view.arms == range(2)


@pytest.mark.parametrize(
    ("tokens", "finish", "verified", "accepted"),
    [
        ((1, 7), None, 2, 1),  # the second draft missed, and the other two were never compared
        ((7,), None, 1, 0),
        ((1, 2, 3, 4, 5), None, 4, 4),
        ((1, 2), FinishReason.STOP_TOKEN, 2, 2),  # the text ends without a miss
    ],
)
def test_drafts_after_a_miss_or_the_end_do_not_count_as_verified(tokens, finish, verified, accepted) -> None:
    outcomes: list[RoundOutcome] = []

    class Listening(StaticSelector):
        def learn(self, outcome: RoundOutcome) -> None:
            outcomes.append(outcome)

    edge = HandDrivenEdge(open_frame(), selection=Selection(Listening(), ("a", "b"))).opened(
        Opened(0, 16, 40, "v", 512, vocab_size=8)
    )
    edge.on_drafted(edge.next_job(4), (1, 2, 3, 4), (), 0.001, 0.01)
    edge.on_commit(Commit(3, committed(*tokens), accepted, 16, verified=4, finish=finish), 0.1)
    assert [(outcome.verified, outcome.accepted) for outcome in outcomes] == [(verified, accepted)]


@pytest.mark.parametrize("prompt_tokens", [1, 2, 33, 70, 200])
def test_everybody_reads_the_prompt_before_the_first_choice_and_its_end_is_scored(prompt_tokens) -> None:
    heard = []

    class Listening(Leader):
        def read_prompt(self, log_q) -> None:
            heard.append(list(log_q))
            Leader.read_prompt(self, log_q)

    oracle = hashing_oracle(11, eos_odds=0.0)
    frame = open_frame(prompt=(3, 1) * (prompt_tokens // 2) + (2,) * (prompt_tokens % 2))
    first, *others = pool(oracle, (0.5, 0.5, 0.5), 3)
    leader = Listening(experts=FixedShare(arms=3))
    simulation = CheckedSimulation(
        frame, oracle, first, others=others, selector=leader, link=Faults(delay_s=0.2), drafting_s=0.001
    )
    assert simulation.run() == own_text(oracle, frame, rules())
    if prompt_tokens == 1:
        assert heard == [], "the first token has no probability"
    else:
        assert heard[-1] == [-1.0, -2.0, -3.0], "as the simulation's drafters score"
    assert simulation.edge.statistics.read >= 3 * prompt_tokens


def test_who_knows_the_prompt_best_begins_and_who_says_nothing_of_it_is_not_blamed() -> None:
    view = SelectionView(4, (0.1,) * 4, (0.0,) * 4)
    leader = Leader(experts=FixedShare(arms=4, eta=2.0, share=1e-12), subject=6.0, max_subject=3.0)
    leader.read_prompt([-4.0, -3.7, -9.0, math.nan])
    weights = leader.experts.log_weights
    assert leader.choose(view) == 1
    assert weights[1] - weights[0] == pytest.approx(6.0 * 0.3)
    assert weights[1] - weights[2] == pytest.approx(3.0), "and no more"
    assert weights[3] == weights[1]
    leader.read_prompt([-3.0, -3.7, -9.0, math.nan])
    assert leader.experts.log_weights[0] - leader.experts.log_weights[1] == pytest.approx(3.0), (
        "corrected, not counted twice"
    )
    silent = Leader(experts=FixedShare(arms=2))
    silent.read_prompt([math.nan, math.nan])
    assert silent.experts.log_weights[0] == silent.experts.log_weights[1]


def test_a_token_that_a_head_lacks_counts_no_more_in_a_prompt_than_a_rare_one() -> None:
    heard = []

    class Listening(Leader):
        def read_prompt(self, log_q) -> None:
            heard.append(list(log_q))

    selection = Selection(Listening(experts=FixedShare(arms=3)), ("whole", "trimmed", "silent"))
    selection.begin_text(65, 0)
    for drafter, rare in enumerate((-8.5, -20.0, math.nan)):
        selection.note_prompt(drafter, [-3.0] * 60)
        selection.note_prompt(drafter, [rare] * 4)
    selection.choose(RoundCosts((0.001,) * 3, (0.0,) * 3, 0.01, 0.03, 0.001), 65)
    (whole, trimmed, silent) = heard[0]
    assert whole == pytest.approx((-3.0 * 60 - 8.5 * 4) / 64)
    assert whole - trimmed == pytest.approx(0.5 * 4 / 64), "as it was e^-9 and not e^-20"
    assert math.isnan(silent)


def test_a_selector_that_is_kept_for_the_next_text_hears_of_the_same_token_from_all() -> None:
    learned: list[tuple[tuple[bool | None, ...], ...]] = []

    class Listening(Leader):
        def learn(self, outcome: RoundOutcome) -> None:
            learned.append(tuple(map(tuple, outcome.hits)))
            Leader.learn(self, outcome)

    leader = Listening(experts=FixedShare(arms=2))
    selection = Selection(leader, ("a", "b"))
    costs = RoundCosts((0.001, 0.001), (0.0, 0.0), 0.01, 0.03, 0.001)
    for _ in range(2):
        selection.begin_text(5, 0)
        selection.choose(costs, 5)
        for position in range(5, 15):
            selection.note(0, position, (True,))
        selection.note(1, 6, (False,))
    selection.begin_text(5, 0)
    assert [sum(len(hits[arm]) for hits in learned) for arm in (0, 1)] == [20, 20]
    assert learned[0][1] == (None, False, *[None] * 8)
    assert not any(leader.experts.unpaid), "nothing is left over from a text"


def test_before_the_first_choice_most_of_a_prompt_is_read_in_larger_jobs() -> None:
    selection = Selection(Leader(experts=FixedShare(arms=2)), ("a", "b"))
    selection.begin_text(200, 0)
    prompt = list(range(200))
    jobs = [job for job in iter(lambda: selection.next_catch_up(prompt), None) if job.drafter == 0]
    assert [len(job.tokens) for job in jobs] == [64, 64, 16, 16, 16, 16, 8]
    assert [token for job in jobs for token in job.tokens] == prompt
    assert [job.score for job in jobs] == [1, 1, 8, 16, 16, 16, 8], "the last 64 tokens show the prompt's subject"
    costs = RoundCosts((0.001, 0.001), (0.0, 0.0), 0.01, 0.03, 0.001)
    selection.choose(costs, 200)
    selection.begin_text(400, 0)
    selection.choose(costs, 400)
    job = selection.next_catch_up(list(range(400)))
    assert job is not None
    assert len(job.tokens) == 16, "a commit may come meanwhile"
