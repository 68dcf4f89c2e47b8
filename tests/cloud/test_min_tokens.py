"""Before `min_tokens` tokens of text neither EOS nor a stop token has any chance, row by row, and all else is exact.

Enumerated on a vocabulary of four: of every block of drafts the law of the text, computed from the rows that the
sampler draws from, equals the law that plain decoding has by the documentation. Counts that are taken from elsewhere
than each row's own position must fail the same checks.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from documented_law import documented_law
from test_exactness import HASH, PROMPT, VOCAB, chi_square_p, logits_after, noise_reading

from outrider.cloud.target.distribution import VerificationInput, processed_logits
from outrider.cloud.target.sampler import Sampler
from outrider.proto.session.acceptance import accept_drafts
from outrider.proto.session.verifier import Verified, VerifierRules, VerifierSession
from outrider.proto.types import CommittedToken, Draft, DraftToken, FinishReason, Open, Sampling, token_ids

EOS, STOP = 2, 3
LENGTH = 4
MIN = 2
LIMITS = {"max_tokens": LENGTH, "min_tokens": MIN}
SAMPLINGS = {
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
DRAWN = {name: sampling for name, sampling in SAMPLINGS.items() if sampling.temperature > 0}


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


WRONG = [
    counted_from_the_steps_first_row,
    counted_from_the_transcripts_beginning,
    counted_from_the_chains_start,
    not_counted_at_all,
]


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


@pytest.mark.parametrize("name", ["temperature 1", "stop token"])
@pytest.mark.parametrize("wrong", WRONG)
def test_the_enumeration_rejects_a_count_from_anywhere_else(wrong, name):
    assert not exact_for_every_block(SAMPLINGS[name], wrong)


def test_no_text_of_the_law_ends_early_and_some_would_without_the_rule():
    for name in ("greedy", "temperature 1", "stop token", "towards EOS", "cut"):
        assert min(map(len, law_of_text(SAMPLINGS[name]))) > MIN
    without = law_of_text(replace(SAMPLINGS["stop token"], min_tokens=0))
    assert sum(p for text, p in without.items() if len(text) <= MIN) > 0.3
    assert set(map(len, law_of_text(SAMPLINGS["every token"]))) == {LENGTH}


# === the same through session machine and sampler ===============================================================


@dataclass
class Texts:
    """Decodes a text for each (seed, adversary), from a resume on where `resumed` has its first tokens."""

    sampling: Sampling
    rule: object = as_it_is

    def decode(self, seeds, adversary, resumed=lambda seed: ()):
        sampler = Sampler(torch.device("cpu"))
        texts = []
        for seed in seeds:
            frame = Open("m", HASH, PROMPT, replace(self.sampling, seed=seed), "s", committed=resumed(seed))
            session = VerifierSession(frame, VerifierRules("v", "m", HASH, VOCAB, 64, frozenset({EOS}), 8), 0.0)
            for step in itertools.count():
                start = len(session.transcript)
                for tokens in adversary(seed, step, session.transcript):
                    session.on_draft(Draft(step, start, tuple(map(DraftToken, tokens))), float(step))
                    start += len(tokens)
                block = session.block()
                prompt, eos = session.prompt_length, session.eos_tokens
                verified = VerificationInput(session.sampling, session.transcript, prompt, block, eos_tokens=eos)
                rows = [logits_after((*session.transcript, *token_ids(block[:j]))) for j in range(len(block) + 1)]
                [sampled] = sampler.sample(torch.tensor(rows), [self.rule(verified)])
                session.on_verified(Verified(block, sampled.tokens), float(step))
                if session.finish is not None:
                    break
            texts.append(tuple(session.transcript[len(PROMPT) :]))
        return texts


def silent(seed, step, transcript):
    return []


def fixed(block):
    return lambda seed, step, transcript: [block] if step == 0 else [block[:1]]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_text_of_every_seed_is_the_same_with_any_drafts_and_through_a_resume(name):
    check_any_drafts_and_a_resume(SAMPLINGS[name])


def check_any_drafts_and_a_resume(sampling):
    """Every seed must have one text with any drafts, and a text that goes on elsewhere must go on the same."""
    texts, seeds = Texts(sampling), range(5)
    wanted = texts.decode(seeds, silent)
    for block in ((0, 1, 0), (EOS, 0), (0, EOS, 1), (1, 1, EOS), (STOP, STOP)):
        assert texts.decode(seeds, fixed(block)) == wanted
    for kept in (1, 2, 3):
        begun = {seed: text[:kept] for seed, text in zip(seeds, wanted, strict=True) if len(text) > kept}
        resumed = texts.decode(begun, fixed((0, EOS)), begun.__getitem__)
        assert resumed == [text for text in wanted if len(text) > kept]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_count_from_anywhere_else_does_not_give_the_same_text(wrong):
    sampling, seeds = SAMPLINGS["stop token"], range(60)
    right = Texts(sampling).decode(seeds, silent)
    assert Texts(sampling, wrong).decode(seeds, fixed((0, 1, 0))) != right


@pytest.mark.parametrize("name", ["stop token", "cut"])
def test_texts_follow_the_law_though_drafts_read_the_noise(name):
    check_the_law(DRAWN[name], replace(DRAWN[name], min_tokens=0))


def check_the_law(sampling, other):
    """Texts must follow the law of `sampling`, and not that of `other`."""
    texts = Texts(sampling).decode(range(10_000, 10_400), noise_reading)
    assert chi_square_p(Counter(texts), law_of_text(sampling), len(texts)) > 1e-4
    plain = law_of_text(other)
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
