"""From the target's logits to its tokens: the processed distribution, then the coupled rule.

Every row knows what came before it *including the drafts earlier in its own block*, so a penalty counts a draft that
is verified in the same step exactly as if it had been committed before.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from outrider.cloud.shortlist import NEAR_TIE, SMALLEST_VOCAB, Law, Shortlist
from outrider.proto.noise import TorchNoise, row_key
from outrider.proto.types import CommittedToken, DraftToken, Sampling, TopLogprobs, token_ids


@dataclass(frozen=True, slots=True)
class VerificationInput:
    """The facts that the distribution of one session's rows depends on.

    Attributes:
        sampling: sampling settings of the session.
        transcript: prompt and text before the step.
        prompt_length: tokens of the prompt in it.
        block: [k] drafts to verify; row j of k + 1 follows transcript + block[:j].
        allowed: [k + 1, vocab] bool, the tokens that the grammar allows in each row; None: there is none.
        logprobs: whether the model's own log probabilities are wanted.
        top_logprobs: number of likeliest tokens wanted for each position.
    """

    sampling: Sampling
    transcript: list[int]
    prompt_length: int
    block: tuple[DraftToken, ...]
    allowed: np.ndarray | None = field(default=None, compare=False)
    logprobs: bool = False
    top_logprobs: int = 0

    @property
    def rows(self) -> int:
        """Number of its rows of logits."""
        return len(self.block) + 1

    @property
    def adjusts(self) -> bool:
        """Whether `adjusted_logits` differ from the target's."""
        sampling = self.sampling
        return bool(self.allowed is not None or sampling.allowed_tokens or sampling.logit_bias or sampling.penalises)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The results of a session's rows.

    Attributes:
        tokens: [k + 1] the target's, with `logp`; the a drafts that agree and the token after them have `logprob` and
            `top` too, where wanted.
        reward: mean acceptance ratio of the drafts; None: no q.
    """

    tokens: tuple[CommittedToken, ...]
    reward: float | None


class Sampler:
    """The coupled rule on one device: by a short list where that is enough (on a CPU), else over whole rows."""

    def __init__(self, device: torch.device) -> None:
        self._noise = TorchNoise(torch, device)
        self._device = device
        self._shortlist: Shortlist | None = None

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, sessions: list[VerificationInput]) -> list[Sampled]:
        """Return the target's tokens in the rows of `logits` [sum of rows, vocab] float32, in order of `sessions`.

        Row j of a session stands at absolute position i = len(transcript) + j and takes
        argmax_t log p_i(t) + G(seed, i, t); at temperature 0 the argmax of the logits (DESIGN section 1; Gumbel-max).
        """
        firsts = list(itertools.accumulate((session.rows for session in sessions), initial=0))
        spans = [slice(first, end) for first, end in itertools.pairwise(firsts)]
        sampled = self._by_shortlist(logits, sessions, spans)
        left = [i for i in range(len(sessions)) if i not in sampled]
        if left:
            rows = torch.cat([logits[spans[i]] for i in left])
            sampled |= zip(left, self._by_whole_rows(rows, [sessions[i] for i in left]), strict=True)
        for i, session in enumerate(sessions):
            if session.logprobs:
                sampled[i] = with_logprobs(sampled[i], logits[spans[i]], session)
        return [sampled[i] for i in range(len(sessions))]

    def _by_shortlist(
        self, logits: torch.Tensor, sessions: list[VerificationInput], spans: list[slice]
    ) -> dict[int, Sampled]:
        """Return results by index of session, for those that short lists settle; sessions of one law go together."""
        vocab = logits.shape[1]
        if self._device.type != "cpu" or vocab < SMALLEST_VOCAB:
            return {}
        if self._shortlist is None or self._shortlist.vocab != vocab:
            self._shortlist = Shortlist(vocab)
        groups: defaultdict[Law, list[int]] = defaultdict(list)
        sampled: dict[int, Sampled] = {}
        for i, session in enumerate(sessions):
            law = Law.of(session.sampling, vocab)
            if session.adjusts:
                sampled |= _settled(
                    self._shortlist, adjusted_logits(logits[spans[i]], session).numpy(), law, {i: session}
                )
            else:
                groups[law].append(i)
        in_numpy = logits.numpy()
        for law, members in groups.items():
            whole = len(members) == len(sessions)
            rows = in_numpy if whole else np.concatenate([in_numpy[spans[i]] for i in members])
            sampled |= _settled(self._shortlist, rows, law, {i: sessions[i] for i in members})
        return sampled

    def _by_whole_rows(self, logits: torch.Tensor, sessions: list[VerificationInput]) -> list[Sampled]:
        scores = torch.empty(logits.shape, dtype=torch.float64, device=self._device)
        first = 0
        for session in sessions:
            rows = slice(first, first + session.rows)
            scores[rows] = processed_logits(logits[rows], session)
            first += session.rows
        logp = scores - torch.logsumexp(scores, dim=-1, keepdim=True)
        tokens = self._choose(scores, sessions)
        logp_of_tokens = logp.gather(1, tokens[:, None])[:, 0]
        asked = torch.tensor(_asked(sessions), device=self._device)
        logp_of_asked = logp.gather(1, asked[:, None])[:, 0]
        return _per_session(sessions, tokens.tolist(), logp_of_tokens.tolist(), logp_of_asked.tolist())

    def _choose(self, scores: torch.Tensor, sessions: list[VerificationInput]) -> torch.Tensor:
        """Return the tokens of `scores`, [rows] int64."""
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
        """Return the argmax over tokens of scores + G; the portable noise decides where the fast one leaves a doubt.

        scores: [rows, vocab] float64, -inf where a token is excluded; row_keys: [rows] int64.
        """
        every_token = torch.arange(scores.shape[1], device=self._device)
        uniform = self._noise.uniform(self._noise.random_bits(row_keys, every_token))
        total = scores - torch.log(-torch.log(uniform))
        best = total.max(dim=-1)
        close = total >= best.values[:, None] - NEAR_TIE
        for row in (close.sum(dim=-1) > 1).nonzero()[:, 0].tolist():
            tied = close[row].nonzero()[:, 0]
            exact = scores[row, tied] + self._noise.gumbel(row_keys[row], tied)
            best.indices[row] = tied[exact.argmax()]
        return best.indices


def _settled(
    shortlist: Shortlist, logits: np.ndarray, law: Law, sessions: dict[int, VerificationInput]
) -> dict[int, Sampled]:
    """Return results by index of the sessions of one law all of whose rows of `logits` are settled."""
    inputs = list(sessions.values())
    keys = [row_key(i.sampling.seed, len(i.transcript) + row) for i in inputs for row in range(i.rows)]
    choice = shortlist.choose(logits, law, keys, np.array(_asked(inputs)))
    results = _per_session(inputs, choice.tokens.tolist(), choice.logp.tolist(), choice.logp_of_asked.tolist())
    starts = list(itertools.accumulate((i.rows for i in inputs), initial=0))
    settled = np.logical_and.reduceat(choice.certain, starts[:-1])
    return {i: result for i, result, certain in zip(sessions, results, settled, strict=True) if certain}


def _asked(sessions: list[VerificationInput]) -> list[int]:
    """Return [sum of rows] the draft that is verified in each row; 0 in a session's last."""
    return [token for session in sessions for token in (*token_ids(session.block), 0)]


