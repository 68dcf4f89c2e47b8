"""Teacher-forced proposals equal those of a drafter that proposes token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_drafters import ScriptedDrafter
from tiny_drafter import (
    CONTEXT,
    GREEDY,
    RANK,
    VOCAB,
    WARM,
    log_q_after,
    some_tokens,
    steering_graph,
    tiny_graph,
    write_package,
)

from outrider.drafters import NgramDrafter, ProposalRule, find_package
from outrider.drafters.onnx import FIRST_CAPACITY, PREFILL_TOKENS, SCORED_TOKENS, OnnxDrafter
from outrider.drafters.protocol import TokenPrefix
from outrider.proto.errors import InvalidArgument, UnknownToken
from outrider.proto.types import DraftToken, Sampling, token_ids

SAMPLINGS = {
    "greedy": Sampling(),
    "cool": Sampling(temperature=0.7, seed=5),
    "plain": Sampling(temperature=1.0, seed=11),
    "penalised": Sampling(temperature=0.9, seed=3, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    "penalised greedy": Sampling(frequency_penalty=0.5),
    "cut": Sampling(temperature=1.2, seed=9, top_k=5, top_p=0.7, min_p=0.05),
    "allowed": Sampling(temperature=1.0, seed=4, allowed_tokens=tuple(range(7, 19))),
    "biased": Sampling(temperature=1.0, seed=4, logit_bias=((3, 4.0),)),
}
VECTOR, OTHER = np.array([1, -2, 3], dtype=np.float32), np.array([-3, 1, 2], dtype=np.float32)
BLOCK = st.lists(st.integers(0, VOCAB - 1), max_size=9)


def numbers(drafts: Sequence[DraftToken]) -> np.ndarray:
    """Return [n, 3] ids, confidence and perturbed probability."""
    return np.array([draft[:3] for draft in drafts])


def rule_of(kind, prompt_length=3):
    return ProposalRule(SAMPLINGS[kind], prompt_length=prompt_length)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return OnnxDrafter(write_package(tmp_path_factory.mktemp("plain"), tiny_graph()))


@pytest.fixture(scope="module")
def steered(tmp_path_factory):
    package = write_package(tmp_path_factory.mktemp("steered"), tiny_graph(steered=True), steering_graph())
    return OnnxDrafter(package)


@pytest.fixture(params=["plain", "steered", "ngram"])
def drafter(request, plain, steered):
    return {"plain": plain, "steered": steered, "ngram": NgramDrafter(vocab_size=VOCAB)}[request.param]


def assert_same(got: tuple[DraftToken, ...], wanted: tuple[DraftToken, ...]) -> None:
    """Equal tokens, and equal signals to within rounding."""
    assert token_ids(got) == token_ids(wanted)
    np.testing.assert_allclose(numbers(got), numbers(wanted), atol=1e-6, equal_nan=True)


def assert_forces(state, twin, tokens) -> None:
    """`state` sees at once what its equal `twin` sees token by token, and both go on alike."""
    assert_same(state.propose_forced(tokens), TokenPrefix.propose_forced(twin, tokens))
    assert state.length == twin.length
    assert_same(state.propose(5), twin.propose(5))
    assert state.length == twin.length


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_it_is_what_would_have_been_proposed_token_by_token(drafter, kind):
    state, twin = drafter.open(rule_of(kind)), drafter.open(rule_of(kind))
    for each in (state, twin):
        each.extend((3, 1, 4))
    text = some_tokens(SCORED_TOKENS + 9, vocab=20)
    assert_forces(state, twin, text)
    for each in (state, twin):
        each.truncate(20)
    assert_forces(state, twin, text[:3])


@pytest.mark.parametrize("count", [1, SCORED_TOKENS, SCORED_TOKENS + 1, 2 * SCORED_TOKENS, PREFILL_TOKENS + 1])
@pytest.mark.parametrize("before", [1, 2, PREFILL_TOKENS, PREFILL_TOKENS + 1, FIRST_CAPACITY - SCORED_TOKENS])
def test_borders_of_runs_and_of_the_cache_change_nothing(plain, before, count):
    state, twin = plain.open(WARM), plain.open(WARM)
    for each in (state, twin):
        each.extend(some_tokens(before))
    assert_forces(state, twin, some_tokens(count, seed=8))


@pytest.mark.parametrize("since", [1, 3, 10, 3 + SCORED_TOKENS, 3 + PREFILL_TOKENS + 5])
@pytest.mark.parametrize("vector", [None, VECTOR])
def test_vectors_count_on_both_sides_of_the_prompts_end(steered, since, vector):
    state, twin = steered.open(WARM), steered.open(WARM)
    for each in (state, twin):
        each.extend((3, 1, 4))
        each.steer(OTHER, since=since)
        each.propose(2)
        each.truncate(3)
        each.steer(vector, since=since)
    assert_forces(state, twin, some_tokens(PREFILL_TOKENS + 20, seed=8))


def test_beyond_the_contexts_end_nothing_would_have_been_proposed(plain):
    state, twin = plain.open(WARM), plain.open(WARM)
    for each in (state, twin):
        each.extend(some_tokens(CONTEXT - 5))
    forced = state.propose_forced(some_tokens(12, seed=8))
    assert token_ids(forced[6:]) == (-1,) * 6
    assert min(token_ids(forced[:6])) >= 0
    for column in numbers(forced).T[1:]:
        assert np.isnan(column).tolist() == [False] * 6 + [True] * 6
    assert_same(forced, TokenPrefix.propose_forced(twin, some_tokens(12, seed=8)))
    assert token_ids(state.propose_forced((1, 2))) == (-1, -1)
    state.truncate(CONTEXT - 3)
    twin.truncate(CONTEXT - 3)
    assert_forces(state, twin, some_tokens(9, seed=7))


def test_where_no_candidate_is_allowed_nothing_is_proposed_and_the_rest_is_known(plain):
    likely = np.argsort(-log_q_after((3, 1, 4)))
    rule = ProposalRule(Sampling(allowed_tokens=(int(likely[-1]), 5)))
    state, twin = plain.open(rule), plain.open(rule)
    for each in (state, twin):
        each.extend((3, 1, 4))
    forced = state.propose_forced(some_tokens(40))
    assert forced[0].id == -1
    assert math.isnan(forced[0].confidence)
    assert set(token_ids(forced)) > {-1}
    assert_same(forced, TokenPrefix.propose_forced(twin, some_tokens(40)))
    assert state.propose(3) == twin.propose(3)


verbs = st.one_of(
    st.tuples(st.just("propose"), st.integers(0, 9)),
    st.tuples(st.just("extend"), BLOCK),
    st.tuples(st.just("score"), BLOCK),
    st.tuples(st.just("propose_forced"), st.lists(st.integers(0, VOCAB - 1), max_size=20)),
    st.tuples(st.just("truncate"), st.floats(0, 1)),
    st.tuples(st.just("steer"), st.sampled_from([None, VECTOR, OTHER, np.ones(RANK, dtype=np.float32)])),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(verbs, max_size=10), st.integers(1, 30), BLOCK, st.sampled_from(sorted(SAMPLINGS)))
def test_forced_proposals_are_what_would_be_proposed_whatever_came_before(steered, steps, prompt, tokens, kind):
    state, twin = steered.open(rule_of(kind)), steered.open(rule_of(kind))
    for each in (state, twin):
        each.extend(some_tokens(prompt))
        for verb, argument in steps:
            if verb == "truncate":
                each.truncate(1 + int(argument * (each.length - 1)))
            elif verb == "steer":
                each.steer(argument, since=prompt)
            else:
                getattr(each, verb)(argument)
    assert_forces(state, twin, tokens)


def test_nothing_is_forced_after_an_empty_prefix_or_on_an_unknown_token(plain):
    for state in (plain.open(GREEDY), NgramDrafter().open(GREEDY), ScriptedDrafter((1, 2)).open(GREEDY)):
        with pytest.raises(InvalidArgument, match="empty prefix"):
            state.propose_forced((1,))
    state = plain.open(GREEDY)
    state.extend((1, 2))
    with pytest.raises(UnknownToken):
        state.propose_forced((1, VOCAB))
    assert state.length == 2
    assert state.propose_forced(()) == ()


@pytest.mark.parametrize("kind", ["greedy", "plain"])
def test_the_shipped_drafters_forced_proposals_are_nearly_always_its_own(kind):
    """Nearly, since on some machines products of 8-bit numbers round otherwise with another number of rows."""
    drafter = OnnxDrafter(find_package("general"))
    state, twin = drafter.open(rule_of(kind)), drafter.open(rule_of(kind))
    for each in (state, twin):
        each.extend((3, 1, 4))
    text = token_ids(state.propose(60))
    state.truncate(3)
    at_once, one_by_one = state.propose_forced(text), TokenPrefix.propose_forced(twin, text)
    assert sum(a != b for a, b in zip(token_ids(at_once), token_ids(one_by_one), strict=True)) <= 3
    at_once, one_by_one = numbers(at_once), numbers(one_by_one)
    same = at_once[:, 0] == one_by_one[:, 0]
    np.testing.assert_allclose(at_once[same, 1], one_by_one[same, 1], atol=0.05)
