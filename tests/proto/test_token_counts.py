"""Counts that follow a prefix: as if counted afresh after every change."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outrider.proto.token_counts import TokenCounts

TOKENS = st.integers(0, 9) | st.sampled_from([1023, 1024, 5000])
EVERY = np.array([*range(12), 1022, 1023, 1024, 5000, 5001, 99999])


def counted(prompt_length, prefix):
    prompt, text = prefix[:prompt_length], prefix[prompt_length:]
    return [prompt.count(t) for t in EVERY.tolist()], [text.count(t) for t in EVERY.tolist()]


@given(st.integers(0, 60), st.lists(st.lists(TOKENS, max_size=50) | st.floats(0, 1), max_size=8))
def test_counts_follow_a_prefix_that_grows_and_shrinks(prompt_length, changes):
    counts, prefix = TokenCounts(prompt_length), []
    for change in changes:
        if isinstance(change, float):
            kept = int(change * len(prefix))
            counts.truncate(kept)
            del prefix[kept:]
        else:
            counts.extend(change)
            prefix += change
        assert counts.length == len(prefix)
        assert counts.used.tolist() == sorted(set(prefix))
        assert [counts.in_prompt(EVERY).tolist(), counts.in_text(EVERY).tolist()] == [*counted(prompt_length, prefix)]


def test_truncating_beyond_the_end_keeps_all():
    counts = TokenCounts(1, [4, 4, 4])
    counts.truncate(7)
    assert (counts.length, counts.in_prompt(np.array([4]))[0], counts.in_text(np.array([4]))[0]) == (3, 1, 2)


@given(st.integers(0, 9), st.lists(TOKENS, max_size=20), st.lists(TOKENS, max_size=20))
def test_other_counts_with_more_after_the_same_prefix_leave_the_first_alone(prompt_length, prefix, more):
    counts = TokenCounts(prompt_length, prefix)
    longer = counts.followed_by(more)
    for each, tokens in ((counts, prefix), (longer, prefix + more)):
        assert each.used.tolist() == sorted(set(tokens))
        assert [each.in_prompt(EVERY).tolist(), each.in_text(EVERY).tolist()] == [*counted(prompt_length, tokens)]
