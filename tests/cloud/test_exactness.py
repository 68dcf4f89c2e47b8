"""The coupled rule is exact: the text follows the target's processed distribution, whatever the drafter does.

Three checkers, from strict to statistical, each of which must also reject wrong rules (the negative controls below):

1. `same_text`: for every seed, the text with any drafts is the text without drafts, token for token.
2. `chi_square`: over many seeds the texts follow the exact law by the documentation (`documented_law`).
3. `law_of_rule`: where a rule can be enumerated, its law as fractions equals the product of the conditionals.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
import torch
from documented_law import documented_law

from outrider.cloud.target.distribution import processed_logits
from outrider.cloud.target.sampler import Sampled, Sampler
from outrider.cloud.target.verification import VerificationInput
from outrider.proto.noise import gumbel, row_key
from outrider.proto.session.acceptance import accept_drafts
from outrider.proto.session.verifier import Verified, VerifierRules, VerifierSession
from outrider.proto.types import CommittedToken, Draft, DraftToken, FinishReason, Open, Sampling, token_ids

VOCAB = 4
LENGTH = 3
PROMPT = (1, 0, 1)
TOKENS = np.arange(VOCAB)
HASH = "0" * 64

SAMPLINGS = {
    "greedy": Sampling(),
    "greedy, penalised": Sampling(repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=0.9),
    "greedy, biased and restricted": Sampling(logit_bias=((0, 1.5), (3, -1.0)), allowed_tokens=(0, 3)),
    "temperature 1": Sampling(temperature=1.0),
    "hot": Sampling(temperature=1.8),
    "top-k": Sampling(temperature=0.9, top_k=2),
    "top-p": Sampling(temperature=1.2, top_p=0.75),
    "min-p": Sampling(temperature=1.5, min_p=0.3),
    "penalised": Sampling(temperature=1.0, repetition_penalty=2.5, presence_penalty=0.8, frequency_penalty=0.7),
    "biased": Sampling(temperature=0.8, logit_bias=((2, 2.0), (1, -0.5))),
    "restricted": Sampling(temperature=1.3, allowed_tokens=(3, 1)),
    "everything": Sampling(
        temperature=1.4,
        top_k=3,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.3,
        presence_penalty=-0.4,
        frequency_penalty=0.5,
        logit_bias=((1, 0.7),),
        allowed_tokens=(0, 1, 2),
    ),
}
DRAWN = {name: sampling for name, sampling in SAMPLINGS.items() if sampling.temperature > 0}


# === the target, and its processed distribution computed independently ==========================================


@cache
def logits_after(prefix: tuple[int, ...]) -> tuple[float, ...]:
    """[VOCAB] of a target whose every context is different; short numbers, so that float32 holds them exactly."""
    rng = random.Random(f"target {prefix}")
    return tuple(round(rng.gauss(0, 1.6) * 64) / 64 for _ in range(VOCAB))


def processed_law(prefix: tuple[int, ...], sampling: Sampling) -> list[float]:
    """[VOCAB] probabilities after `prefix`."""
    law = documented_law(dict(enumerate(logits_after(prefix))), PROMPT, prefix[len(PROMPT) :], sampling)
    return [law.get(t, 0.0) for t in range(VOCAB)]


def law_of_text(sampling: Sampling, length: int = LENGTH) -> dict[tuple[int, ...], float]:
    """{text: probability} of all texts of `length` tokens."""
    law = {(): 1.0}
    for _ in range(length):
        law = {
            (*text, t): p * q
            for text, p in law.items()
            for t, q in enumerate(processed_law(PROMPT + text, sampling))
            if q
        }
    return law


# === the rule as implemented, for thousands of sessions in lock step ============================================


@cache
def opening(sampling: Sampling, seed: int, length: int, committed: tuple[int, ...]) -> Open:
    return Open("m", HASH, PROMPT, replace(sampling, seed=seed, max_tokens=length), "s", committed=committed)


@dataclass
class Texts:
    """Decodes one text for each (seed, adversary) with the real session machine and the real sampler.

    `change` spoils what the sampler is told of a step.
    """

    sampling: Sampling
    sampler: Sampler
    length: int = LENGTH
    max_drafts: int = 8
    eos: frozenset = frozenset()
    change: Callable[[VerificationInput], VerificationInput] = lambda verified: verified

    def decode(self, seeds, adversaries, committed=None):
        """The texts; `adversaries[i](seed, step, transcript)` gives the drafts, split into messages."""
        sessions = list(map(self._session, seeds, committed or [()] * len(seeds)))
        running = list(range(len(seeds)))
        step = 0
        while running:
            verified = []
            for i in running:
                self._hand_over_drafts(sessions[i], adversaries[i](seeds[i], step, sessions[i].transcript), step)
                s = sessions[i]
                block = s.block()
                verified.append(
                    VerificationInput(s.sampling, s.transcript, s.prompt_length, block, eos_tokens=s.eos_tokens)
                )
            rows = [logits_after((*j.transcript, *token_ids(j.block[:k]))) for j in verified for k in range(j.rows)]
            sampled = self.sampler.sample(torch.tensor(rows, dtype=torch.float32), [*map(self.change, verified)])
            for i, j, result in zip(list(running), verified, sampled, strict=True):
                sessions[i].on_verified(Verified(j.block, result.tokens), float(step))
            running = [i for i in running if sessions[i].finish is None]
            step += 1
        assert self.eos or all(s.finish is FinishReason.LENGTH for s in sessions)
        return [tuple(s.transcript[s.prompt_length :]) for s in sessions]

    def _session(self, seed, committed):
        rules = VerifierRules("v", "m", HASH, VOCAB, 64, self.eos, self.max_drafts)
        return VerifierSession(opening(self.sampling, seed, self.length, committed), rules, 0.0)

    @staticmethod
    def _hand_over_drafts(session, messages, step):
        start = len(session.transcript)
        for tokens in messages:
            session.on_draft(Draft(step, start, tuple(map(DraftToken, tuple(tokens)))), float(step))
            start += len(tokens)


def silent(seed, step, transcript):
    return []


def fixed_drafts(*blocks):
    """At step n the n-th block, each token a message of its own in odd steps."""

    def adversary(seed, step, transcript):
        block = blocks[step] if step < len(blocks) else ()
        if not block:
            return []
        return [block] if step % 2 == 0 else [(token,) for token in block]

    return adversary


@cache
def noise_of(seed: int, position: int) -> list[float]:
    return gumbel(seed, position, TOKENS).tolist()


def noise_reading(seed, step, transcript):
    """Reads the very noise that decides: proposes its argmax where it is large, and its argmin elsewhere."""
    prefix = list(transcript)
    for _ in range(LENGTH - 1):
        noise = noise_of(seed, len(prefix))
        scores = [a + b for a, b in zip(logits_after(tuple(prefix)), noise, strict=True)]
        prefix.append(scores.index(max(scores) if max(scores) > 1.5 else min(scores)))
    return [prefix[len(transcript) : -1], prefix[-1:]]


def without_drafts(sampling, seeds, sampler=None):
    return Texts(sampling, sampler or Sampler(torch.device("cpu"))).decode(seeds, [silent] * len(seeds))


def all_strategies(length=LENGTH):
    """Every block of useful length at every step."""
    blocks = [
        [b for n in range(length - step) for b in itertools.product(range(VOCAB), repeat=n)] for step in range(length)
    ]
    return [fixed_drafts(*choice) for choice in itertools.product(*blocks)]


# === the checkers ===============================================================================================


def same_text(sampling, sampler, seeds=range(4)):
    """Whether every strategy of drafts gives, for every seed, the text that the true sampler gives without drafts."""
    strategies = all_strategies()
    pairs = [(seed, strategy) for seed in seeds for strategy in strategies]
    texts = Texts(sampling, sampler).decode([seed for seed, _ in pairs], [strategy for _, strategy in pairs])
    wanted = dict(zip(seeds, without_drafts(sampling, list(seeds)), strict=True))
    return all(text == wanted[seed] for text, (seed, _) in zip(texts, pairs, strict=True))


def chi_square_p(counts, law, trials):
    """The p-value of Pearson's test by the Wilson-Hilferty approximation; texts expected less than 5 times are pooled.

    0 where a text of probability zero occurs.
    """
    if any(text not in law for text in counts):
        return 0.0
    cells, pooled_expected, pooled_seen = [], 0.0, 0
    for text, p in law.items():
        if p * trials < 5:
            pooled_expected += p * trials
            pooled_seen += counts.get(text, 0)
        else:
            cells.append((counts.get(text, 0), p * trials))
    if pooled_expected > 0:
        cells.append((pooled_seen, pooled_expected))
    freedom = len(cells) - 1
    if freedom == 0:
        return 1.0
    statistic = sum((seen - expected) ** 2 / max(expected, 0.5) for seen, expected in cells)
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))


def texts_follow_the_law(sampling, sampler, trials=600, adversary=noise_reading):
    """Whether the texts of many seeds pass the chi-square test at 1e-4."""
    texts = Texts(sampling, sampler).decode(list(range(10_000, 10_000 + trials)), [adversary] * trials)
    return chi_square_p(Counter(texts), law_of_text(sampling), trials) > 1e-4


# === the rule is exact ==========================================================================================


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_text_is_the_same_for_every_possible_sequence_of_drafts(name):
    assert same_text(SAMPLINGS[name], Sampler(torch.device("cpu")))


@pytest.mark.parametrize("name", DRAWN)
def test_texts_follow_the_processed_law_though_drafts_read_the_noise(name):
    assert texts_follow_the_law(DRAWN[name], Sampler(torch.device("cpu")))


@pytest.mark.parametrize("name", [name for name, s in SAMPLINGS.items() if s.temperature == 0])
def test_at_temperature_zero_the_text_is_the_argmax_whatever_the_seed(name):
    sampling = SAMPLINGS[name]
    (only,) = law_of_text(sampling)
    seeds = [0, 1, (1 << 64) - 1]
    assert Texts(sampling, Sampler(torch.device("cpu"))).decode(seeds, [noise_reading] * 3) == [only] * 3


def test_no_token_outside_the_processed_law_is_ever_drawn():
    sampling = SAMPLINGS["everything"]
    law = law_of_text(sampling)
    texts = Texts(sampling, Sampler(torch.device("cpu"))).decode(list(range(300)), [noise_reading] * 300)
    assert set(texts) <= set(law)
    assert len(law) < VOCAB**LENGTH, "the processing excludes something, or this test shows nothing"


@pytest.mark.parametrize("max_drafts", [1, 2, 3, 8])
def test_long_texts_do_not_depend_on_splits_messages_or_the_most_drafts_of_a_step(max_drafts):
    sampling = SAMPLINGS["everything"]
    sampler = Sampler(torch.device("cpu"))
    seeds = list(range(40))
    wanted = Texts(sampling, sampler, 24).decode(seeds, [silent] * len(seeds))
    own_text = {seed: PROMPT + text for seed, text in zip(seeds, wanted, strict=True)}

    def half_right(seed, step, transcript):
        rng = random.Random(f"{seed} {step} {max_drafts}")
        ahead = own_text[seed][len(transcript) : len(transcript) + rng.randrange(9)]
        tokens = [token if rng.random() < 0.8 else rng.randrange(VOCAB) for token in ahead]
        cuts = sorted({0, len(tokens), *(rng.randrange(len(tokens) + 1) for _ in range(3))})
        return [tokens[a:b] for a, b in itertools.pairwise(cuts)]

    texts = Texts(sampling, sampler, 24, max_drafts).decode(seeds, [half_right] * len(seeds))
    assert texts == wanted


def test_sampling_one_session_alone_equals_sampling_it_among_others():
    sampler = Sampler(torch.device("cpu"))
    verified = [
        VerificationInput(replace(s, seed=7 + i), [*PROMPT], 3, tuple(map(DraftToken, (2, 1, 0))))
        for i, s in enumerate(SAMPLINGS.values())
    ]
    rows = [logits_after((*j.transcript, *token_ids(j.block[:k]))) for j in verified for k in range(j.rows)]
    logits = torch.tensor(rows, dtype=torch.float32)
    together = sampler.sample(logits, verified)
    alone = [sampler.sample(logits[4 * i : 4 * i + 4], [j])[0] for i, j in enumerate(verified)]
    assert together == alone


# === the accept rule by itself, enumerated as fractions =========================================================


@cache
def fractions_after(prefix, name="p", zeros=False):
    """[3] probabilities of a target (p) or drafter (q), eighths of a context's own choosing."""
    rng = random.Random(f"{name} {prefix} {zeros}")
    while True:
        cuts = sorted(rng.randint(0, 8) for _ in range(2))
        law = [Fraction(cuts[0], 8), Fraction(cuts[1] - cuts[0], 8), Fraction(8 - cuts[1], 8)]
        if zeros or all(law):
            return tuple(law)


