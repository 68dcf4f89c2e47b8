"""Proposals from logits, against a brute-force computation over whole small vocabularies."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_drafters import ScriptedDrafter

from outrider.drafters import NgramDrafter, ProposalRule
from outrider.drafters.proposals import NO_PROPOSAL
from outrider.proto.errors import InvalidArgument
from outrider.proto.noise import gumbel
from outrider.proto.types import Sampling, token_ids

VOCAB = 12


def choose(sampling, logits_by_token, position, history=(), candidates=None, prompt_length=0, eos_tokens=()):
    """Give the rule the top `candidates` of a vocabulary's logits, as a drafter would."""
    order = np.argsort(-logits_by_token, kind="stable")[:candidates]
    rule = ProposalRule(sampling, prompt_length=prompt_length, eos_tokens=eos_tokens)
    if (counts := rule.counts()) is not None:
        counts.extend(history)
    return rule.choose(
        position,
        order.astype(np.int64),
        logits_by_token[order].astype(np.float32),
        math.log(sum(math.exp(logit) for logit in logits_by_token)),
        counts,
    )


def brute_force(sampling, logits_by_token, history=(), prompt_length=0):
    """The processed distribution, token by token, in the order that `Sampling` documents. {token: probability}."""
    logits = {t: float(logit) for t, logit in enumerate(logits_by_token)}
    if sampling.allowed_tokens:
        logits = {t: logit for t, logit in logits.items() if t in sampling.allowed_tokens}
    for t, bias in sampling.logit_bias:
        if t in logits:
            logits[t] += bias
    text = list(history[prompt_length:])
    for t, logit in logits.items():
        if t in history:
            penalty = sampling.repetition_penalty
            logits[t] = logit / penalty if logit > 0 else logit * penalty
        logits[t] -= sampling.presence_penalty * (t in text) + sampling.frequency_penalty * text.count(t)
    weights = {t: math.exp(logit / sampling.temperature) for t, logit in logits.items()}
    ranked = sorted(weights, key=weights.__getitem__, reverse=True)
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    total, before, nucleus = sum(weights[t] for t in ranked), 0.0, []
    for t in ranked:
        if before / total < sampling.top_p:
            nucleus.append(t)
        before += weights[t]
    ranked = [t for t in nucleus if weights[t] >= sampling.min_p * weights[nucleus[0]]]
    total = sum(weights[t] for t in ranked)
    return {t: weights[t] / total for t in ranked}


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.6]),
    seed=st.integers(0, 1 << 40),
    top_k=st.sampled_from([0, 0, 1, 3, VOCAB]),
    top_p=st.sampled_from([1.0, 0.83, 0.41]),
    min_p=st.sampled_from([0.0, 0.0, 0.17]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.35]),
    logit_bias=st.sampled_from([(), ((2, 3.0), (5, -2.0))]),
    allowed_tokens=st.sampled_from([(), (), (1, 2, 5, 9)]),
)


@settings(max_examples=300, deadline=None)
@given(samplings, st.integers(0, 10**6), st.lists(st.integers(0, VOCAB - 1), max_size=8), st.integers(0, 3))
def test_with_all_tokens_as_candidates_the_rule_is_the_brute_force_one(sampling, draw, history, prompt_length):
    logits = (np.random.default_rng(draw).normal(size=VOCAB) * 2).astype(np.float32)
    position = len(history)
    q = brute_force(sampling, logits, history, prompt_length)
    tokens = np.array(sorted(q))
    noisy = np.log([q[t] for t in tokens.tolist()]) + gumbel(sampling.seed, position, tokens)
    choice = choose(sampling, logits, position, history, prompt_length=prompt_length)
    assert choice.id == tokens[np.argmax(noisy)]
    assert choice.confidence == pytest.approx(q[choice.id], rel=1e-4)
    assert choice.perturbed_probability == pytest.approx(np.exp(noisy.max()) / np.exp(noisy).sum(), rel=1e-4)


