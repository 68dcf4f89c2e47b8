"""Short lists decide as the whole row does: the same tokens by a plain computation in float64 with all of the noise."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.cloud.target.distribution import processed_logits
from outrider.cloud.target.sampler import Sampler
from outrider.cloud.target.shortlist import Law, Shortlist
from outrider.cloud.target.verification import VerificationInput
from outrider.proto.noise import NoiseSieve, gumbel, row_key
from outrider.proto.types import DraftToken, Sampling, token_ids

VOCAB = 1100  # no multiple of the blocks
EVERY = np.arange(VOCAB)
ROWS = 6
CPU = torch.device("cpu")


def rows_of(kind, seed, rows=ROWS):
    """[rows, vocab] float32 logits."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(rows, VOCAB, generator=generator)
    match kind:
        case "flat":
            return 0.01 * noise
        case "normal":
            return 2 * noise
        case "zipf":
            return noise - 3 * torch.log1p(torch.rand(rows, VOCAB, generator=generator) * VOCAB)
        case "peaked":
            return noise + 15 * (torch.arange(VOCAB) == 77)
        case "many alike":  # more than are listed, and few enough that no noise may be loud
            return torch.where(torch.arange(VOCAB) % 7 == 3, 0.01 * noise, torch.tensor(-50.0))
        case "ties":
            return torch.round(noise)
        case "excluded":
            return torch.where(noise > 0.5, noise, torch.tensor(-math.inf))
        case "three tokens":
            return torch.where(torch.arange(VOCAB) % 400 == 9, noise, torch.tensor(-math.inf))
        case "masked by a large number":
            return torch.where(noise > 0, noise + 20, torch.tensor(torch.finfo(torch.float32).min))
    raise AssertionError(kind)


KINDS = ["flat", "normal", "zipf", "peaked", "many alike", "ties", "excluded", "three tokens"]
KINDS += ["masked by a large number"]
PLAIN = [Sampling(temperature=t) for t in (0.0, 0.1, 0.5, 1.0, 3.0)]
CUT = [
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=0.7, top_k=40),
    Sampling(temperature=3.0, top_k=700),
    Sampling(temperature=1.0, top_p=0.9),
    Sampling(temperature=0.3, top_p=0.5),
    Sampling(temperature=1.0, top_p=1e-9),
    Sampling(temperature=1.0, top_p=1 - 1e-9),
    Sampling(temperature=1.0, min_p=0.05),
    Sampling(temperature=2.0, min_p=1.0),
    Sampling(temperature=1.0, top_k=100, top_p=0.8, min_p=0.01),
    Sampling(temperature=1.0, top_k=5000, top_p=0.8),
]
ADJUSTED = [
    Sampling(temperature=1.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=-0.2),
    Sampling(temperature=0.8, top_p=0.95, logit_bias=((3, 4.0), (17, -2.0))),
    Sampling(temperature=1.0, allowed_tokens=(5, 77, 1000)),
    Sampling(allowed_tokens=(5, 6), repetition_penalty=2.0),
]


def verified(sampling, seed, rows=ROWS):
    return VerificationInput(
        replace(sampling, seed=seed), [3, 77, 5, 17 + seed % 90], 2, tuple(map(DraftToken, range(70, 70 + rows - 1)))
    )


def plain(logits, session):
    """[(token, log p)] of each row, by processing, one logarithm of a sum and portable noise for every token."""
    scores = processed_logits(logits, session)
    logp = scores - torch.logsumexp(scores, dim=-1, keepdim=True)
    settled = []
    for j, row in enumerate(scores.numpy()):
        noise = gumbel(session.sampling.seed, len(session.transcript) + j, EVERY) if session.sampling.temperature else 0
        token = int((row + noise).argmax())
        settled.append((token, float(logp[j, token])))
    return settled