def _per_session(
    sessions: list[VerificationInput], tokens: list[int], logp_of_tokens: list[float], logp_of_asked: list[float]
) -> list[Sampled]:
    sampled, first = [], 0
    for session in sessions:
        rows = slice(first, first + session.rows)
        reward = _reward(logp_of_asked[rows], session)
        sampled.append(Sampled(tuple(map(CommittedToken, tokens[rows], logp_of_tokens[rows])), reward))
        first += session.rows
    return sampled


def _reward(logp_of_drafts: list[float], session: VerificationInput) -> float | None:
    """Return the mean of min(1, p(x) / q(x)) over the drafts, the one-sample estimate of 1 - TV (MetaSD, section 3)."""
    ratios = [
        min(1.0, math.exp(logp) / draft.confidence)
        for logp, draft in zip(logp_of_drafts, session.block, strict=False)
        if draft.confidence > 0
    ]
    return sum(ratios) / len(ratios) if ratios else None


def with_logprobs(sampled: Sampled, logits: torch.Tensor, session: VerificationInput) -> Sampled:
    """Add log probabilities of the model's own distribution, softmax(logits), in the rows that matter.

    That is what OpenAI's API and vLLM (`logprobs_mode=raw_logprobs`) call logprobs. It has a value for every token,
    also where the processed distribution is one point or excludes the rest.

    Args:
        sampled: the target's token of each row.
        logits: [k + 1, vocab] float32, the target's.
        session: session of the rows.
    """
    agreed = (draft.id == token.id for draft, token in zip(session.block, sampled.tokens, strict=False))
    count = sum(itertools.takewhile(bool, agreed)) + 1
    rows = logits[:count]
    log_sums = torch.logsumexp(rows, dim=-1, keepdim=True)
    committed, beyond = sampled.tokens[:count], sampled.tokens[count:]
    ids = torch.tensor(token_ids(committed), device=logits.device)
    logprobs = (rows.gather(1, ids[:, None]) - log_sums)[:, 0].tolist()
    tops = _likeliest(rows, log_sums, session.top_logprobs) if session.top_logprobs else ((),) * count
    known = [
        token._replace(logprob=logprob, top=top) for token, logprob, top in zip(committed, logprobs, tops, strict=True)
    ]
    return replace(sampled, tokens=(*known, *beyond))


