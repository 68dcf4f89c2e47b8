"""Tokenizers are known by one hash, and counts of tokens follow a prefix."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.proto.token_counts import TokenCounts
from outrider.proto.tokenizer import shipped_tokenizer, tokenizer_hash


def test_white_space_order_and_padding_do_not_change_the_hash_and_a_token_does() -> None:
    tokenizer = {"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}}, "padding": None}
    same = {"padding": {"pad_id": 3}, "model": {"vocab": {"b": 1, "a": 0}, "type": "WordLevel"}}
    other = {"model": {"type": "WordLevel", "vocab": {"a": 1, "b": 0}}, "padding": None}
    of_tokenizer = tokenizer_hash(json.dumps(tokenizer))
    assert tokenizer_hash(json.dumps(same, indent=3)) == of_tokenizer
    assert tokenizer_hash(json.dumps(other)) != of_tokenizer


def test_a_file_that_drafters_share_is_parsed_once(monkeypatch) -> None:
    tokenizer = json.dumps({"model": {"type": "WordLevel", "vocab": {"shared": 0}}})
    of_tokenizer = tokenizer_hash(tokenizer)
    monkeypatch.setattr(json, "loads", lambda _: pytest.fail("it was parsed again"))
    assert tokenizer_hash(tokenizer) == of_tokenizer
    with pytest.raises(pytest.fail.Exception, match="parsed again"):
        tokenizer_hash(tokenizer + " ")


def test_a_shipped_tokenizer_is_the_one_with_the_hash_that_is_asked_for(tokenizer_file) -> None:
    sha256 = tokenizer_hash(tokenizer_file.read_text(encoding="utf-8"))
    found = shipped_tokenizer(sha256)
    assert found is not None
    assert tokenizer_hash(found.read_text(encoding="utf-8")) == sha256


@pytest.mark.parametrize("unknown", ["", "0" * 64, "A" * 64, "0" * 64 + "\n", "../tokenizer", "../tokenizers/0"])
def test_no_other_hash_leads_to_a_file(unknown) -> None:
    assert shipped_tokenizer(unknown) is None


# --- counts of tokens ---


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
