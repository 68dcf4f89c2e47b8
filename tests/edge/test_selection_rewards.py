"""The reward of a round: what of it is unbiased and what is not, by enumerating every draw."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from outrider.edge.selectors import block_divergence, expected_tokens
from outrider.proto.noise import gumbel
from outrider.proto.policy.selector import RoundOutcome, SelectionView

VOCAB, DRAFTS = 3, 2
VIEW = SelectionView(DRAFTS, (0.1,), (0.0,))


def exact_divergence(target: np.ndarray, drafter: np.ndarray) -> float:
    """Mean (1 - TV) over a block, from full distributions: `target` and `drafter` [k, vocab] each; k >= 1."""
    return float(np.minimum(target, drafter).sum(axis=-1).mean())


def draft_agreement(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Sample min(1, p(x) / q(x)) [k] of drafts x ~ q; `p` and `q` [k] are probabilities of x, q > 0."""
    return np.minimum(1.0, p / q)


def committed_agreement(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Sample min(1, q(x) / p(x)) [n] of committed tokens x ~ p, p > 0, which idle drafters can have too."""
    return np.minimum(1.0, q / p)


def coupled_acceptance(p: np.ndarray, q: np.ndarray) -> float:
    """Chance that both sides draw the same token with shared Gumbel noise; `p` and `q` [vocab].

    sum_i 1 / sum_j max(p_j / p_i, q_j / q_i) over the tokens that both can draw (Daliri et al. 2024, arXiv
    2408.07978): both draw i when i comes first in two exponential races with the same clocks.
    """
    both = (p > 0) & (q > 0)
    if not both.any():
        return 0.0
    races = np.maximum(p[None, :] / p[both, None], q[None, :] / q[both, None])
    return float((1 / races.sum(axis=1)).sum())


def distributions(seed: int) -> tuple[dict, dict]:
    """p and q after every prefix of less than DRAFTS tokens."""
    rng = np.random.default_rng(seed)
    prefixes = [prefix for n in range(DRAFTS) for prefix in itertools.product(range(VOCAB), repeat=n)]
    return tuple({prefix: rng.dirichlet([0.7] * VOCAB) for prefix in prefixes} for _ in range(2))


def blocks(seed: int):
    """Every block that can be drafted and verified by speculative sampling: its chance and its statistics."""
    p, q = distributions(seed)
    for x in itertools.product(range(VOCAB), repeat=DRAFTS):
        drawn = [q[x[:j]][x[j]] for j in range(DRAFTS)]
        agreement = draft_agreement(np.array([p[x[:j]][x[j]] for j in range(DRAFTS)]), np.array(drawn))
        overlap = np.array([np.minimum(p[x[:j]], q[x[:j]]).sum() for j in range(DRAFTS)])
        exact = exact_divergence(
            np.array([p[x[:j]] for j in range(DRAFTS)]), np.array([q[x[:j]] for j in range(DRAFTS)])
        )
        for accepted in range(DRAFTS + 1):
            chance = math.prod(drawn) * math.prod(agreement[:accepted])
            if accepted < DRAFTS:
                chance *= 1 - agreement[accepted]
            verified = min(accepted + 1, DRAFTS)
            yield chance, agreement, overlap, exact, accepted, verified


def mean_and_variance(values, seed: int) -> tuple[float, float]:
    pairs = [(block[0], values(*block[1:])) for block in blocks(seed)]
    assert sum(chance for chance, _ in pairs) == pytest.approx(1.0)
    mean = sum(chance * value for chance, value in pairs)
    return mean, sum(chance * (value - mean) ** 2 for chance, value in pairs)


SEEDS = range(5)


@pytest.mark.parametrize("seed", SEEDS)
def test_one_sample_estimates_are_unbiased_for_one_minus_tv(seed) -> None:
    p, q = distributions(seed)
    for prefix in p:
        overlap = np.minimum(p[prefix], q[prefix]).sum()
        assert (q[prefix] * draft_agreement(p[prefix], q[prefix])).sum() == pytest.approx(overlap)
        assert (p[prefix] * committed_agreement(p[prefix], q[prefix])).sum() == pytest.approx(overlap)
        assert overlap == pytest.approx(1 - np.abs(p[prefix] - q[prefix]).sum() / 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_mean_over_all_drafts_is_unbiased_for_block_divergence(seed) -> None:
    estimate, _ = mean_and_variance(lambda agreement, overlap, exact, accepted, verified: agreement.mean(), seed)
    exact, _ = mean_and_variance(lambda agreement, overlap, exact, accepted, verified: exact, seed)
    assert estimate == pytest.approx(exact)


def test_the_mean_over_verified_drafts_is_biased_but_its_sums_are_not() -> None:
    biases = []
    for seed in SEEDS:
        verified_mean, _ = mean_and_variance(lambda a, o, e, n, verified: a[:verified].mean(), seed)
        exact_mean, _ = mean_and_variance(lambda a, o, e, n, verified: o[:verified].mean(), seed)
        verified_sum, _ = mean_and_variance(lambda a, o, e, n, verified: a[:verified].sum(), seed)
        exact_sum, _ = mean_and_variance(lambda a, o, e, n, verified: o[:verified].sum(), seed)
        assert verified_sum == pytest.approx(exact_sum)
        biases.append(verified_mean - exact_mean)
    assert max(biases) < 0, "blocks that are cut short are those of low agreement"


# --- with shared noise ---


def test_with_shared_noise_a_hit_has_its_own_chance() -> None:
    p, q = np.array([0.6, 0.3, 0.1, 0.0]), np.array([0.2, 0.5, 0.1, 0.2])
    tokens = np.arange(4)
    with np.errstate(divide="ignore"):
        log_p, log_q = np.log(p), np.log(q)
    trials = 6_000
    hits = 0
    for position in range(trials):
        noise = gumbel(5, position, tokens)
        hits += np.argmax(log_p + noise) == np.argmax(log_q + noise)
    chance = coupled_acceptance(p, q)
    assert hits / trials == pytest.approx(chance, abs=4 * math.sqrt(chance * (1 - chance) / trials))
    assert chance < 0.99 * np.minimum(p, q).sum(), "block divergence promises more"


def test_a_shared_hit_is_between_its_bounds() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        p, q = rng.dirichlet([0.5] * 6, 2)
        tv = np.abs(p - q).sum() / 2
        assert (1 - tv) / (1 + tv) - 1e-12 <= coupled_acceptance(p, q) <= 1 - tv + 1e-12
    assert coupled_acceptance(p, p) == pytest.approx(1.0)
    assert coupled_acceptance(np.array([1.0, 0.0]), np.array([0.0, 1.0])) == 0.0


# --- of a round ---


def outcome_of(agreement: float, accepted: int, verified: int) -> RoundOutcome:
    return RoundOutcome(VIEW, 0, accepted + 1, verified, accepted, agreement, 0.1)


def test_a_round_gives_its_agreement_or_else_the_share_of_verified_drafts() -> None:
    assert block_divergence(outcome_of(0.7, 1, 2)) == 0.7
    assert block_divergence(outcome_of(math.nan, 1, 2)) == 0.5
    assert block_divergence(outcome_of(math.nan, 0, 0)) == 0.0, "a drafter that was silent"


def test_expected_tokens_of_a_chain_of_equal_chances() -> None:
    assert expected_tokens(0.5, 2) == pytest.approx(1.75)
    assert expected_tokens(1.0, 2) == 3.0
    assert expected_tokens(0.0, 2) == 1.0