def p_after(prefix):
    return fractions_after(prefix)


def q_after(prefix):
    return fractions_after(prefix, "q")


def product_law(length, p=p_after, ends=lambda token: False):
    """{text: probability} of drawing token after token."""
    law = {(): Fraction(1)}
    for _ in range(length):
        longer = Counter()
        for text, weight in law.items():
            if text and ends(text[-1]):
                longer[text] += weight
                continue
            for t, chance in enumerate(p(text)):
                longer[*text, t] += weight * chance
        law = longer
    return {text: weight for text, weight in law.items() if weight}


def law_under_settle(strategy, sampling, eos):
    """The law of texts if row j of each step is drawn from p after the transcript and block[:j], by `accept_drafts`."""
    done = Counter()
    todo = [((), Fraction(1), 0)]
    while todo:
        text, weight, step = todo.pop()
        block = strategy(text, step)[: max(0, sampling.max_tokens - len(text) - 1)]
        for draws in itertools.product(range(3), repeat=len(block) + 1):
            chance = weight
            for j, token in enumerate(draws):
                chance *= p_after(text + block[:j])[token]
            if not chance:
                continue
            by_target = tuple(map(CommittedToken, draws))
            committed, accepted, finish = accept_drafts(
                tuple(map(DraftToken, block)), by_target, generated=len(text), sampling=sampling, eos_tokens=eos
            )
            tokens = token_ids(committed)
            assert tokens[:accepted] == block[:accepted]
            if finish is None:
                todo.append((text + tokens, chance, step + 1))
            else:
                done[text + tokens] += chance
    return dict(done)


