"""From the target's logits to its tokens: the processed distribution, then the coupled rule.

Every row knows what came before it *including the drafts earlier in its own block*, so a penalty counts a draft that
is judged in the same step exactly as if it had been committed before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from outrider.proto.noise import TorchNoise
from outrider.proto.types import Sampling

# The machine's own logarithm is within this of the portable one; scores closer than this are settled by the latter.
_NEAR_TIE = 1e-9


@dataclass(frozen=True, slots=True)
class Judged:
    """What the distribution of one session's rows depends on.

    Attributes:
        sampling: the session's.
        transcript: prompt and text before the step.
        prompt_length: tokens of it that are prompt.
        block: [k] drafts judged; row j of k + 1 follows transcript + block[:j].
        q: [k] the drafter's probability of each draft, NaN where it was not sent.
    """

    sampling: Sampling
    transcript: list[int]
    prompt_length: int
    block: tuple[int, ...]
    q: tuple[float, ...] = ()

    @property
    def rows(self) -> int:
        """Rows of logits that belong to it."""
        return len(self.block) + 1


@dataclass(frozen=True, slots=True)
class Sampled:
    """The target's token of each row [k + 1], its log probability, and the reward of the drafts (None: no q)."""

    tokens: tuple[int, ...]
    logp: tuple[float, ...]
    reward: float | None


class Sampler:
    """The coupled rule on one device."""

    def __init__(self, device: torch.device) -> None:
        self._noise = TorchNoise(torch, device)
        self._device = device

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, sessions: list[Judged]) -> list[Sampled]:
        """The target's token in every row of `logits` [sum of rows, vocab] float32, row by row in order of `sessions`.

        Row j of a session stands at absolute position i = len(transcript) + j and takes
        argmax_t log p_i(t) + G(seed, i, t); at temperature 0 the argmax of the logits (DESIGN section 1; Gumbel-max).
        """
        scores = torch.empty(logits.shape, dtype=torch.float64, device=self._device)
        first = 0
        for session in sessions:
            rows = slice(first, first + session.rows)
            scores[rows] = processed_logits(logits[rows], session)
            first += session.rows
        logp = scores - torch.logsumexp(scores, dim=-1, keepdim=True)
        tokens = self._choose(scores, sessions)
        logp_of_tokens = logp.gather(1, tokens[:, None])[:, 0].tolist()
        return _per_session(sessions, tokens.tolist(), logp_of_tokens, logp)

    def _choose(self, scores: torch.Tensor, sessions: list[Judged]) -> torch.Tensor:
        """[rows] int64."""
        noisy: list[int] = []
        seeds: list[int] = []
        positions: list[int] = []
        first = 0
        for session in sessions:
            if session.sampling.temperature > 0:
                noisy += range(first, first + session.rows)
                seeds += [session.sampling.seed] * session.rows
                positions += range(len(session.transcript), len(session.transcript) + session.rows)
            first += session.rows
        tokens = scores.argmax(dim=-1)
        if noisy:
            rows = torch.tensor(noisy, device=self._device)
            tokens[rows] = self._coupled_argmax(scores[rows], self._noise.row_keys(seeds, positions))
        return tokens

    def _coupled_argmax(self, scores: torch.Tensor, row_keys: torch.Tensor) -> torch.Tensor:
        """Argmax over tokens of scores + G, decided by the portable noise where the fast one leaves a doubt.

        scores: [rows, vocab] float64, -inf where a token is excluded; row_keys: [rows] int64.
        """
        every_token = torch.arange(scores.shape[1], device=self._device)
        uniform = self._noise.uniform(self._noise.random_bits(row_keys, every_token))
        total = scores - torch.log(-torch.log(uniform))
        best = total.max(dim=-1)
        close = total >= best.values[:, None] - _NEAR_TIE
        for row in (close.sum(dim=-1) > 1).nonzero()[:, 0].tolist():
            rivals = close[row].nonzero()[:, 0]
            exact = scores[row, rivals] + self._noise.gumbel(row_keys[row], rivals)
            best.indices[row] = rivals[exact.argmax()]
        return best.indices


