"""With `no_repeat_ngram_size` no n-gram of prompt and text comes twice, row by row, and all else is exact.

Enumerated on a vocabulary of four as for `min_tokens`; n-grams looked for anywhere but before each row's own position
must fail the same checks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_exactness import PROMPT, VOCAB
from test_min_tokens import (
    LENGTH,
    Texts,
    check_any_drafts_and_a_resume,
    check_the_law,
    exact_for_every_block,
    fixed,
    law_of_text,
    silent,
)

from outrider.cloud.target.distribution import VerificationInput, processed_logits
from outrider.cloud.target.sampler import Sampler
from outrider.proto.types import DraftToken, Sampling

SAMPLINGS = {
    "greedy, pairs": Sampling(max_tokens=LENGTH, no_repeat_ngram_size=2),
    "single tokens": Sampling(temperature=1.0, max_tokens=LENGTH, no_repeat_ngram_size=1),
    "pairs": Sampling(temperature=1.0, max_tokens=LENGTH, no_repeat_ngram_size=2),
    "triples, EOS ignored": Sampling(temperature=1.2, max_tokens=LENGTH, no_repeat_ngram_size=3, ignore_eos=True),
    "of few tokens": Sampling(temperature=1.0, max_tokens=LENGTH, no_repeat_ngram_size=1, allowed_tokens=(0, 1)),
    "penalised and cut": Sampling(
        temperature=1.3, max_tokens=LENGTH, no_repeat_ngram_size=2, top_p=0.9, repetition_penalty=1.4, min_tokens=2
    ),
}


def without_the_drafts_before(session: VerificationInput) -> VerificationInput:
    """Wrong: a row does not see the drafts of its own step."""
    strange = tuple(draft._replace(id=VOCAB + at) for at, draft in enumerate(session.block))
    return replace(session, block=strange)


def without_the_prompt(session: VerificationInput) -> VerificationInput:
    """Wrong: what the prompt says may be said once more."""
    hidden = [VOCAB + 9 + at for at in range(session.prompt_length)]
    return replace(session, transcript=[*hidden, *session.transcript[session.prompt_length :]])


def of_one_token_more(session: VerificationInput) -> VerificationInput:
    """Wrong: longer n-grams are looked for."""
    longer = session.sampling.no_repeat_ngram_size + 1
    return replace(session, sampling=replace(session.sampling, no_repeat_ngram_size=longer))


def not_at_all(session: VerificationInput) -> VerificationInput:
    """Wrong: the setting is not known."""
    return replace(session, sampling=replace(session.sampling, no_repeat_ngram_size=0))


WRONG = [without_the_drafts_before, without_the_prompt, of_one_token_more, not_at_all]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_enumerated_law_is_that_of_plain_decoding_for_every_block_of_drafts(name):
    assert exact_for_every_block(SAMPLINGS[name])


@pytest.mark.parametrize("wrong", WRONG)
def test_the_enumeration_rejects_ngrams_from_anywhere_else(wrong):
    assert not exact_for_every_block(SAMPLINGS["pairs"], wrong)


@pytest.mark.parametrize("name", ["single tokens", "pairs"])
def test_no_text_of_the_law_repeats_and_some_would_without_the_rule(name):
    def repeats(text: tuple[int, ...], n: int) -> bool:
        whole = PROMPT + text
        grams = [whole[at : at + n] for at in range(len(whole) - n + 1)]
        return any(grams.index(gram) < at for at, gram in enumerate(grams) if at + n > len(PROMPT))

    sampling = SAMPLINGS[name]
    n = sampling.no_repeat_ngram_size
    assert not any(repeats(text, n) for text in law_of_text(sampling) if len(set(PROMPT + text[:-1])) < VOCAB)
    without = law_of_text(replace(sampling, no_repeat_ngram_size=0))
    assert sum(p for text, p in without.items() if repeats(text, n)) > 0.2


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_text_of_every_seed_is_the_same_with_any_drafts_and_through_a_resume(name):
    check_any_drafts_and_a_resume(SAMPLINGS[name])


@pytest.mark.parametrize("wrong", WRONG[1:])  # the sampler looks the drafts up
def test_ngrams_from_anywhere_else_do_not_give_the_same_text(wrong):
    sampling, seeds = SAMPLINGS["single tokens"], range(60)
    right = Texts(sampling).decode(seeds, silent)
    assert Texts(sampling, wrong).decode(seeds, fixed((0, 1, 0))) != right


def test_texts_follow_the_law_though_drafts_read_the_noise():
    check_the_law(SAMPLINGS["pairs"], replace(SAMPLINGS["pairs"], no_repeat_ngram_size=0))


def test_a_row_where_nothing_else_may_come_keeps_what_repeats():
    sampling = Sampling(temperature=1.0, no_repeat_ngram_size=1)
    allowed = np.array([[1, 1, 0, 0], [1, 1, 0, 1]], dtype=bool)
    session = VerificationInput(sampling, [0, 1], 2, (DraftToken(0),), allowed)
    kept = processed_logits(torch.zeros(2, VOCAB), session).isfinite().tolist()
    assert kept == [[True, True, False, False], [False, False, False, True]]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_large_rows_forbid_the_same_tokens_by_the_short_list(temperature):
    prompt = [5, 6, 7, 8, 5, 6]
    for seed in range(12):
        logits = torch.randn(2, 4000, generator=torch.Generator().manual_seed(seed))
        logits[:, 7] += 40.0  # it would come anyway
        sampling = Sampling(temperature, seed, no_repeat_ngram_size=3)
        [got] = Sampler(torch.device("cpu")).sample(
            logits, [VerificationInput(sampling, prompt, len(prompt), (DraftToken(9),))]
        )
        assert got.tokens[0].id != 7, "5, 6, 7 was there"
        assert got.tokens[1].id == 7, "6, 9, 7 was not"