@pytest.mark.parametrize("first", [b for n in range(4) for b in itertools.product(range(3), repeat=n)])
def test_settle_reproduces_the_product_law_exactly_for_every_block(first):
    def strategy(text, step):
        return first if step == 0 else first[::-1][:1]

    sampling = Sampling(temperature=1, max_tokens=4)
    assert law_under_settle(strategy, sampling, frozenset()) == product_law(4)


@pytest.mark.parametrize("sampling", [Sampling(max_tokens=4), Sampling(max_tokens=4, stop_tokens=(0,))])
def test_settle_ends_texts_exactly_where_plain_decoding_ends_them(sampling):
    def strategy(text, step):
        return (1, 2, 0)[step:]

    law = law_under_settle(strategy, sampling, frozenset({2}))
    assert law == product_law(4, ends=lambda token: token == 2 or token in sampling.stop_tokens)


# === negative controls: the same checkers reject wrong rules ====================================================


class Unprocessed(Sampler):
    """Drafts are verified against the target's raw distribution; only its own token is processed."""

    def sample(self, logits, sessions):
        right = super().sample(logits, sessions)
        raw = super().sample(
            logits, [replace(j, sampling=Sampling(temperature=1.0, seed=j.sampling.seed)) for j in sessions]
        )
        mixed = []
        for j, r, w in zip(sessions, right, raw, strict=True):
            tokens = [w.tokens[i] if w.tokens[i].id == j.block[i].id else r.tokens[i] for i in range(len(j.block))]
            mixed.append(Sampled((*tokens, r.tokens[-1]), None))
        return mixed