@pytest.mark.parametrize("kind", ["greedy", "warm", "biased", "penalised"])
def test_runners_up_are_what_would_be_proposed_without_the_better_tokens(kind):
    sampling = {
        "greedy": Sampling(),
        "warm": Sampling(temperature=1.0, seed=5),
        "biased": Sampling(temperature=0.8, seed=5, logit_bias=((3, 2.0),)),
        "penalised": Sampling(temperature=1.0, seed=5, frequency_penalty=0.5),
    }[kind]
    rng = np.random.default_rng(7)
    for position in range(40):
        logits = rng.normal(size=30) * 2
        order = np.argsort(-logits)
        rule = ProposalRule(sampling, runners_up=3)
        log_normalizer = float(np.log(np.exp(logits).sum()))
        counts = rule.counts()
        draft = rule.choose(position, order, logits[order].astype(np.float32), log_normalizer, counts)
        better = {draft.id}
        assert len(draft.runners_up) == 3
        for runner_up in draft.runners_up:
            left = np.array([token for token in order if token not in better])
            again = rule.choose(position, left, logits[left].astype(np.float32), log_normalizer, rule.counts())
            assert again.id == runner_up
            better.add(runner_up)
    assert ProposalRule(sampling).choose(0, order, logits[order].astype(np.float32), 0.0, counts).runners_up == ()


def test_at_temperature_zero_the_argmax_and_its_probability_hold_for_any_seed():
    logits = np.array([0.5, 2.0, -1.0, 1.9], dtype=np.float32)
    plain = np.exp(logits) / np.exp(logits).sum()
    for seed in range(20):
        choice = choose(Sampling(seed=seed), logits, position=seed)
        assert choice.id == 1
        assert choice.confidence == pytest.approx(plain[1], rel=1e-6)
        assert choice.perturbed_probability == choice.confidence, "nothing is drawn"


def test_few_candidates_are_enough_where_only_the_argmax_can_be_proposed():
    for sampling in (Sampling(), Sampling(seed=3, top_k=5, top_p=0.5)):
        assert ProposalRule(sampling).candidates_wanted(128) == 1
        assert ProposalRule(sampling, runners_up=3).candidates_wanted(128) == 4
        assert ProposalRule(sampling, runners_up=3).candidates_wanted(2) == 2
        logits = np.array([0.5, 2.0, -1.0, 1.9], dtype=np.float32)
        assert choose(sampling, logits, 4, candidates=1)[:2] == choose(sampling, logits, 4)[:2]
    for sampling in (Sampling(temperature=0.1), Sampling(logit_bias=((0, 2.0),)), Sampling(frequency_penalty=0.1)):
        assert ProposalRule(sampling).candidates_wanted(128) == 128


def test_perturbed_probability_says_how_often_a_slightly_different_target_agrees():
    """More draws of the more certain half survive another distribution than draws of the less certain half."""
    random = np.random.default_rng(5)
    logits = np.linspace(1.5, -1.0, VOCAB).astype(np.float32)
    agreed = []
    for position in range(2000):
        target = logits + random.normal(size=VOCAB) * 0.4
        choice = choose(Sampling(temperature=1.0, seed=7), logits, position)
        by_target = choose(Sampling(temperature=1.0, seed=7), target, position)
        agreed.append((choice.perturbed_probability, choice.id == by_target.id))
    hits = np.array([hit for _, hit in sorted(agreed)])
    assert hits[1000:].mean() > hits[:1000].mean() + 0.1


def test_a_temperature_next_to_zero_is_the_argmax():
    logits = np.array([0.5, 2.0, -1.0, 1.9], dtype=np.float32)
    for temperature in (1e-4, 1e-12):
        for candidates in (2, 4):
            assert choose(Sampling(temperature=temperature, seed=3), logits, 7, candidates=candidates)[:2] == (1, 1.0)


def test_at_temperature_zero_bias_and_penalties_move_the_argmax():
    logits = np.array([0.5, 2.0, -1.0, 1.9], dtype=np.float32)
    assert choose(Sampling(logit_bias=((0, 2.0),)), logits, 4)[0] == 0
    assert choose(Sampling(repetition_penalty=1.2), logits, 4, history=(1, 1, 2, 1))[0] == 3
    assert choose(Sampling(frequency_penalty=0.2), logits, 4, history=(1, 1, 2, 1), prompt_length=3)[0] == 3
    assert choose(Sampling(frequency_penalty=0.2), logits, 4, history=(1, 1, 2, 1), prompt_length=4)[0] == 1


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 7}, {"temperature": 0.8, "top_k": 5}])
def test_no_end_is_proposed_before_min_tokens_and_all_is_as_before_from_there_on(settings):
    logits = np.linspace(1.5, -1.0, VOCAB).astype(np.float32)
    held = Sampling(min_tokens=6, stop_tokens=(1,), **settings)
    masked, free = logits.copy(), replace(held, min_tokens=0)
    masked[[0, 1]] = -60.0
    for position in range(10, 22):
        got = choose(held, logits, position, prompt_length=10, eos_tokens=(0,))
        wanted = choose(free, masked if position < 16 else logits, position)
        assert got.id == wanted.id
        assert got[1:3] == pytest.approx(wanted[1:3], abs=1e-6) or position < 16
        assert all(map(math.isfinite, got[1:3]))
        assert got.id not in (0, 1) or position >= 16
    proposed = {choose(held, logits, p, prompt_length=10, eos_tokens=(0,)).id for p in range(16, 60)}
    assert proposed & {0, 1}, "later they may come, or this test shows nothing"


