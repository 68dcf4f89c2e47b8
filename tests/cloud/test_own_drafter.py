"""Whether a verifier drafts beside its target, and with what."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from outrider.cloud.serving.local_source import local_source, spare_cores
from outrider.cloud.serving.own_drafter import load_own_drafter
from outrider.cloud.target.backend import TargetFacts
from outrider.cloud.verifier_config import VerifierConfig
from outrider.drafters import find_package
from outrider.proto.errors import ConfigError, NotFound, TokenizerMismatch

PACKAGE = find_package("general")
FACTS = TargetFacts(
    tokenizer_json="",
    tokenizer_sha256=PACKAGE.tokenizer_sha256,
    vocab_size=PACKAGE.vocab_size,
    context_length=512,
    eos_tokens=frozenset({0}),
    hidden_size=8,
    num_layers=1,
    device=torch.device("cpu"),
)
OTHERS = replace(FACTS, tokenizer_sha256="0" * 64)


def test_the_embedded_drafter_for_any_subject_is_taken_by_default() -> None:
    own = load_own_drafter("", FACTS)
    assert own.name == f"general@{PACKAGE.version}"
    assert own.position_bytes > 0
    smol = find_package("smol")
    facts = replace(FACTS, tokenizer_sha256=smol.tokenizer_sha256, vocab_size=smol.vocab_size)
    assert load_own_drafter("", facts).name == f"smol@{smol.version}", "another target has its own"
    assert load_own_drafter("ngram", OTHERS).name.startswith("ngram@")


def test_a_drafter_for_another_tokenizer_or_none_is_refused() -> None:
    with pytest.raises(TokenizerMismatch, match="general"):
        load_own_drafter("general", OTHERS)
    with pytest.raises(NotFound):
        load_own_drafter("/nowhere", FACTS)


def test_auto_drafts_where_there_are_a_drafter_and_a_core(monkeypatch) -> None:
    config = VerifierConfig()
    assert local_source(config, FACTS) is None, "no core is left"
    monkeypatch.setattr("outrider.cloud.serving.local_source.spare_cores", lambda config, target: 1)
    assert local_source(config, OTHERS) is None
    source = local_source(config, FACTS)
    source.stop()
    assert local_source(replace(config, draft_here="off"), FACTS) is None


def test_auto_does_without_a_named_drafter_of_another_tokenizer_and_says_so(monkeypatch, caplog) -> None:
    monkeypatch.setattr("outrider.cloud.serving.local_source.spare_cores", lambda config, target: 1)
    for named, level in (("", logging.INFO), ("general", logging.WARNING)):
        with caplog.at_level(logging.INFO, "outrider.cloud"):
            assert local_source(VerifierConfig(draft_with=named), OTHERS) is None
        assert caplog.records[-1].levelno == level
        assert "'general' was made for another tokenizer, and only edges draft by text" in caplog.messages[-1]


def test_on_drafts_without_a_core_and_refuses_where_there_is_no_drafter() -> None:
    source = local_source(VerifierConfig(draft_here="on"), FACTS)
    source.stop()
    with pytest.raises(ConfigError, match=r"draft_here.*--draft-with"):
        local_source(VerifierConfig(draft_here="on"), OTHERS)


def test_threads_of_the_target_leave_the_other_cores(monkeypatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(6)))
    assert spare_cores(VerifierConfig(threads=4), FACTS) == 2
    assert spare_cores(VerifierConfig(threads=9), FACTS) == 0
    on_gpu = replace(FACTS, device=torch.device("cuda"))
    assert spare_cores(VerifierConfig(threads=4), on_gpu) == 5