class RelativeNoise(Sampler):
    """The noise of a row is keyed on its place in the step instead of its position in the text."""

    def _choose(self, scores, sessions):
        places = [j for session in sessions for j in range(session.rows)]
        seeds = [session.sampling.seed for session in sessions for _ in range(session.rows)]
        return self._coupled_argmax(scores, self._noise.row_keys(seeds, places))


class ForgetfulPenalty(Sampler):
    """A penalty counts the transcript only, not the drafts earlier in the same step."""

    def sample(self, logits, sessions):
        single = [replace(j, block=()) for j in sessions for _ in range(j.rows)]
        scores = torch.cat([processed_logits(logits[i : i + 1], s) for i, s in enumerate(single)])
        tokens = self._choose(scores, sessions).tolist()
        results, first = [], 0
        for j in sessions:
            of_session = tokens[first : first + j.rows]
            results.append(Sampled(tuple([CommittedToken(token, 0.0) for token in of_session]), None))
            first += j.rows
        return results


class FreshNoise(Sampler):
    """The noise of a row depends on the drafts before it: exact in distribution, but not the same text."""

    def _choose(self, scores, sessions):
        keys = [
            (j.sampling.seed, row_key(len(j.transcript) + i, len(j.block)) >> 1)
            for j in sessions
            for i in range(j.rows)
        ]
        return self._coupled_argmax(scores, self._noise.row_keys([s for s, _ in keys], [p for _, p in keys]))