def _likeliest(logits: torch.Tensor, log_sums: torch.Tensor, count: int) -> tuple[TopLogprobs, ...]:
    """Return the `count` likeliest tokens of each row [rows, vocab] with log p; the lower token first among equals."""
    least = logits.topk(min(count, logits.shape[1]), dim=-1).values[:, -1:]
    row, token = (logits >= least).nonzero(as_tuple=True)  # in order of row, then token; ties may make them more
    logp = (logits - log_sums)[row, token].tolist()
    pairs: list[list[tuple[int, float]]] = [[] for _ in logits]
    for i, t, value in zip(row.tolist(), token.tolist(), logp, strict=True):
        pairs[i].append((t, value))
    return tuple(tuple(sorted(of_row, key=lambda pair: -pair[1])[:count]) for of_row in pairs)


def processed_logits(logits: torch.Tensor, session: VerificationInput) -> torch.Tensor:
    """Return unnormalised log probabilities [k + 1, vocab] float64 of the processed distribution; -inf: excluded.

    After `adjusted_logits` come, in this order, temperature, top-k, top-p (Holtzman et al. 2020) and min-p (Nguyen et
    al. 2024). At temperature 0 none of them does: only the argmax matters. Ties at a cut are kept by top-k and broken
    by token id by top-p.

    Args:
        logits: [k + 1, vocab] float32, the target's.
        session: session of the rows.
    """
    sampling = session.sampling
    scores = adjusted_logits(logits, session)
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


def adjusted_logits(logits: torch.Tensor, session: VerificationInput) -> torch.Tensor:
    """Return [k + 1, vocab] float64 logits after the adjustments of single tokens, which only some sessions ask for.

    They come in this order: grammar, allowed tokens, bias, repetition penalty (Keskar et al. 2019, section 4.1),
    presence and frequency penalty.
    """
    sampling = session.sampling
    scores = logits.double()
    if session.allowed is not None:
        scores = scores.masked_fill(~torch.from_numpy(session.allowed).to(scores.device), -math.inf)
    if sampling.allowed_tokens:
        allowed = torch.tensor(sampling.allowed_tokens, device=scores.device)
        kept = torch.full_like(scores, -math.inf)
        kept[:, allowed] = scores[:, allowed]
        scores = kept
    if sampling.logit_bias:
        biased = torch.tensor([token for token, _ in sampling.logit_bias], device=scores.device)
        scores[:, biased] += torch.tensor([bias for _, bias in sampling.logit_bias], device=scores.device).double()
    return _penalise(scores, session) if sampling.penalises else scores


def _penalise(scores: torch.Tensor, session: VerificationInput) -> torch.Tensor:
    """Penalise the tokens that came before, a few columns of `scores`, in place."""
    sampling, end = session.sampling, len(session.transcript)
    before = torch.tensor([*session.transcript, *token_ids(session.block)], dtype=torch.int64, device=scores.device)
    used, place = torch.unique(before, return_inverse=True)
    count = len(used)
    earlier = torch.zeros(session.rows, count, dtype=torch.int64, device=scores.device)  # in the same block
    if session.block:
        earlier[1:] = torch.nn.functional.one_hot(place[end:], count).cumsum(dim=0)
    counts = torch.bincount(place[session.prompt_length : end], minlength=count)[None] + earlier
    columns = scores[:, used]
    if sampling.repetition_penalty != 1:
        seen = (counts + torch.bincount(place[: session.prompt_length], minlength=count)[None]) > 0
        penalty = sampling.repetition_penalty
        columns = torch.where(seen, torch.where(columns > 0, columns / penalty, columns * penalty), columns)
    counts = counts.double()  # a float times integers would be float32
    columns = columns - sampling.presence_penalty * (counts > 0).double() - sampling.frequency_penalty * counts
    scores[:, used] = columns
    return scores


def _top_p(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the fewest most likely tokens whose probabilities sum to `top_p` or more."""
    ordered, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    probability = torch.softmax(ordered, dim=-1)
    before = probability.cumsum(dim=-1) - probability
    ordered = ordered.masked_fill(before >= top_p, -math.inf)
    return torch.empty_like(scores).scatter_(1, order, ordered)
