"""Before `min_tokens` tokens of text neither EOS nor a stop token has any chance, row by row, and all else is exact.

With `no_repeat_ngram_size` no n-gram of prompt and text comes twice. Enumerated on a vocabulary of four: of every block
of drafts the law of the text, computed from the rows that the sampler draws from, equals the law that plain decoding
has by the documentation. Counts and n-grams that are taken from elsewhere than each row's own position must fail the
same checks.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from documented_law import documented_law
from test_exactness import HASH, PROMPT, VOCAB, Texts, chi_square_p, logits_after, noise_reading, silent

from outrider.cloud.target.distribution import processed_logits
from outrider.cloud.target.sampler import Sampler
from outrider.cloud.target.verification import VerificationInput
from outrider.proto.session.acceptance import accept_drafts
from outrider.proto.session.verifier import Verified, VerifierRules, VerifierSession
from outrider.proto.types import CommittedToken, DraftToken, FinishReason, Open, Sampling, token_ids

EOS, STOP = 2, 3
LENGTH = 4
MIN = 2
LIMITS = {"max_tokens": LENGTH, "min_tokens": MIN}
MIN_TOKENS = {
    "greedy": Sampling(**LIMITS),
    "temperature 1": Sampling(temperature=1.0, **LIMITS),
    "stop token": Sampling(temperature=1.0, stop_tokens=(STOP,), **LIMITS),
    "EOS ignored": Sampling(temperature=1.0, ignore_eos=True, **LIMITS),
    "towards EOS": Sampling(logit_bias=((EOS, 9.0),), stop_tokens=(STOP,), **LIMITS),
    "cut": Sampling(temperature=1.3, top_k=2, top_p=0.9, logit_bias=((EOS, 3.0),), **LIMITS),
    "penalised": Sampling(temperature=1.0, repetition_penalty=1.4, frequency_penalty=0.3, **LIMITS),
    "only ends": Sampling(temperature=1.0, allowed_tokens=(EOS, STOP), stop_tokens=(STOP,), **LIMITS),
    "every token": Sampling(temperature=1.0, min_tokens=LENGTH, max_tokens=LENGTH),
}
NGRAMS = {
    "greedy, pairs": Sampling(max_tokens=LENGTH, no_repeat_ngram_size=2),
    "single tokens": Sampling(temperature=1.0, max_tokens=LENGTH, no_repeat_ngram_size=1),
    "pairs": Sampling(temperature=1.0, max_tokens=LENGTH, no_repeat_ngram_size=2),
    "triples, EOS ignored": Sampling(temperature=1.2, max_tokens=LENGTH, no_repeat_ngram_size=3, ignore_eos=True),
    "of few tokens": Sampling(temperature=1.0, max_tokens=LENGTH, no_repeat_ngram_size=1, allowed_tokens=(0, 1)),
    "penalised and cut": Sampling(
        temperature=1.3, max_tokens=LENGTH, no_repeat_ngram_size=2, top_p=0.9, repetition_penalty=1.4, min_tokens=2
    ),
}
SAMPLINGS = MIN_TOKENS | NGRAMS


# === the law by the documentation ===============================================================================


@cache
def law_after(prefix: tuple[int, ...], sampling: Sampling) -> dict[int, float]:
    """{token: probability} after `prefix`."""
    return documented_law(dict(enumerate(logits_after(prefix))), PROMPT, prefix[len(PROMPT) :], sampling, {EOS})


def ends(text: tuple[int, ...], sampling: Sampling) -> bool:
    """Whether a text is over."""
    return (
        len(text) == sampling.max_tokens
        or (text[-1:] == (EOS,) and not sampling.ignore_eos)
        or (text[-1:] != () and text[-1] in sampling.stop_tokens)
    )


def law_of_text(sampling: Sampling) -> dict[tuple[int, ...], float]:
    """{text: probability} of plain decoding."""
    done, open_texts = {}, {(): 1.0}
    while open_texts:
        longer = {
            (*text, t): p * q for text, p in open_texts.items() for t, q in law_after(PROMPT + text, sampling).items()
        }
        done |= {text: p for text, p in longer.items() if ends(text, sampling)}
        open_texts = {text: p for text, p in longer.items() if text not in done}
    return done


# === the law of the rows that are drawn from, enumerated over every draw =========================================


def as_it_is(session: VerificationInput) -> VerificationInput:
    return session


def counted_from_the_steps_first_row(session: VerificationInput) -> VerificationInput:
    """Wrong: all rows of a step are held to what its first row is held to."""
    held = len(session.transcript) - session.prompt_length < session.sampling.min_tokens
    return replace(session, sampling=replace(session.sampling, min_tokens=LENGTH if held else 0))


def counted_from_the_transcripts_beginning(session: VerificationInput) -> VerificationInput:
    """Wrong: the prompt counts too."""
    return replace(session, prompt_length=0)


def counted_from_the_chains_start(session: VerificationInput) -> VerificationInput:
    """Wrong: the count begins again with every step, as where it is taken from the drafts."""
    return replace(session, prompt_length=len(session.transcript))


def not_counted_at_all(session: VerificationInput) -> VerificationInput:
    """Wrong: `min_tokens` is not known."""
    return replace(session, sampling=replace(session.sampling, min_tokens=0))


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


WRONG_COUNTS = [
    counted_from_the_steps_first_row,
    counted_from_the_transcripts_beginning,
    counted_from_the_chains_start,
    not_counted_at_all,
]
WRONG_NGRAMS = [without_the_drafts_before, without_the_prompt, of_one_token_more, not_at_all]


@cache
def rows_of(text, block, sampling, rule):
    """[k + 1, VOCAB] probabilities of the rows of a step."""
    prefix = PROMPT + text
    logits = torch.tensor([logits_after(prefix + block[:j]) for j in range(len(block) + 1)])
    drafts = tuple(map(DraftToken, block))
    session = rule(VerificationInput(sampling, list(prefix), len(PROMPT), drafts, eos_tokens=frozenset({EOS})))
    scores = processed_logits(logits, session)
    if sampling.temperature == 0:
        return torch.nn.functional.one_hot(scores.argmax(dim=-1), VOCAB).tolist()
    return torch.softmax(scores, -1).tolist()


def law_by_steps(sampling, first, rule=as_it_is):
    """{text: probability} where the first step verifies the drafts `first` and later ones a part of them."""
    done, todo = Counter(), {(): 1.0}
    while todo:
        text = min(todo, key=len)
        weight, block = todo.pop(text), (first[:1] if text else first)[: LENGTH - len(text) - 1]
        rows = rows_of(text, block, sampling, rule)
        for draws in itertools.product(range(VOCAB), repeat=len(block) + 1):
            chance = weight * math.prod(row[t] for row, t in zip(rows, draws, strict=True))
            if not chance:
                continue
            committed, _, finish = accept_drafts(
                tuple(map(DraftToken, block)),
                tuple(map(CommittedToken, draws)),
                generated=len(text),
                sampling=sampling,
                eos_tokens=frozenset({EOS}),
            )
            longer = text + token_ids(committed)
            if finish is None:
                todo[longer] = todo.get(longer, 0.0) + chance
            else:
                done[longer] += chance
    return done


BLOCKS = [block for n in range(LENGTH) for block in itertools.product((0, EOS), repeat=n)]


def exact_for_every_block(sampling, rule=as_it_is):
    wanted = law_of_text(sampling)
    return all(law_by_steps(sampling, block, rule) == pytest.approx(wanted, abs=2e-6) for block in BLOCKS)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_enumerated_law_is_that_of_plain_decoding_for_every_block_of_drafts(name):
    assert exact_for_every_block(SAMPLINGS[name])


@pytest.mark.parametrize(
    ("wrong", "name"),
    [*itertools.product(WRONG_COUNTS, ("temperature 1", "stop token")), *((wrong, "pairs") for wrong in WRONG_NGRAMS)],
)
def test_the_enumeration_rejects_what_is_taken_from_anywhere_else(wrong, name):
    assert not exact_for_every_block(SAMPLINGS[name], wrong)


def test_no_text_of_the_law_ends_early_and_some_would_without_the_rule():
    for name in ("greedy", "temperature 1", "stop token", "towards EOS", "cut"):
        assert min(map(len, law_of_text(SAMPLINGS[name]))) > MIN
    without = law_of_text(replace(SAMPLINGS["stop token"], min_tokens=0))
    assert sum(p for text, p in without.items() if len(text) <= MIN) > 0.3
    assert set(map(len, law_of_text(SAMPLINGS["every token"]))) == {LENGTH}


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


# === the same through session machine and sampler ===============================================================


def decoded(sampling, seeds, adversary, rule=as_it_is, resumed=lambda seed: ()):
    """The text of each seed, from a resume on where `resumed` has its first tokens."""
    texts = Texts(sampling, Sampler(torch.device("cpu")), LENGTH, eos=frozenset({EOS}), change=rule)
    return texts.decode([*seeds], [adversary] * len(seeds), [resumed(seed) for seed in seeds])


def fixed(block):
    return lambda seed, step, transcript: [block] if step == 0 else [block[:1]]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_text_of_every_seed_is_the_same_with_any_drafts_and_through_a_resume(name):
    sampling, seeds = SAMPLINGS[name], range(5)
    wanted = decoded(sampling, seeds, silent)
    for block in ((0, 1, 0), (EOS, 0), (0, EOS, 1), (1, 1, EOS), (STOP, STOP)):
        assert decoded(sampling, seeds, fixed(block)) == wanted
    for kept in (1, 2, 3):
        begun = {seed: text[:kept] for seed, text in zip(seeds, wanted, strict=True) if len(text) > kept}
        resumed = decoded(sampling, begun, fixed((0, EOS)), resumed=begun.__getitem__)
        assert resumed == [text for text in wanted if len(text) > kept]


@pytest.mark.parametrize(
    ("wrong", "name"),
    [  # the sampler looks the drafts up
        *((wrong, "stop token") for wrong in WRONG_COUNTS),
        *((wrong, "single tokens") for wrong in WRONG_NGRAMS[1:]),
    ],
)
def test_what_is_taken_from_anywhere_else_does_not_give_the_same_text(wrong, name):
    sampling, seeds = SAMPLINGS[name], range(60)
    assert decoded(sampling, seeds, fixed((0, 1, 0)), wrong) != decoded(sampling, seeds, silent)


@pytest.mark.parametrize("name", ["stop token", "cut", "pairs"])
def test_texts_follow_the_law_though_drafts_read_the_noise(name):
    sampling = SAMPLINGS[name]
    texts = decoded(sampling, range(10_000, 10_400), noise_reading)
    assert chi_square_p(Counter(texts), law_of_text(sampling), len(texts)) > 1e-4
    plain = law_of_text(replace(sampling, min_tokens=0, no_repeat_ngram_size=0))
    assert chi_square_p(Counter(texts), plain, len(texts)) < 1e-4, "the check tells the two laws apart"


# === rows of a grammar, of a large vocabulary, and what is reported ==============================================


def test_a_grammar_that_leaves_only_the_end_keeps_it_and_no_row_is_all_forbidden():
    logits = torch.zeros(4, VOCAB)
    allowed = np.array([[1, 1, 1, 0], [0, 0, 1, 0], [0, 0, 1, 1], [0, 0, 1, 0]], dtype=bool)
    sampling = Sampling(temperature=1.0, min_tokens=3, stop_tokens=(STOP,))
    drafts = tuple(map(DraftToken, (0, 0, 0)))
    session = VerificationInput(sampling, [1, 0], 1, drafts, allowed, eos_tokens=frozenset({EOS}))
    assert session.rows_before_end == 2, "one token of text was there before the first row"
    kept = processed_logits(logits, session).isfinite().tolist()
    assert kept == [[True, True, False, False], [False, False, True, False], *allowed[2:].tolist()]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_large_rows_hold_the_ends_back_and_report_the_log_probability_of_the_row(temperature):
    vocab, eos = 4000, frozenset({7, 9})
    for seed in range(12):
        logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(seed)) * 2
        logits[:, [7, 9, 11]] += 9.0  # the ends would win almost every row
        sampling = Sampling(temperature, seed, min_tokens=3, stop_tokens=(11,))
        drafts = tuple(map(DraftToken, (40, 41)))
        session = VerificationInput(sampling, [1, 2, 3], 1, drafts, logprobs=True, eos_tokens=eos)
        [got] = Sampler(torch.device("cpu")).sample(logits, [session])
        logp = torch.log_softmax(processed_logits(logits, session), -1)
        assert got.tokens[0].id not in (7, 9, 11), "two tokens of text, three wanted"
        assert session.rows_before_end == 1
        for j, token in enumerate(got.tokens):
            assert token.logp == pytest.approx(logp[j, token.id].item(), abs=1e-5)
        own = torch.log_softmax(logits[0].double(), -1)[got.tokens[0].id].item()
        assert got.tokens[0].logprob == pytest.approx(own, abs=1e-5), "the model's own, as with any other setting"


def test_an_end_token_beyond_the_vocabulary_is_no_matter():
    session = VerificationInput(Sampling(min_tokens=1), [1], 1, (), eos_tokens=frozenset({99}))
    assert processed_logits(torch.zeros(1, VOCAB), session).isfinite().all()


def test_rows_cannot_be_processed_without_the_targets_end_tokens():
    with pytest.raises(ValueError, match="eos_tokens"):
        VerificationInput(Sampling(min_tokens=1), [1], 1, ())


def test_a_session_whose_context_ends_first_ends_there_by_its_length():
    sampling = Sampling(max_tokens=60, min_tokens=60)
    rules = VerifierRules("v", "m", HASH, VOCAB, 8, frozenset({EOS}), 8)
    session = VerifierSession(Open("m", HASH, PROMPT, sampling, "s"), rules, 0.0)
    assert (session.sampling.max_tokens, session.sampling.min_tokens) == (5, 5)
    for _ in range(5):
        commit = session.on_verified(Verified((), (CommittedToken(0),)), 0.0)
    assert commit.finish is FinishReason.LENGTH


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
