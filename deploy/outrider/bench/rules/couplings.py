"""Chances that a draft is accepted, by the rule that decides: p is the target's distribution, q the drafter's.

shared noise      both take the argmax of log probability + G with the same G (Daliri, Musco, Suresh 2024); a draft is
                  accepted where it is the target's token
maximal coupling  1 - TV(p, q), the most that any rule can reach with one draft (speculative sampling does)
k drafts          of shared noise: the drafter's k best of log q + G; of optimal transport: k independent draws from q,
                  and the most that any rule can reach with them (SpecTr, Sun et al. 2023; Khisti et al. 2024)
blocks            block verification (Sun et al. 2024, arXiv 2403.10444) judges a path of drafts as a whole

Distributions are rows of numpy arrays in float64 that sum to 1.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def shared_noise(p: np.ndarray, q: np.ndarray) -> float:
    """Return the chance that both take the same token of [vocab] with the same noise.

    Token t wins both races with chance 1 / sum over s of max(p_s / p_t, q_s / q_t). The maximum is the first where
    p_s / q_s is at least p_t / q_t, so that sums along that order give all of them.
    """
    both = (p > 0) & (q > 0)
    if not both.any():
        return 0.0
    ratio = np.divide(p, q, out=np.full_like(p, np.inf), where=q > 0)
    order = np.argsort(-ratio, kind="stable")
    p_to, q_to = np.cumsum(p[order]), np.cumsum(q[order])
    mine = both[order]
    own_p, own_q = p[order][mine], q[order][mine]
    return float((1 / (p_to[mine] / own_p + (1 - q_to[mine]) / own_q)).sum())


def maximal(p: np.ndarray, q: np.ndarray) -> float:
    """Return 1 - TV of the distributions [vocab]."""
    return float(np.minimum(p, q).sum())


def best_of_transport(p: np.ndarray, q: np.ndarray, drafts: int) -> float:
    """Return the most that any rule can accept of `drafts` independent draws from q [vocab].

    The plan that matches most is a maximal flow, so its value is the least cut: the minimum over sets H of tokens of
    p(H) + 1 - q(H)^k, since a draft outside H must be drawn where the target's token is outside. p(H) - q(H)^k is
    concave in (q(H), p(H)), so the minimum is at a vertex of what sets can reach: a prefix in the order of p / q.
    """
    ratio = np.divide(p, q, out=np.full_like(p, np.inf), where=q > 0)
    order = np.argsort(ratio, kind="stable")
    p_of, q_of = (np.concatenate(([0.0], np.cumsum(row[order]))) for row in (p, q))
    return float((p_of + 1 - np.minimum(1.0, q_of) ** drafts).min())


def ranks_under_shared_noise(p: np.ndarray, q: np.ndarray, draws: int, rng: np.random.Generator) -> np.ndarray:
    """Return [draws] the rank of the target's token in the drafter's order of log q + G, from 1 on.

    p and q [vocab] share the noise of each draw; a race of exponentials E / p has the same order as log p + G.
    """
    kept = (p > 1e-9) | (q > 1e-9)
    p, q = p[kept], q[kept]
    noise = rng.exponential(size=(draws, len(p)))
    with np.errstate(divide="ignore"):
        targets, drafters = noise / p, noise / q
    taken = targets.argmin(axis=1)
    of_taken = drafters[np.arange(draws), taken]
    ranks: np.ndarray = 1 + (drafters < of_taken[:, None]).sum(axis=1)
    return ranks


def accepted_by_tokens(ratios: Iterable[float]) -> float:
    """Return the expected accepted drafts of a path with these p / q, each judged by itself (Leviathan et al. 2023)."""
    return float(np.cumprod(np.minimum(1.0, list(ratios))).sum())


def accepted_by_blocks(ratios: Iterable[float]) -> float:
    """Return the expected accepted drafts of a path with these p / q under block verification.

    At least i drafts are accepted with chance P_i = min(1, P_{i-1} p_i / q_i), P_0 = 1 (Sun et al. 2024, lemma 3):
    what a token has too much makes up for what the next one lacks.
    """
    chance, expected = 1.0, 0.0
    for ratio in ratios:
        chance = min(1.0, chance * ratio)
        expected += chance
    return expected
