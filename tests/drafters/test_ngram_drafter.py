"""Prompt lookup: what it finds, with which probability, and that rolling back leaves no trace."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafters import NgramDrafter, ProposalRule
from outrider.proto.errors import InvalidArgument
from outrider.proto.types import Sampling, token_ids

GREEDY = ProposalRule(Sampling())
words = st.lists(st.integers(0, 3), max_size=14)


def state_after(tokens, rule=GREEDY, **kwargs):
    state = NgramDrafter(**{"vocab_size": 8, **kwargs}).open(rule)
    state.extend(tokens)
    return state


def q_by_definition(tokens, token, longest, vocab):
    """The module's recursion, by scanning the whole text."""
    q = 1 / vocab
    for n in range(1, longest + 1):
        suffix = tokens[-n:]
        followers = [tokens[i + n] for i in range(len(tokens) - n) if tokens[i : i + n] == suffix and len(suffix) == n]
        if followers:
            kinds = len(set(followers))
            q = (followers.count(token) + kinds * q) / (len(followers) + kinds)
    return q


def test_the_continuation_of_the_longest_suffix_is_proposed():
    prompt = (1, 2, 3, 4, 5, 6, 7, 2, 9, 9, 1, 2, 3)  # 2 was last followed by 3, before by 9; 1 2 3 by 4 5 6
    assert token_ids(state_after(prompt, vocab_size=10).propose(4)) == (4, 5, 6, 7)
    assert token_ids(state_after((*prompt[:-2], 2), vocab_size=10, longest=1).propose(1)) in {((3),), ((9),)}


def test_a_token_never_seen_before_ends_the_proposal():
    assert token_ids(state_after((1, 2, 3)).propose(4)) == ()
    assert token_ids(state_after(()).propose(4)) == ()
    assert token_ids(state_after((5, 6, 7, 5)).propose(2)) == (6, 7)
    assert token_ids(state_after((5, 6, 5, 6, 1)).propose(3)) == ()


@settings(max_examples=100, deadline=None)
@given(words.filter(bool), st.integers(1, 4))
def test_q_is_the_interpolated_estimate_and_sums_to_one(tokens, longest):
    state = state_after(tokens, longest=longest)
    q = []
    for token in range(8):
        q.append(float(np.exp(state.score((token,))[0])))
        state.truncate(len(tokens))
    assert q == pytest.approx([q_by_definition(tokens, token, longest, 8) for token in range(8)], rel=1e-5)
    assert sum(q) == pytest.approx(1, abs=1e-5)


@settings(max_examples=100, deadline=None)
@given(words.filter(bool), st.sampled_from([0.0, 1.0]), st.integers(0, 99))
def test_the_q_of_a_proposal_is_its_score(tokens, temperature, seed):
    rule = ProposalRule(Sampling(temperature=temperature, seed=seed))
    state = state_after(tokens, rule)
    proposal = state.propose(4)
    assert state.length == len(tokens) + len(proposal)
    state.truncate(len(tokens))
    confidence = [draft.confidence for draft in proposal]
    np.testing.assert_allclose(confidence, np.exp(state.score(token_ids(proposal))), rtol=1e-5)


@settings(max_examples=100, deadline=None)
@given(words, words, st.integers(0, 6), st.integers(0, 14), words)
def test_truncate_then_extend_equals_never_having_drafted(prompt, wrong, drafted, kept, text):
    state = state_after(prompt)
    state.extend(wrong)
    state.propose(drafted)
    kept = min(kept, len(prompt))
    state.truncate(kept)
    state.extend(text)
    fresh = state_after((*prompt[:kept], *text))
    assert list(map(vars_of, state._positions)) == list(map(vars_of, fresh._positions))
    assert state.propose(5) == fresh.propose(5)


def vars_of(positions):
    return positions._last, positions._earlier


def test_the_noise_chooses_among_continuations_and_the_same_seed_chooses_the_same():
    prompt = (1, 2, 1, 3, 1, 4, 1, 5, 1)
    drawn = set()
    for seed in range(30):
        rule = ProposalRule(Sampling(temperature=1.0, seed=seed))
        token = token_ids(state_after(prompt, rule).propose(1))[0]
        assert token_ids(state_after(prompt, rule).propose(1))[0] == token
        drawn.add(token)
    assert drawn == {2, 3, 4, 5}


def test_confidence_grows_as_a_text_repeats():
    once, often = (state_after((1, 2, 3) * times + (1, 2)).propose(1) for times in (1, 6))
    assert token_ids(once) == token_ids(often) == (3,)
    assert 0.5 < once[0].confidence < often[0].confidence < 1


def test_bad_settings_are_refused_by_name():
    with pytest.raises(InvalidArgument, match=r"ngram\.longest"):
        NgramDrafter(longest=0)
    with pytest.raises(InvalidArgument, match=r"ngram\.vocab_size"):
        NgramDrafter(vocab_size=0)
