"""The processed distribution, against a slow independent computation and against transformers' own processors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from conformance import Suite, Text
from conformance_oracle import Oracle, save_conformance_target
from documented_law import documented_law
from emulated_vllm import EmulatedCore, emulated_backend
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.cloud.target.distribution import processed_logits
from outrider.cloud.target.sampler import Sampler
from outrider.cloud.target.shortlist import SMALLEST_VOCAB
from outrider.cloud.target.verification import VerificationInput
from outrider.proto.noise import gumbel
from outrider.proto.types import BOUNDS, DraftToken, Sampling

VOCAB = 12
quick = settings(max_examples=150, deadline=None, derandomize=True)
tokens = st.integers(0, VOCAB - 1)

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, 11, 12, 500]),
    top_p=st.sampled_from([1.0, 0.05, 0.5, 0.95]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.6, -0.4]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -0.2]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-2.0, 0.5, 3.0]), max_size=3).map(lambda d: tuple(d.items())),
    allowed_tokens=st.lists(tokens, unique=True, max_size=6).map(tuple),
)


def random_logits(seed, rows, vocab=VOCAB):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


@quick
@given(
    sampling=samplings,
    seed=st.integers(0, 10_000),
    prompt=st.lists(tokens, min_size=1, max_size=5),
    text=st.lists(tokens, max_size=5),
    block=st.lists(tokens, max_size=4).map(tuple),
)
def test_every_row_has_the_documented_law_and_counts_the_drafts_before_it(sampling, seed, prompt, text, block):
    logits = random_logits(seed, len(block) + 1)
    rows = processed_logits(
        logits, VerificationInput(sampling, [*prompt, *text], len(prompt), tuple(map(DraftToken, block)))
    )
    for j, row in enumerate(rows):
        said = (*text, *block[:j])
        wanted = documented_law(dict(enumerate(logits[j].double().tolist())), tuple(prompt), said, sampling)
        if sampling.temperature == 0:
            assert int(row.argmax()) in wanted
            continue
        law = torch.softmax(row, -1).tolist()
        assert {t for t, p in enumerate(law) if p > 0} == set(wanted)
        assert [law[t] for t in wanted] == pytest.approx(list(wanted.values()), abs=1e-12)


@quick
@given(sampling=samplings, seed=st.integers(0, 10_000), block=st.lists(tokens, min_size=1, max_size=4).map(tuple))
def test_a_row_in_a_block_equals_the_row_after_the_drafts_were_committed(sampling, seed, block):
    logits = random_logits(seed, len(block) + 1)
    together = processed_logits(logits, VerificationInput(sampling, [1, 2, 2], 1, tuple(map(DraftToken, block))))
    for j in range(len(block) + 1):
        alone = processed_logits(logits[j : j + 1], VerificationInput(sampling, [1, 2, 2, *block[:j]], 1, ()))
        assert torch.equal(together[j : j + 1], alone)


def test_processing_leaves_the_targets_logits_alone():
    logits = random_logits(0, 3)
    before = logits.clone()
    sampling = Sampling(temperature=0.5, logit_bias=((1, 1.0),), repetition_penalty=2.0, top_k=2)
    processed_logits(logits, VerificationInput(sampling, [1, 2], 1, tuple(map(DraftToken, (3, 4)))))
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("setting", "warper", "values"),
    [
        ("top_k", "TopKLogitsWarper", (1, 3, 11)),
        ("top_p", "TopPLogitsWarper", (0.05, 0.4, 0.9, 0.999)),
        ("min_p", "MinPLogitsWarper", (0.01, 0.2, 0.9)),
    ],
)
def test_cuts_equal_those_of_transformers(setting, warper, values):
    logits = random_logits(1, 6)
    for value in values:
        sampling = Sampling(temperature=1.0, **{setting: value})
        mine = processed_logits(logits, VerificationInput(sampling, [0], 1, (DraftToken(0),) * 5))
        theirs = getattr(transformers, warper)(value)(torch.zeros(6, 1, dtype=torch.long), logits.double())
        assert torch.allclose(torch.softmax(mine, -1), torch.softmax(theirs, -1), atol=1e-12)


@pytest.mark.parametrize("penalty", [0.5, 1.3, 4.0])
def test_the_repetition_penalty_equals_transformers_over_prompt_and_text(penalty):
    logits, seen = random_logits(4, 1), [3, 3, 7, 0]
    mine = processed_logits(logits, VerificationInput(Sampling(repetition_penalty=penalty), seen, 2, ()))
    theirs = transformers.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([seen]), logits.double())
    assert torch.equal(mine, theirs)


def test_ties_at_a_top_k_cut_are_kept_and_at_a_top_p_cut_broken_by_token_id():
    logits = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    by_k = processed_logits(logits, VerificationInput(Sampling(temperature=1.0, top_k=2), [0], 1, ()))[0]
    by_p = processed_logits(logits, VerificationInput(Sampling(temperature=1.0, top_p=0.5), [0], 1, ()))[0]
    assert torch.isfinite(by_k).tolist() == [True, True, True, False]
    assert torch.isfinite(by_p).tolist() == [False, True, True, False]


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("vocab", [16, 300])
def test_logits_that_tie_often_are_cut_by_top_p_as_transformers_cuts_them(top_p, vocab):
    logits = torch.round(random_logits(11, 400, vocab))
    ours = processed_logits(logits, VerificationInput(Sampling(temperature=1.0, top_p=top_p), [0], 1, ()))
    kept, theirs = torch.isfinite(ours), torch.isfinite(transformers.TopPLogitsWarper(top_p)(None, logits.double()))
    cut_ties = sum(bool(set(row[k].tolist()) & set(row[~k].tolist())) for row, k in zip(logits, kept, strict=True))
    assert cut_ties >= 5
    if vocab == 16:  # longer rows they sort by a rule that does not keep the order of equals
        assert torch.equal(kept, theirs)
    for row, mine, other in zip(logits, kept, theirs, strict=True):
        assert sorted(row[mine].tolist()) == sorted(row[other].tolist())


def test_near_ties_are_decided_by_the_portable_noise_alone():
    sampler = Sampler(torch.device("cpu"))
    seed, position, tied = 3, 9, torch.tensor([10, 20])
    noise = torch.from_numpy(gumbel(seed, position, tied.numpy()))
    for winner, loser in ((0, 1), (1, 0)):
        scores = torch.full((1, 32), -math.inf, dtype=torch.float64)
        scores[0, tied] = -noise  # both sums are 0 to the last bits
        scores[0, tied[winner]] += 3e-13
        keys = sampler._noise.row_keys([seed], [position])
        exact = scores[0, tied] + noise
        assert exact[winner] > exact[loser]
        assert int(sampler._coupled_argmax(scores, keys)) == int(tied[winner])


def test_the_marginal_over_a_large_vocabulary_is_the_law():
    vocab, rows = 20_000, 3000
    logits = torch.full((vocab,), -7.0)
    logits[::4000] = torch.tensor([4.0, 3.0, 2.0, 1.0, 0.0])
    law = torch.softmax(logits.double(), -1)
    sampler = Sampler(torch.device("cpu"))
    heads, drawn = torch.arange(0, vocab, 4000), []
    for first in range(0, rows, 50):
        keys = sampler._noise.row_keys([11] * 50, list(range(first, first + 50)))
        drawn.append(sampler._coupled_argmax(logits.double().log_softmax(-1).expand(50, -1), keys))
    drawn = torch.cat(drawn)
    seen = torch.stack([(drawn == head).sum() for head in heads]).double()
    expected = law[heads] * rows
    seen = torch.cat([seen, rows - seen.sum()[None]])
    expected = torch.cat([expected, rows - expected.sum()[None]])
    statistic = float(((seen - expected) ** 2 / expected).sum())
    assert statistic < 22.0, "chi-square with 5 degrees of freedom at 5e-4"
    assert float(expected[-1]) > 500, "the many unlikely tokens matter to this test"


# === settings at their bounds, and beyond ============================================================================


VOCABS = (64, 2 * SMALLEST_VOCAB)  # whole rows, and a short list
EXTREMES: dict[str, tuple[Any, ...]] = {
    "temperature": (1.0, 0.0, BOUNDS["temperature"].low, BOUNDS["temperature"].high),
    **{name: (1.0, BOUNDS[name].low, BOUNDS[name].high) for name in ("repetition_penalty", "top_p")},
    **{name: (0.0, BOUNDS[name].low, BOUNDS[name].high) for name in ("presence_penalty", "frequency_penalty")},
    "logit_bias": ((), tuple((t, BOUNDS["logit_bias"].low if t % 2 else BOUNDS["logit_bias"].high) for t in range(64))),
    "min_p": (0.0, 1.0),
    "top_k": (0, 1, 60),
}
BEYOND = {
    "frequency_penalty": -1e308,
    "presence_penalty": math.inf,
    "repetition_penalty": 1e-320,
    "logit_bias": ((3, 3.4e38), (4, math.nan)),
}


def session(vocab: int, sampling: Sampling) -> VerificationInput:
    prompt = [*range(vocab // 2), 3, 4]
    return VerificationInput(sampling, [*prompt, 5, 5, 6], len(prompt), (DraftToken(5), DraftToken(4)))


def extremes(most: int) -> Iterator[dict[str, Any]]:
    """Settings of which up to `most` are extreme."""
    for values in itertools.product(*EXTREMES.values()):
        chosen = dict(zip(EXTREMES, values, strict=True))
        if sum(value != EXTREMES[name][0] for name, value in chosen.items()) <= most:
            yield chosen


@pytest.mark.parametrize("vocab", VOCABS)
def test_settings_at_their_bounds_give_a_token_and_its_probability(vocab: int) -> None:
    torch.manual_seed(3)
    sampler, logits = Sampler(torch.device("cpu")), 20 * torch.randn(3, vocab)
    for chosen in extremes(3 if vocab == VOCABS[0] else 2):
        (sampled,) = sampler.sample(logits.clone(), [session(vocab, Sampling(**chosen))])
        assert all(0 <= token.id < vocab for token in sampled.tokens), chosen
        assert not any(math.isnan(token.logp or 0.0) for token in sampled.tokens), chosen


def beyond(name: str, temperature: float) -> Sampling:
    sampling = Sampling(temperature=temperature, top_k=60, top_p=0.9, frequency_penalty=0.1)
    object.__setattr__(sampling, name, BEYOND[name])
    return sampling


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("name", BEYOND)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_that_are_no_numbers_raise_whatever_made_them(vocab, name, temperature) -> None:
    sampler, logits = Sampler(torch.device("cpu")), torch.randn(3, vocab)
    spoiled = session(vocab, beyond(name, temperature))
    with pytest.raises(FloatingPointError):
        sampler.sample(logits, [spoiled])
    sampled, numbers = sampler.sample_numbers(logits, [spoiled])
    assert not numbers
    assert len(sampled[0].tokens) == 3


def test_a_pass_of_vllms_workers_with_such_scores_is_no_text(tmp_path) -> None:
    oracle = Oracle(save_conformance_target(tmp_path))
    suite = Suite(emulated_backend(EmulatedCore(oracle)), oracle)
    text = Text(suite, suite.prompt(8), beyond("logit_bias", 1.0))
    with pytest.raises(FloatingPointError):
        suite.backend.step([text.row()])
