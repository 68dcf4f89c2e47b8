"""The suffix index against a search of every position."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.suffix_index import LONGEST, POSITIONS_READ, Match, SuffixIndex

DOCUMENTS = st.lists(st.lists(st.integers(0, 2), max_size=60), max_size=4)
TEXT = st.lists(st.integers(0, 2), max_size=45)


def index_of(documents: list[list[int]]) -> SuffixIndex:
    return SuffixIndex([np.array(document, dtype=np.int64) for document in documents])


def brute_force(documents: list[list[int]], text: list[int], min_length: int) -> Match | None:
    """Compare the text with every position, newest first."""
    positions, offset = [], 0
    for document in documents:
        for at in range(len(document)):
            limit = min(at, len(text), LONGEST)
            run = next((i for i in range(limit) if document[at - 1 - i] != text[-1 - i]), limit)
            positions.append((offset + at, run, document[at]))
        offset += len(document) + 1
    longest = max((run for _, run, _ in positions), default=-1)
    if longest < min_length:
        return None
    best = [(at, token) for at, run, token in reversed(positions) if run == longest][:POSITIONS_READ]
    counts = Counter(token for _, token in best)
    token = max(counts, key=counts.__getitem__)
    return Match(next(at for at, found in best if found == token), longest, counts[token] / len(best))


@given(DOCUMENTS, TEXT, st.integers(1, 4))
def test_it_finds_what_a_comparison_with_every_position_finds(
    documents: list[list[int]], text: list[int], min_length: int
) -> None:
    assert index_of(documents).longest(text, min_length) == brute_force(documents, text, min_length)


@given(DOCUMENTS, st.data())
def test_a_text_out_of_a_document_is_found_where_it_stands(documents: list[list[int]], data: st.DataObject) -> None:
    document = data.draw(st.sampled_from([each for each in documents if len(each) > 1] or [[0, 1]]))
    end = data.draw(st.integers(1, len(document) - 1))
    match = index_of([*documents, document]).longest(document[:end], 1)
    assert match is not None
    assert match.length >= min(end, LONGEST)


def test_no_match_crosses_from_one_document_into_the_next() -> None:
    index = index_of([[1, 2, 3], [4, 5, 6]])
    assert index.longest([2, 3], 1) is None  # the document ends there
    assert index.longest([3, 4], 2) is None
    assert index.longest([3, 4], 1) == Match(position=5, length=1, share=1.0)


def test_of_equal_matches_the_commonest_continuation_wins_and_then_the_newest() -> None:
    assert index_of([[1, 2, 7], [1, 2, 8], [1, 2, 7], [1, 2, 9]]).longest([1, 2], 2) == Match(10, 2, 0.5)
    assert index_of([[1, 2, 7], [1, 2, 8]]).longest([1, 2], 2) == Match(6, 2, 0.5)


@pytest.mark.parametrize("documents", [[], [[]], [[], [5]]])
def test_an_index_of_nothing_finds_nothing(documents: list[list[int]]) -> None:
    assert index_of(documents).longest([5], 1) is None
    assert index_of(documents).longest([], 1) is None
