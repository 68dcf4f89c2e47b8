"""A steered ONNX drafter: which positions are computed with which steering vector, and its effect on the logits.

The tiny graph's cache says of every position what it was computed with, so it is read back and compared.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_drafters import FailingDrafter, GarbageDrafter, ScriptedDrafter
from tiny_drafter import (
    GREEDY,
    LAYERS,
    MLP,
    RANK,
    STEERING_MANIFEST,
    VOCAB,
    WARM,
    entries,
    log_q_after,
    rows_of,
    some_tokens,
    steering_graph,
    tiny_graph,
    write_package,
)

from outrider.drafters import NgramDrafter
from outrider.drafters.onnx import FIRST_CAPACITY, PREFILL_TOKENS, OnnxDrafter
from outrider.drafters.protocol import steering_of
from outrider.proto.drafter_format import SteeringShape
from outrider.proto.errors import InvalidArgument, ModelRefused
from outrider.proto.types import token_ids

SHAPE = SteeringShape(RANK, MLP, "0123456789ab", ((1, 0.12), (8, 0.08)))


def vector(*numbers):
    return np.array(numbers, dtype=np.float32)


ONE, OTHER = vector(1, -2, 3), vector(-3, 1, 2)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    package = write_package(tmp_path_factory.mktemp("steered"), tiny_graph(steered=True), steering_graph())
    return OnnxDrafter(package)


@pytest.fixture(scope="module")
def unsteered(tmp_path_factory):
    return OnnxDrafter(write_package(tmp_path_factory.mktemp("unsteered"), tiny_graph()))


def computed(state):
    """Rows of the cache, [computed, WIDTH]."""
    return entries(state._cache, state._computed)


def steered_greedily(prefix, since, by, n):
    """The n greedy tokens after `prefix` by hand, with positions from `since` on steered by the vector `by`."""
    tokens = list(prefix)
    for _ in range(n):
        vectors = dict.fromkeys(range(since, len(tokens)), by)
        tokens.append(int(np.argmax(log_q_after(tokens, vectors))))
    return tuple(tokens[len(prefix) :])


def test_a_steered_drafter_has_the_shape_of_its_vectors_and_others_have_none(drafter, unsteered):
    assert drafter.steering == SHAPE
    assert steering_of(drafter) == SHAPE
    others = [unsteered, NgramDrafter(), ScriptedDrafter(()), GarbageDrafter(5), FailingDrafter()]
    assert [steering_of(other) for other in others] == [None] * 5
    assert steering_of(FailingDrafter(inner=drafter)) == SHAPE
    assert steering_of(SimpleNamespace(name="written before there were vectors")) is None


def test_until_it_is_steered_it_drafts_bit_for_bit_as_the_unsteered_one(drafter, unsteered):
    never, none, zero, plain = drafter.open(WARM), drafter.open(WARM), drafter.open(WARM), unsteered.open(WARM)
    for state in (never, none, zero, plain):
        state.extend(some_tokens(20))
    none.steer(None, since=3)
    zero.steer(np.zeros(RANK, dtype=np.float32), since=3)
    plain.steer(ONE, since=3)
    expected = plain.propose(30)
    for state in (never, none, zero):
        assert state.propose(30) == expected
        np.testing.assert_array_equal(computed(state), computed(plain))
        state.truncate(20)
    plain.truncate(20)
    scores = plain.score(some_tokens(40, seed=9))
    for state in (never, none, zero):
        np.testing.assert_array_equal(state.score(some_tokens(40, seed=9)), scores)


@pytest.mark.parametrize("length", [1, 2, 20, PREFILL_TOKENS, PREFILL_TOKENS + 1, FIRST_CAPACITY + 3])
@pytest.mark.parametrize("more", [0, 1, 5, PREFILL_TOKENS + 7])
def test_the_prompt_is_computed_unsteered_and_all_that_follows_with_the_vector(drafter, length, more):
    tokens = some_tokens(length + more)
    state = drafter.open(GREEDY)
    state.steer(ONE, since=length)
    state.extend(tokens)
    proposal = state.propose(6)
    assert token_ids(proposal) == steered_greedily(tokens, length, ONE, 6)
    vectors = dict.fromkeys(range(length, length + more + 5), ONE)
    np.testing.assert_array_equal(computed(state), rows_of((*tokens, *token_ids(proposal[:-1])), vectors))


@pytest.mark.parametrize(("prompt", "before", "scored"), [(3, 3, 5), (3, 5, 40), (30, 3, 60), (100, 3, 20), (1, 1, 1)])
def test_scores_are_of_the_steered_logits_on_both_sides_of_the_prompts_end(drafter, prompt, before, scored):
    tokens = some_tokens(before + scored)
    state = drafter.open(WARM)
    state.steer(ONE, since=prompt)
    state.extend(tokens[:before])
    log_q = state.score(tokens[before:])
    steered = dict.fromkeys(range(prompt, before + scored), ONE)
    by_hand = [
        log_q_after(tokens[:i], {p: c for p, c in steered.items() if p < i})[tokens[i]]
        for i in range(before, before + scored)
    ]
    np.testing.assert_allclose(log_q, by_hand, atol=3e-4)


vectors_or_none = st.sampled_from([None, ONE, OTHER, vector(2, 2, 2)])
verbs = st.one_of(
    st.tuples(st.just("steer"), vectors_or_none, st.integers(0, 40)),
    st.tuples(st.just("propose"), st.integers(0, 9)),
    st.tuples(st.just("extend"), st.lists(st.integers(0, VOCAB - 1), max_size=9)),
    st.tuples(st.just("score"), st.lists(st.integers(0, VOCAB - 1), max_size=20)),
    st.tuples(st.just("truncate"), st.floats(0, 1)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(verbs, max_size=14), st.integers(1, 80))
def test_each_position_has_the_newest_vector_of_when_it_was_computed(drafter, steps, prompt):
    state = drafter.open(WARM)
    state.extend(some_tokens(prompt))
    newest, since = None, 0
    vectors = {}
    for verb, *arguments in steps:
        had = state._computed
        if verb == "truncate":
            arguments = [1 + int(arguments[0] * (state.length - 1))]
        if verb == "steer":
            newest, since = arguments
        getattr(state, verb)(*arguments)
        vectors = {position: by for position, by in vectors.items() if position < state._computed}
        vectors |= {p: newest for p in range(had, state._computed) if p >= since and newest is not None}
        np.testing.assert_array_equal(computed(state), rows_of(state._tokens[: state._computed], vectors))


def test_sessions_of_one_drafter_are_steered_separately(drafter):
    by = [None, ONE, OTHER]
    alone, together = ([drafter.open(WARM) for _ in by] for _ in range(2))
    for states in (alone, together):
        for state, each in zip(states, by, strict=True):
            state.extend(some_tokens(20))
            state.steer(each, since=20)
    expected = [token_ids(state.propose(10)) for state in alone]
    got = [()] * 3
    for _ in range(10):
        for number, state in enumerate(together):
            got[number] += token_ids(state.propose(1))
    assert got == expected
    assert len(set(expected)) == 3


def test_the_small_graph_runs_once_a_vector_and_no_buffer_is_bound_again(drafter):
    state = drafter.open(GREEDY)
    state.extend(some_tokens(20))
    state.steer(ONE, since=20)
    runs, binds = [], []
    state._biases._session = SimpleNamespace(run_with_iobinding=lambda binding: runs.append(binding))
    state._bind_cache = lambda binding: binds.append(binding)
    state.propose(8)
    state.propose(8)
    assert len(runs) == 1
    state.steer(OTHER, since=20)
    state.propose(8)
    assert (len(runs), binds) == (2, [])


def test_a_vector_of_another_length_is_refused(drafter):
    with pytest.raises(InvalidArgument, match=r"vector: has the shape \(2,\), the drafter takes \[3\]"):
        drafter.open(GREEDY).steer(vector(1, 2), since=0)


@pytest.mark.parametrize(
    ("graph", "steering", "manifest", "why"),
    [
        (tiny_graph(), steering_graph(), {}, "contract"),
        (tiny_graph(steered=True), steering_graph(layers=LAYERS - 1), {}, "the steering graph has"),
        (tiny_graph(steered=True), steering_graph(layers=LAYERS + 1), {}, "the steering graph has"),
        (tiny_graph(steered=True), steering_graph(rank=RANK - 1), {}, r"vector has the shape \[2\]"),
        (tiny_graph(steered=True), steering_graph(mlp=MLP - 1), {}, r"steering.0 has the shape \[5\]"),
        (tiny_graph(steered=True, mlp="m"), steering_graph(), {}, r"steering.0 has the shape \['m'\]"),
        (tiny_graph(steered=True), steering_graph(), {"rank": RANK + 1}, r"vector has the shape \[3\]"),
        (tiny_graph(steered=True), steering_graph(), {"mlp": MLP + 1}, r"steering.0 has the shape \[6\]"),
    ],
)
def test_graphs_that_do_not_keep_the_steered_contract_are_refused_at_load(tmp_path, graph, steering, manifest, why):
    package = write_package(tmp_path, graph, steering, steering=STEERING_MANIFEST | manifest)
    with pytest.raises(ModelRefused, match=why):
        OnnxDrafter(package)


def test_a_steered_graph_without_steering_in_its_manifest_is_refused(tmp_path):
    with pytest.raises(ModelRefused, match="contract"):
        OnnxDrafter(write_package(tmp_path, tiny_graph(steered=True)))
