"""The ONNX drafter on a tiny graph whose every logit can be computed by hand, and on the shipped one."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_drafter import (
    CANDIDATES,
    CONTEXT,
    GREEDY,
    HEAD_DIM,
    HEADS,
    LAYERS,
    TABLE,
    VOCAB,
    WARM,
    entries,
    greedy_by_hand,
    log_q_after,
    some_tokens,
    tiny_graph,
    write_package,
)

from outrider.drafters import ProposalRule, find_package
from outrider.drafters.graph_file import read_graph_file
from outrider.drafters.onnx import FIRST_CAPACITY, PREFILL_TOKENS, OnnxDrafter
from outrider.proto.errors import Internal, InvalidArgument, ModelRefused, UnknownToken
from outrider.proto.noise import gumbel
from outrider.proto.types import Sampling, token_ids


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    return OnnxDrafter(write_package(tmp_path_factory.mktemp("tiny"), tiny_graph()))


def test_greedy_proposals_are_the_models_own_text_with_its_probabilities(drafter):
    state = drafter.open(GREEDY)
    state.extend((3, 1, 4))
    proposal = state.propose(12)
    assert token_ids(proposal) == greedy_by_hand((3, 1, 4), 12)
    prefix = [3, 1, 4]
    for token, q, *_ in proposal:
        assert q == pytest.approx(math.exp(log_q_after(prefix)[token]), rel=1e-4)
        prefix.append(token)
    assert state.length == 15


def test_proposals_at_a_temperature_share_the_verifiers_noise(drafter):
    state = drafter.open(WARM)
    state.extend((3, 1, 4))
    prefix = [3, 1, 4]
    for token in token_ids(state.propose(40)):
        candidates = np.argsort(-log_q_after(prefix))[:CANDIDATES]
        noisy = log_q_after(prefix)[candidates] + gumbel(11, len(prefix), candidates)
        assert token == candidates[np.argmax(noisy)]
        prefix.append(token)


def test_a_greedy_session_asks_for_few_candidates_and_others_for_all_useful_ones(drafter):
    assert drafter.open(ProposalRule(Sampling(), runners_up=2))._candidate_tokens.shape == (3,)
    for sampling in (Sampling(temperature=0.5), Sampling(repetition_penalty=1.2), Sampling(allowed_tokens=(1,))):
        assert drafter.open(ProposalRule(sampling))._candidate_tokens.shape == (CANDIDATES,)


@pytest.mark.parametrize("length", [1, 2, PREFILL_TOKENS, PREFILL_TOKENS + 1, FIRST_CAPACITY + 3, 2 * FIRST_CAPACITY])
def test_a_prompt_in_uneven_pieces_equals_the_whole_prompt(drafter, length):
    prompt = some_tokens(length)
    whole, pieces = drafter.open(WARM), drafter.open(WARM)
    whole.extend(prompt)
    for start in range(0, length, 37):
        pieces.extend(prompt[start : start + 37])
        pieces.propose(start % 3)
        pieces.truncate(min(start + 37, length))
    assert pieces.propose(8) == whole.propose(8)
    greedy = drafter.open(GREEDY)
    greedy.extend(prompt)
    assert token_ids(greedy.propose(3)) == greedy_by_hand(prompt, 3)


@pytest.mark.parametrize(("before", "scored"), [(1, 1), (3, 40), (300, 5), (129, 16), (128, 17), (5, 0)])
def test_scores_are_the_plain_log_softmax(drafter, before, scored):
    tokens = some_tokens(before + scored)
    state = drafter.open(WARM)
    state.extend(tokens[:before])
    log_q = state.score(tokens[before:])
    assert log_q.dtype == np.float32
    assert log_q.shape == (scored,)
    by_hand = [log_q_after(tokens[:i])[tokens[i]] for i in range(before, before + scored)]
    np.testing.assert_allclose(log_q, by_hand, atol=2e-4)
    assert state.length == before + scored
    fresh = drafter.open(WARM)
    fresh.extend(tokens)
    assert state.propose(4) == fresh.propose(4)


step = st.one_of(
    st.tuples(st.just("propose"), st.integers(0, 9)),
    st.tuples(st.just("extend"), st.lists(st.integers(0, VOCAB - 1), max_size=9)),
    st.tuples(st.just("score"), st.lists(st.integers(0, VOCAB - 1), max_size=20)),
    st.tuples(st.just("truncate"), st.floats(0, 1)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(step, max_size=12), st.integers(1, 30), st.lists(st.integers(0, VOCAB - 1), max_size=5))
def test_truncate_then_extend_equals_never_having_drafted(drafter, steps, kept, text):
    prompt = some_tokens(30)
    state = drafter.open(WARM)
    state.extend(prompt)
    for verb, argument in steps:
        if verb == "truncate":
            argument = 30 + int(argument * (state.length - 30))
        getattr(state, verb)(argument)
    state.truncate(kept)
    state.extend(text)
    fresh = drafter.open(WARM)
    fresh.extend((*prompt[:kept], *text))
    assert state.length == fresh.length
    assert state.propose(6) == fresh.propose(6)
    np.testing.assert_array_equal(state.score((1, 2, 3)), fresh.score((1, 2, 3)))


def test_a_text_rolled_back_to_nothing_starts_again(drafter):
    state = drafter.open(GREEDY)
    assert token_ids(state.propose(3)) == ()
    state.extend((1, 2, 3))
    state.propose(2)
    state.truncate(0)
    assert token_ids(state.propose(3)) == ()
    with pytest.raises(InvalidArgument, match="empty prefix"):
        state.score((1,))
    state.extend((7,))
    assert token_ids(state.propose(3)) == greedy_by_hand((7,), 3)


def test_at_the_end_of_the_context_it_proposes_nothing_and_recovers(drafter):
    prompt = some_tokens(CONTEXT - 3)
    state = drafter.open(GREEDY)
    state.extend(prompt)
    proposal = state.propose(10)
    assert token_ids(proposal) == greedy_by_hand(prompt, 4)  # positions up to CONTEXT are answered
    assert token_ids(state.propose(1)) == ()
    state.extend(some_tokens(50))
    assert token_ids(state.propose(1)) == ()
    np.testing.assert_allclose(state.score((1, 2)), -math.log(VOCAB), rtol=1e-6)
    state.truncate(len(prompt))
    log_q = state.score(some_tokens(6, seed=8))
    np.testing.assert_allclose(log_q[-2:], -math.log(VOCAB), rtol=1e-6)
    assert log_q[0] == pytest.approx(log_q_after(prompt)[some_tokens(6, seed=8)[0]], abs=2e-4)
    state.truncate(len(prompt))
    assert token_ids(state.propose(2)) == token_ids(proposal[:2])


def test_an_allowed_set_without_a_candidate_ends_the_proposal_and_keeps_the_prefix(drafter):
    worst = int(np.argmin(log_q_after((3, 1, 4))))
    state = drafter.open(ProposalRule(Sampling(allowed_tokens=(worst,))))
    state.extend((3, 1, 4))
    assert token_ids(state.propose(2)) == ()
    assert token_ids(state.propose(2)) == ()
    assert state.score((5,))[0] == pytest.approx(log_q_after((3, 1, 4))[5], abs=2e-4)
    assert state.length == 4


def test_the_cache_is_written_in_place_and_only_rebuilt_to_grow(drafter):
    state = drafter.open(GREEDY)
    state.extend(some_tokens(20))
    before = state._cache
    state.propose(30)
    state.truncate(10)
    state.propose(30)
    assert state._cache is before
    factors = (np.arange(20) % 5 + 1)[:, None]
    expected = (TABLE[list(some_tokens(20))] * factors)[:10]
    np.testing.assert_array_equal(entries(before, 10), expected)
    state.extend(some_tokens(FIRST_CAPACITY))
    state.propose(1)
    assert state._cache is not before
    np.testing.assert_array_equal(entries(state._cache, 10), expected)
    state.close()
    assert state._cache.size == 0
    assert token_ids(state.propose(1)) == ()


def test_token_ids_outside_the_vocabulary_are_refused(drafter):
    state = drafter.open(GREEDY)
    for wrong in (-1, VOCAB):
        with pytest.raises(UnknownToken, match=f"no token {wrong}"):
            state.extend((1, wrong))
    assert state.length == 0


def test_a_run_that_fails_is_an_outrider_error_and_names_no_foreign_type(tmp_path):
    drafter = OnnxDrafter(write_package(tmp_path, tiny_graph(breaks_at=10)))
    state = drafter.open(GREEDY)
    state.extend((1, 2, 3))
    assert len(state.propose(7)) == 7
    with pytest.raises(Internal, match="running a drafter"):
        state.propose(5)
    state.truncate(3)
    assert token_ids(state.propose(2)) == greedy_by_hand((1, 2, 3), 2)


def test_a_graph_that_breaks_the_contract_is_refused_at_load(tmp_path):
    with pytest.raises(ModelRefused, match="tiny"):
        OnnxDrafter(write_package(tmp_path, b"not a graph"))
    with pytest.raises(ModelRefused, match="contract"):
        OnnxDrafter(write_package(tmp_path, tiny_graph(logits_name="opinions")))
    cache = {
        "dtype": "float32",
        "layout": "[1, kv_head, position, head_dim]",
        "layers": LAYERS,
        "kv_heads": HEADS,
        "head_dim": HEAD_DIM,
    }
    with pytest.raises(ModelRefused, match="contract"):
        OnnxDrafter(write_package(tmp_path, tiny_graph(), cache=cache | {"layers": LAYERS + 1}))
    for wrong in ({"vocab_size": VOCAB + 1}, {"cache": cache | {"head_dim": HEAD_DIM + 1}}):
        with pytest.raises(ModelRefused, match="tiny does not run as its manifest says"):
            OnnxDrafter(write_package(tmp_path, tiny_graph(), **wrong))


def test_weights_outside_the_checked_file_do_not_load_though_they_are_there(tmp_path):
    model = tiny_graph()
    onnx.save_model(model, tmp_path / "m", save_as_external_data=True, location="weights.bin", size_threshold=1000)
    onnxruntime.InferenceSession(str(tmp_path / "m"))  # which would take them
    package = write_package(tmp_path, (tmp_path / "m").read_bytes())
    assert (tmp_path / "weights.bin").is_file()
    with pytest.raises(
        ModelRefused, match=r"drafter tiny: model\.onnx keeps 'table' in weights\.bin, which no hash covers"
    ):
        OnnxDrafter(package)


def constant(model, tensor):
    node = onnx.helper.make_node("Constant", [], ["unused"], value=tensor)
    model.graph.node.insert(0, node)


def branch(model, tensor):
    inner = onnx.helper.make_graph([], "inner", [], [], [tensor])
    model.graph.node[0].attribute.append(onnx.helper.make_attribute("body", inner))


def function(model, tensor):
    node = onnx.helper.make_node("Constant", [], ["out"], value=tensor)
    model.functions.append(onnx.helper.make_function("custom", "F", [], ["out"], [node], []))


def sparse(model, tensor):
    indices = onnx.helper.make_tensor("i", onnx.TensorProto.INT64, [1], [0])
    model.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(tensor, indices, [4]))


@pytest.mark.parametrize("hide", [constant, branch, function, sparse])
def test_no_corner_of_a_graph_may_point_to_another_file(tmp_path, hide):
    tensor = onnx.numpy_helper.from_array(np.zeros(1, dtype=np.float32), "hidden")
    inside, outside = tiny_graph(), tiny_graph()
    hide(inside, tensor)
    (tmp_path / "inside.onnx").write_bytes(inside.SerializeToString())
    assert read_graph_file(tmp_path / "inside.onnx", "d").graph.initializer[0].name == "table"
    onnx.external_data_helper.set_external_data(tensor, location="../elsewhere.bin")
    tensor.ClearField("raw_data")
    hide(outside, tensor)
    (tmp_path / "outside.onnx").write_bytes(outside.SerializeToString())
    with pytest.raises(ModelRefused, match=r"'hidden' in \.\./elsewhere\.bin"):
        read_graph_file(tmp_path / "outside.onnx", "d")


def test_the_shipped_drafter_in_uneven_pieces_agrees_with_the_whole_prompt():
    package = find_package("general")
    drafter = OnnxDrafter(package)
    prompt = some_tokens(300, vocab=package.vocab_size)
    whole, pieces = drafter.open(GREEDY), drafter.open(GREEDY)
    whole.extend(prompt)
    for start in range(0, 300, 41):
        pieces.extend(prompt[start : start + 41])
        pieces.propose(start % 4)
        pieces.truncate(min(start + 41, 300))
    expected, got = whole.propose(12), pieces.propose(12)
    whole.truncate(300)
    pieces.truncate(300)
    scores, scores_in_pieces = whole.score(token_ids(expected)), pieces.score(token_ids(expected))
    if package.precision == "float32":
        assert token_ids(got) == token_ids(expected)
        confidence = [draft.confidence for draft in expected]
        np.testing.assert_allclose([draft.confidence for draft in got], confidence, rtol=2e-3)
        np.testing.assert_allclose(np.exp(scores_in_pieces), confidence, rtol=2e-3)
    else:  # activations are quantised by the run, so what shares a run moves every number a little
        assert got[0].id == expected[0].id
        assert float(np.abs(scores - scores_in_pieces).mean()) < 0.1