def _per_session(
    sessions: list[Judged], tokens: list[int], logp_of_tokens: list[float], logp: torch.Tensor
) -> list[Sampled]:
    sampled, first = [], 0
    for session in sessions:
        rows = slice(first, first + session.rows)
        reward = _reward(logp[rows], session)
        sampled.append(Sampled(tuple(tokens[rows]), tuple(logp_of_tokens[rows]), reward))
        first += session.rows
    return sampled


def _reward(logp: torch.Tensor, session: Judged) -> float | None:
    """Mean of min(1, p(x) / q(x)) over the block's drafts: the one-sample estimate of 1 - TV (MetaSD, section 3)."""
    known = [(j, token, q) for j, (token, q) in enumerate(zip(session.block, session.q, strict=False)) if q > 0]
    if not known:
        return None
    ratios = [min(1.0, math.exp(float(logp[j, token])) / q) for j, token, q in known]
    return sum(ratios) / len(ratios)


def processed_logits(logits: torch.Tensor, session: Judged) -> torch.Tensor:
    """Unnormalised log probabilities [k + 1, vocab] float64 of the processed distribution; -inf where excluded.

    In this order: allowed tokens, bias, repetition penalty (Keskar et al. 2019, section 4.1), presence and frequency
    penalty, temperature, top-k, top-p (Holtzman et al. 2020), min-p (Nguyen et al. 2024). At temperature 0 the last
    four do not apply: only the argmax matters. Ties at a cut are kept by top-k and broken by token id by top-p.

    Args:
        logits: [k + 1, vocab] float32, of the target.
        session: whose rows they are.
    """
    sampling = session.sampling
    scores = logits.double()
    if sampling.allowed_tokens:
        allowed = torch.tensor(sampling.allowed_tokens, device=scores.device)
        kept = torch.full_like(scores, -math.inf)
        kept[:, allowed] = scores[:, allowed]
        scores = kept
    if sampling.logit_bias:
        biased = torch.tensor([token for token, _ in sampling.logit_bias], device=scores.device)
        scores[:, biased] += torch.tensor([bias for _, bias in sampling.logit_bias], device=scores.device).double()
    if sampling.penalises:
        scores = _penalise(scores, session)
    if sampling.temperature == 0:
        return scores
    # The best at 0: a tiny temperature cannot overflow, and near ties are resolved to the last bit.
    scores = (scores - scores.max(dim=-1, keepdim=True).values) / sampling.temperature
    if 0 < sampling.top_k < scores.shape[1]:
        least = scores.topk(sampling.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < least, -math.inf)
    if sampling.top_p < 1:
        scores = _top_p(scores, sampling.top_p)
    if sampling.min_p > 0:
        least = scores.max(dim=-1, keepdim=True).values + math.log(sampling.min_p)
        scores = scores.masked_fill(scores < least, -math.inf)
    return scores


def _penalise(scores: torch.Tensor, session: Judged) -> torch.Tensor:
    sampling, vocab = session.sampling, scores.shape[1]
    text = torch.tensor(session.transcript[session.prompt_length :], dtype=torch.int64, device=scores.device)
    block = torch.tensor(session.block, dtype=torch.int64, device=scores.device)
    earlier = torch.zeros(session.rows, vocab, dtype=torch.int64, device=scores.device)  # in the same block
    if len(block):
        earlier[1:] = torch.nn.functional.one_hot(block, vocab).cumsum(dim=0)
    counts = torch.bincount(text, minlength=vocab)[None] + earlier
    if sampling.repetition_penalty != 1:
        prompt = torch.tensor(session.transcript[: session.prompt_length], device=scores.device)
        seen = (counts + torch.bincount(prompt, minlength=vocab)[None]) > 0
        penalised = torch.where(scores > 0, scores / sampling.repetition_penalty, scores * sampling.repetition_penalty)
        scores = torch.where(seen, penalised, scores)
    counts = counts.double()  # a float times integers would be float32
    return scores - sampling.presence_penalty * (counts > 0).double() - sampling.frequency_penalty * counts


def _top_p(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the fewest most likely tokens whose probabilities sum to `top_p` or more."""
    ordered, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    probability = torch.softmax(ordered, dim=-1)
    before = probability.cumsum(dim=-1) - probability
    ordered = ordered.masked_fill(before >= top_p, -math.inf)
    return torch.empty_like(scores).scatter_(1, order, ordered)