def decides_as_the_whole_row(sampler, samplings, kinds=KINDS, trials=4):
    """Whether all tokens are those of `plain`; log p must be right in any case where they are."""
    for kind in kinds:
        sessions = [verified(s, 100 * i + n) for n, s in enumerate(samplings) for i in range(trials)]
        logits = torch.cat([rows_of(kind, 1000 * KINDS.index(kind) + n) for n in range(len(sessions))])
        for n, (session, got) in enumerate(zip(sessions, sampler.sample(logits, sessions), strict=True)):
            for j, (token, logp) in enumerate(plain(logits[n * ROWS : (n + 1) * ROWS], session)):
                if got.tokens[j].id != token:
                    return False
                assert got.tokens[j].logp == pytest.approx(logp, abs=1e-6, nan_ok=True), (kind, session.sampling)
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_log_probabilities_are_those_of_the_whole_row(kind):
    assert decides_as_the_whole_row(Sampler(CPU), PLAIN, [kind], trials=12)
    assert decides_as_the_whole_row(Sampler(CPU), CUT, [kind])
    possible = [s for s in ADJUSTED if not s.allowed_tokens or kind not in ("excluded", "three tokens")]
    assert decides_as_the_whole_row(Sampler(CPU), possible, [kind])


class TooHighABound(NoiseSieve):
    """Wrong: tokens whose noise lies a little above the bound are lost."""

    def reaches(self, key, bound):
        return super().reaches(key, bound + 0.5)


class NeverLowered(NoiseSieve):
    """Wrong: the bound that is tried first is the only one."""

    def reaches(self, key, bound):
        return super().reaches(key, max(bound, 4.5))


class Deaf(NoiseSieve):
    """Wrong: only the likely tokens count."""

    def reaches(self, key, bound):
        return np.zeros_like(super().reaches(key, bound))


@pytest.mark.parametrize("wrong", [TooHighABound, NeverLowered, Deaf])
def test_a_wrong_sieve_is_noticed(wrong, monkeypatch):
    monkeypatch.setattr("outrider.cloud.target.shortlist.NoiseSieve", wrong)
    assert not decides_as_the_whole_row(Sampler(CPU), [Sampling(temperature=1.0)], ["flat", "many alike"], trials=60)


def whole_rows(sampling, logits, monkeypatch):
    """The sampler's result for rows of one session, and how many of the rows were worked on whole."""
    whole = []
    sampler = Sampler(CPU)
    right = sampler._by_whole_rows
    monkeypatch.setattr(sampler, "_by_whole_rows", lambda rows, *rest: whole.extend(rows) or right(rows, *rest))
    session = verified(sampling, 3, len(logits))
    (got,) = sampler.sample(logits, [session])
    assert list(token_ids(got.tokens)) == [token for token, _ in plain(logits, session)]
    return got, len(whole)


@pytest.mark.parametrize("sampling", [*PLAIN, *(s for s in CUT if s.top_p != 1 - 1e-9), ADJUSTED[0], ADJUSTED[2]])
@pytest.mark.parametrize("kind", ["zipf", "flat"])
def test_rows_are_settled_by_lists(sampling, kind, monkeypatch):
    assert whole_rows(sampling, rows_of(kind, 5, 20), monkeypatch)[1] == 0


@pytest.mark.parametrize("sampling", [Sampling(temperature=1.0, top_p=0.5), Sampling(temperature=0.5, top_p=0.5)])
def test_only_a_row_whose_sum_ends_at_top_p_is_worked_on_whole(sampling, monkeypatch):
    logits = rows_of("zipf", 6)
    logits[2] = 0.0  # 550 of 1100 tokens have just this probability
    got, count = whole_rows(sampling, logits, monkeypatch)
    assert count == 1
    assert got.tokens[2].logp == pytest.approx(-math.log(550), abs=1e-6)