def greedy_drafts(seed, step, transcript):
    """Drafts the likeliest tokens: what a common drafter does, and what exposes verifiers that trust it."""
    prefix = list(transcript)
    for _ in range(3):
        row = logits_after(tuple(prefix))
        prefix.append(row.index(max(row)))
    return [prefix[len(transcript) :]]


@pytest.mark.parametrize("wrong", [Unprocessed, RelativeNoise, ForgetfulPenalty, FreshNoise])
def test_a_wrong_sampler_does_not_give_the_same_text(wrong):
    assert not same_text(SAMPLINGS["penalised"], wrong(torch.device("cpu")))


@pytest.mark.parametrize(
    ("wrong", "name", "adversary"),
    [
        (Unprocessed, "top-k", noise_reading),
        (RelativeNoise, "temperature 1", greedy_drafts),
        (ForgetfulPenalty, "penalised", greedy_drafts),
    ],
)
def test_a_wrong_sampler_does_not_follow_the_law(wrong, name, adversary):
    sampler = wrong(torch.device("cpu"))
    assert not texts_follow_the_law(SAMPLINGS[name], sampler, trials=1500, adversary=adversary)


def law_of_rule(position, length=3, drafts=2, p=p_after, q=q_after):
    """The law of texts under a rule of acceptance with coins.

    Args:
        position: (p, q) of one drafted position to [(weight, token, whether the chain goes on)].
        length: of the text.
        drafts: a step; after all of them agree the target draws one more.
        p: of the target after a text.
        q: of the drafter.
    """
    done, todo = Counter(), [((), Fraction(1), drafts)]
    while todo:
        text, weight, left = todo.pop()
        if len(text) == length:
            done[text] += weight
        elif left:
            for chance, token, goes_on in position(p(text), q(text)):
                if chance:
                    todo.append(((*text, token), weight * chance, left - 1 if goes_on else drafts))
        else:
            todo += [((*text, t), weight * chance, drafts) for t, chance in enumerate(p(text)) if chance]
    return dict(done)


def residual(p, q):
    left = [max(Fraction(0), a - b) for a, b in zip(p, q, strict=True)]
    return [a / sum(left) for a in left] if sum(left) else list(p)


def accept_or_resample(p, q, chance_of_draft, acceptance, resample):
    """Branches of one position: draft x, accept it or resample."""
    branches = []
    for x, drafted in enumerate(chance_of_draft):
        if not drafted:
            continue
        branches.append((drafted * acceptance[x], x, True))
        branches += [(drafted * (1 - acceptance[x]) * r, t, False) for t, r in enumerate(resample)]
    return branches


def ratio(p, q):
    return [min(Fraction(1), a / b) if b else Fraction(1) for a, b in zip(p, q, strict=True)]


def leviathan(p, q):
    """Right: x from q, accepted with min(1, p/q), else from the residual (Leviathan et al. 2023)."""
    return accept_or_resample(p, q, q, ratio(p, q), residual(p, q))


