"""The drafter that copies on from what the edge has."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.proposals import ProposalRule
from outrider.drafters.retrieval import PredictionCount, RetrievalDrafter, RetrievalState
from outrider.drafters.suffix_index import SuffixIndex
from outrider.proto.errors import InvalidArgument
from outrider.proto.types import Sampling

TOKENS = st.lists(st.integers(0, 3), max_size=50)
PROMPT = [900, 901]


def words(seed: int, count: int = 400) -> list[int]:
    """Return a document whose words return often, as those of real ones do."""
    draw = random.Random(seed)
    return [min(int(draw.paretovariate(0.7)), 800) for _ in range(count)]


def rule(prompt_length: int = len(PROMPT), temperature: float = 0.0) -> ProposalRule:
    return ProposalRule(Sampling(max_tokens=8, temperature=temperature, seed=5), prompt_length=prompt_length)


def indexed(document: Sequence[int]) -> SuffixIndex:
    return SuffixIndex([np.array(document, dtype=np.int64)])


def state_of(
    documents: Sequence[list[int]] = (), prediction: Sequence[int] = (), prompt: Sequence[int] = PROMPT
) -> RetrievalState:
    sources = [indexed(each) for each in documents]
    state = RetrievalDrafter(lambda: sources, indexed(prediction) if prediction else None).open(rule(len(prompt)))
    state.extend(prompt)
    return state


def hits(state: RetrievalState, text: list[int]) -> list[bool]:
    return [proposal.id == token for proposal, token in zip(state.propose_forced(text), text, strict=True)]


def test_a_prediction_is_proposed_from_the_first_token_on_to_its_end() -> None:
    document = words(1)
    state = state_of(prediction=document)
    assert [draft.id for draft in state.propose(1000)] == document
    assert state.propose(1) == ()


def test_a_document_is_followed_once_three_tokens_match() -> None:
    document = list(range(100, 200))
    found = hits(state_of([document]), document[40:])
    assert found == [False] * 3 + [True] * 57


@pytest.mark.parametrize(
    ("edit", "misses"),
    [
        (lambda text: [*text[:200], 850, *text[201:]], 1),  # a token replaced: the next is right
        (lambda text: [*text[:200], 850, 851, 852, *text[203:]], 3),  # three of them
        (lambda text: [*text[:200], 850, *text[200:]], 2),  # one inserted: taken for a replaced one once
        (lambda text: [*text[:200], *range(850, 870), *text[200:]], 24),  # a block inserted, which ends guessing
        (lambda text: [*text[:200], *text[230:]], 4),  # a block deleted
    ],
)
def test_after_an_edit_the_position_is_found_again_within_few_tokens(edit, misses: int) -> None:
    document = words(2)
    text = edit(document)
    found = hits(state_of(prediction=document), text)
    assert 1 <= found.count(False) <= misses
    assert all(found[:200])
    assert all(found[-150:])


def test_after_an_edit_it_stays_near_although_another_position_has_the_same_words() -> None:
    twin = [*range(300, 320), 7, 8, 9, *range(400, 420)]
    document = [*twin, *range(500, 560), 7, 8, 9, *range(600, 640)]
    text = [*document[:90], 999, *document[91:]]
    assert document.index(7, 30) == 103
    text[102] = 998  # an edit just before the words that stand at two positions
    found = hits(state_of([document], prediction=document), text)
    assert found.count(False) == 2


def test_a_longer_match_elsewhere_wins_over_the_position_it_was_in() -> None:
    first, second = list(range(100, 160)), list(range(200, 260))
    found = hits(state_of([first, second]), [*first[:30], *second[10:40]])
    assert found == [False] * 3 + [True] * 27 + [False] * 3 + [True] * 27


def test_the_prompt_itself_is_a_source_and_an_earlier_one_than_documents() -> None:
    prompt = [*range(100, 140), 7]
    state = state_of([[103, 104, 105, 55, 56]], prompt=[*prompt, 103, 104, 105])
    assert [draft.id for draft in state.propose(3)] == [106, 107, 108]


@pytest.mark.parametrize("ends", [{"stop": (7,)}, {"eos": (7,)}], ids=["stop token", "end of text"])
def test_an_end_is_copied_only_where_min_tokens_let_the_target_end(ends) -> None:
    prompt, drafter = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3], RetrievalDrafter()
    copied = []
    for min_tokens in (0, 3, 4):
        sampling = Sampling(max_tokens=8, min_tokens=min_tokens, stop_tokens=ends.get("stop", ()))
        state = drafter.open(ProposalRule(sampling, prompt_length=len(prompt), eos_tokens=ends.get("eos", ())))
        state.extend(prompt)
        copied.append([draft.id for draft in state.propose(5)])
    assert copied == [[4, 5, 6, 7, 8], [4, 5, 6, 7, 8], [4, 5, 6]]


def test_a_text_of_its_own_words_gets_no_proposals() -> None:
    state = state_of([list(range(100, 200))])
    assert all(draft.id == -1 and math.isnan(draft.confidence) for draft in state.propose_forced(range(300, 340)))


def test_its_confidence_grows_with_the_tokens_that_have_matched() -> None:
    drafts = state_of(prediction=words(3)).propose(60)
    confidence = [draft.confidence for draft in drafts]
    assert confidence == sorted(confidence)
    assert (confidence[0], confidence[-1] > 0.97) == (0.5, True)


@given(TOKENS, TOKENS, TOKENS, st.lists(st.tuples(st.integers(0, 60), TOKENS), max_size=4))
def test_truncated_and_extended_it_proposes_as_if_it_had_never_drafted(
    document: list[int], prediction: list[int], text: list[int], detours: list[tuple[int, list[int]]]
) -> None:
    state = state_of([document], prediction)
    for length, detour in detours:
        state.propose(5)
        state.extend(detour)
        state.truncate(min(1 + length, state.length))
        state.propose_forced(detour)
    state.truncate(0)
    state.extend([*PROMPT, *text])
    untouched = state_of([document], prediction)
    untouched.extend(text)
    assert state.propose(12) == untouched.propose(12)


@given(TOKENS, TOKENS, TOKENS)
def test_proposals_are_the_same_read_token_by_token_and_all_at_once(
    document: list[int], prediction: list[int], text: list[int]
) -> None:
    step_by_step = state_of([document], prediction)
    for position, token in enumerate(text):
        assert step_by_step.length == len(PROMPT) + position
        step_by_step.propose(3)
        step_by_step.truncate(len(PROMPT) + position)
        step_by_step.extend([token])
    at_once = state_of([document], prediction)
    at_once.extend(text)
    assert step_by_step.propose(8) == at_once.propose(8)


@given(TOKENS, TOKENS)
def test_its_scores_are_those_of_its_proposals(document: list[int], text: list[int]) -> None:
    scores = state_of([document]).score(text)
    drafts = state_of([document]).propose_forced(text)
    for token, draft, score in zip(text, drafts, scores.tolist(), strict=True):
        if draft.id == token:
            assert score == pytest.approx(math.log(draft.confidence))
        else:
            others = 1.0 if draft.id < 0 else 1 - draft.confidence
            assert score == pytest.approx(math.log(others / (1 << 16)), rel=1e-5)


def test_it_proposes_the_document_at_any_temperature() -> None:
    document = words(4)
    drafter = RetrievalDrafter(prediction=indexed(document))
    warm, cold = drafter.open(rule(0, temperature=1.0)), drafter.open(rule(0))
    assert warm.propose(50) == cold.propose(50)


def test_another_turn_follows_another_prediction() -> None:
    drafter = RetrievalDrafter(prediction=indexed([1, 2, 3]))
    state = drafter.open(rule(2))
    state.extend(PROMPT)
    assert [draft.id for draft in state.propose(9)] == [1, 2, 3]
    drafter.prediction = indexed([4, 5])
    state.follow(rule(5))
    assert [draft.id for draft in state.propose(9)] == [4, 5]
    drafter.prediction = None
    state.truncate(5)
    state.follow(rule(5))
    assert state.propose(9) == ()


def test_a_long_prompt_is_walked_at_its_end_alone() -> None:
    document = list(range(100, 200))
    prompt = [*document[:50], *[901] * 100, *document[50:60]]
    state = state_of([document], prompt=prompt)
    assert [draft.id for draft in state.propose(4)] == document[60:64]


def test_nothing_can_be_scored_or_cut_off_beyond_the_prefix() -> None:
    state = RetrievalDrafter().open(rule(0))
    with pytest.raises(InvalidArgument, match="nothing can be scored"):
        state.score([1])
    with pytest.raises(InvalidArgument, match="cannot truncate"):
        state.truncate(1)


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        (list(range(100, 140)), 40),
        ([*range(100, 120), 7, *range(121, 140)], 39),
        (list(range(300, 340)), 0),
        ([*range(300, 340)] * 3, 0),  # it repeats itself, which the prediction did not say
        ([*range(100, 140)] * 3, 40),  # no more than the prediction has
        ([], 0),
    ],
)
def test_tokens_of_a_prediction_are_counted_by_text_and_prediction_alone(text: list[int], accepted: int) -> None:
    for pieces in ([text], [[token] for token in text]):
        count = PredictionCount(indexed(range(100, 140)))
        for piece in pieces:
            count.take(piece)
        assert (count.accepted, count.rejected) == (accepted, 40 - accepted)
