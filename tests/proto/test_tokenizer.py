"""Tokenizers are known by one hash, and the shipped ones are found by it."""

from __future__ import annotations

import json

import pytest

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