def coupled(p, q):
    """Right: the target draws, the draft is compared. Here the drafts come from q independently."""
    return [(a * b, y, x == y) for y, a in enumerate(p) for x, b in enumerate(q)]


def drops_unlikely_drafts(p, q):
    """Wrong: a draft that the drafter itself thinks unlikely is not sent, and the target draws instead."""
    sure = [Fraction(b >= Fraction(1, 4)) * b for b in q]
    dropped = 1 - sum(sure)
    return accept_or_resample(p, q, sure, ratio(p, q), residual(p, q)) + [
        (dropped * a, t, False) for t, a in enumerate(p)
    ]


def greedy_with_soft_acceptance(p, q):
    """Wrong: x is the drafter's argmax, yet is accepted as if it had been drawn from q."""
    best = [Fraction(t == q.index(max(q))) for t in range(3)]
    return accept_or_resample(p, q, best, ratio(p, q), residual(p, q))


def one_uniform_for_both(p, q):
    """Wrong: the uniform that drew x from q by inversion is also the coin that accepts it."""
    branches, low = [], Fraction(0)
    for x, b in enumerate(q):
        accepted = max(Fraction(0), min(low + b, ratio(p, q)[x]) - low)
        branches.append((accepted, x, True))
        branches += [((b - accepted) * r, t, False) for t, r in enumerate(residual(p, q))]
        low += b
    return branches


def resamples_from_p(p, q):
    """Wrong: after a rejection the target draws from p, not from the residual."""
    return accept_or_resample(p, q, q, ratio(p, q), p)


def coin_of_eight_sides(accepts):
    """`leviathan` with a coin u in {0, 1/8, ..., 7/8}, the drafter's q uniform on its support of powers of two."""

    def position(p, q):
        sides = [Fraction(u, 8) for u in range(8)]
        acceptance = [
            Fraction(sum(accepts(u, min(Fraction(1), a / b)) for u in sides), 8) if b else Fraction(0)
            for a, b in zip(p, q, strict=True)
        ]
        return accept_or_resample(p, q, q, acceptance, residual(p, q))

    return position


def p_with_a_zero(text):
    return (Fraction(0), Fraction(1, 4), Fraction(3, 4)) if len(text) % 2 else (Fraction(1, 2), Fraction(1, 2), 0)


def q_of_halves(text):
    return (Fraction(1, 2), Fraction(1, 4), Fraction(1, 4)) if len(text) % 2 else (Fraction(1, 2), 0, Fraction(1, 2))


@pytest.mark.parametrize("rule", [coupled, leviathan])
def test_the_enumeration_accepts_rules_that_are_right(rule):
    assert law_of_rule(rule) == product_law(3)


@pytest.mark.parametrize(
    "rule", [drops_unlikely_drafts, greedy_with_soft_acceptance, one_uniform_for_both, resamples_from_p]
)
def test_the_enumeration_rejects_rules_that_are_wrong(rule):
    law = law_of_rule(rule)
    assert sum(law.values()) == 1, "a wrong rule, but still a law"
    assert law != product_law(3)


def test_the_enumeration_notices_a_coin_of_zero_that_accepts_an_impossible_token():
    right = law_of_rule(coin_of_eight_sides(lambda u, a: u < a), p=p_with_a_zero, q=q_of_halves)
    wrong = law_of_rule(coin_of_eight_sides(lambda u, a: u <= a), p=p_with_a_zero, q=q_of_halves)
    exact = product_law(3, p=p_with_a_zero)
    assert right == exact
    assert set(wrong) - set(exact), "a text of probability zero is reached"


def test_the_chi_square_check_rejects_a_slightly_wrong_law_and_an_impossible_text():
    law = law_of_text(SAMPLINGS["temperature 1"])
    other = law_of_text(SAMPLINGS["hot"])
    counts = Counter({text: round(p * 4000) for text, p in other.items()})
    assert chi_square_p(counts, law, sum(counts.values())) < 1e-4
    assert chi_square_p(counts, other, sum(counts.values())) > 0.5
    assert chi_square_p(Counter({(0, 0, 9): 1}), law, 1) == 0