def test_a_row_alone_counts_the_drafts_before_it_as_its_sessions_row_does(monkeypatch):
    sampling = Sampling(temperature=1.0, top_p=0.5, presence_penalty=0.3, frequency_penalty=0.2, repetition_penalty=1.2)
    logits = torch.zeros(ROWS, VOCAB)  # a penalty leaves sums that come to top_p in none, some or all rows
    session = verified(sampling, 4)
    whole = processed_logits(logits, session)
    for j in range(ROWS):
        assert torch.equal(processed_logits(logits[j : j + 1], session.row(j))[0], whole[j])


def test_a_tiny_temperature_is_left_to_the_whole_row(monkeypatch):
    assert whole_rows(Sampling(temperature=1e-9), rows_of("normal", 7), monkeypatch)[1] == ROWS


def test_a_tiny_temperature_takes_the_argmax_with_probability_one():
    logits = rows_of("normal", 1)
    for temperature in (1e-12, 1e-9, 1e-4):
        (got,) = Sampler(CPU).sample(logits, [verified(Sampling(temperature=temperature), 1)])
        assert list(token_ids(got.tokens)) == logits.argmax(dim=-1).tolist()


def test_rows_that_are_no_numbers_are_no_text_though_others_are():
    session = verified(Sampling(temperature=1.0), 5)
    broken = torch.full((ROWS, VOCAB), math.nan)
    with pytest.raises(FloatingPointError):
        Sampler(CPU).sample(torch.cat([broken, rows_of("normal", 2)]), [session, session])


def test_near_ties_are_decided_by_the_portable_noise_alone():
    shortlist, seed, position, tied = Shortlist(VOCAB), 3, 9, np.array([10, 20])
    noise = gumbel(seed, position, tied)
    for winner, loser in ((0, 1), (1, 0)):
        logits = np.full((1, VOCAB), -math.inf)
        logits[0, tied] = -noise  # both sums are alike to the last bits
        logits[0, tied[winner]] += 3e-13
        scores = logits[0, tied] - logits.max()
        assert (scores + noise)[winner] > (scores + noise)[loser]
        choice = shortlist.choose(logits, Law(1.0), [row_key(seed, position)], np.array([0]))
        assert choice.tokens.tolist() == [tied[winner]]


def test_sessions_of_all_kinds_together_are_sampled_as_each_alone():
    sampler = Sampler(CPU)
    sessions = [verified(s, i, 1 + i % 5) for i, s in enumerate([*PLAIN, *CUT, *ADJUSTED] * 2)]
    rows = [rows_of("zipf", i, session.rows) for i, session in enumerate(sessions)]
    together = sampler.sample(torch.cat(rows), sessions)
    assert together == [sampler.sample(logits, [session])[0] for logits, session in zip(rows, sessions, strict=True)]


@pytest.mark.parametrize("sampling", [Sampling(), PLAIN[3], CUT[1], CUT[3], ADJUSTED[0]])
def test_the_reward_is_that_of_the_whole_row(sampling):
    logits = rows_of("zipf", 8)
    session, q = verified(sampling, 8), (0.5, math.nan, 1e-3, 1e-5, 0.1)
    assert Sampler(CPU).sample(logits, [session])[0].reward is None, "no draft has a probability"
    likeliest = logits.argmax(dim=-1).tolist()[: ROWS - 1]
    for ids in (token_ids(session.block), likeliest):
        each = replace(session, block=tuple(map(DraftToken, ids, q)))
        logp = torch.log_softmax(processed_logits(logits, each), dim=-1)
        ratios = [
            min(1.0, math.exp(float(logp[j, draft.id])) / draft.confidence)
            for j, draft in enumerate(each.block)
            if draft.confidence > 0
        ]
        assert Sampler(CPU).sample(logits, [each])[0].reward == pytest.approx(sum(ratios) / len(ratios), rel=1e-5)


def test_one_sampler_serves_another_vocabulary_too():
    sampler = Sampler(CPU)
    for vocab in (VOCAB, 5000, VOCAB):
        logits = torch.zeros(1, vocab)
        logits[0, vocab - 1] = 100.0
        assert sampler.sample(logits, [verified(Sampling(temperature=1.0), 1, 1)])[0].tokens[0].id == vocab - 1