def test_nothing_is_proposed_where_all_candidates_are_ends_and_few_leave_some():
    logits = np.linspace(1.5, -1.0, VOCAB).astype(np.float32)
    held = Sampling(min_tokens=6, stop_tokens=(1, 2))
    assert choose(held, logits, 3, candidates=3, eos_tokens=(0,)) is NO_PROPOSAL
    assert ProposalRule(held, eos_tokens=(0,)).candidates_wanted(128) == 1 + 3


@pytest.mark.parametrize(("temperature", "candidates"), [(1.0, VOCAB), (0.6, VOCAB), (1.0, 4)])
def test_proposals_over_many_positions_are_as_frequent_as_q(temperature, candidates):
    """Chi-square of 6,000 proposals at a fixed seed; below the 99.9 % point (31.3 for 11 degrees of freedom)."""
    logits = np.linspace(1.5, -1.0, VOCAB).astype(np.float32)
    sampling = Sampling(temperature=temperature, seed=7)
    count, q_seen = np.zeros(VOCAB), {}
    for position in range(6000):
        token, q, *_ = choose(sampling, logits, position, candidates=candidates)
        count[token] += 1
        q_seen[token] = q
    expected = np.array([q_seen.get(token, 0.0) for token in range(VOCAB)])
    assert np.count_nonzero(expected) == candidates
    if candidates == VOCAB:
        assert expected.sum() == pytest.approx(1, abs=1e-5)
    expected *= 6000 / expected.sum()
    drawn = expected > 0
    statistic = float(((count - expected)[drawn] ** 2 / expected[drawn]).sum())
    assert statistic < 31.3
    shuffled = expected[drawn][::-1]  # the test can fail: the reversed distribution is refused
    assert float(((count[drawn] - shuffled) ** 2 / shuffled).sum()) > 1000


def test_q_counts_the_tokens_that_are_no_candidates():
    logits = np.linspace(1.5, -1.0, VOCAB).astype(np.float32)
    everything = brute_force(Sampling(temperature=1.0), logits)
    token, q, *_ = choose(Sampling(temperature=1.0, seed=3), logits, 5, candidates=4)
    assert q == pytest.approx(everything[token], rel=1e-5)
    token, q, *_ = choose(Sampling(temperature=0.7, seed=3), logits, 5, candidates=6)
    colder = brute_force(Sampling(temperature=0.7), logits)
    assert q == pytest.approx(colder[token], rel=0.1)  # the tail is estimated
    token, q, *_ = choose(Sampling(temperature=0.7, seed=3, top_k=4), logits, 5, candidates=4)
    assert q == pytest.approx(brute_force(Sampling(temperature=0.7, top_k=4), logits)[token], rel=1e-5)


def test_nothing_is_proposed_where_no_candidate_is_allowed():
    logits = np.linspace(1.5, -1.0, VOCAB).astype(np.float32)
    for temperature in (0.0, 1.0):
        assert (
            choose(Sampling(temperature=temperature, allowed_tokens=(10, 11)), logits, 0, candidates=4) is NO_PROPOSAL
        )
        assert choose(Sampling(temperature=temperature, allowed_tokens=(3,)), logits, 0, candidates=4)[0] == 3


def test_penalties_count_earlier_tokens_of_the_same_block():
    """The n-gram drafter repeats a run forever; a frequency penalty must break the run inside one `propose`."""
    prompt = (1, 1, 1, 1, 2, 1, 1, 1)
    greedy = Sampling(temperature=0.0)
    for sampling, repeats in ((greedy, True), (replace(greedy, frequency_penalty=0.8), False)):
        state = NgramDrafter(vocab_size=16).open(ProposalRule(sampling, prompt_length=len(prompt)))
        state.extend(prompt)
        proposed = token_ids(state.propose(6))
        assert len(proposed) == 6
        assert (set(proposed) == {1}) == repeats
        assert proposed[0] == 1


def test_the_first_token_cannot_be_scored_and_truncation_never_grows():
    state = ScriptedDrafter((1, 2)).open(ProposalRule(Sampling()))
    with pytest.raises(InvalidArgument, match="empty prefix"):
        state.score((1,))
    for length in (1, -1):
        with pytest.raises(InvalidArgument, match="truncate"):
            state.truncate(length)
