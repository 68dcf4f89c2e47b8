"""From the target's logits to its tokens: the processed distribution, then the coupled rule."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from outrider.cloud.target.distribution import adjusted_logits, are_numbers, processed_logits
from outrider.cloud.target.shortlist import NEAR_TIE, SMALLEST_VOCAB, Law, RowChoices, Shortlist
from outrider.cloud.target.verification import VerificationInput
from outrider.proto.noise import TorchNoise, row_key
from outrider.proto.types import CommittedToken, Sampling, TokenFacts, TopLogprobs, token_ids


@dataclass(frozen=True, slots=True)
class Sampled:
    """The results of a session's rows.

    Attributes:
        tokens: [k + 1] the target's, with `logp`; the a drafts that agree and the token after them have `facts` too,
            where wanted.
        reward: mean acceptance ratio of the drafts; None: no q.
    """

    tokens: tuple[CommittedToken, ...]
    reward: float | None


_Part = tuple[int, VerificationInput]  # a session and the index of its first row


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
        argmax_t log p_i(t) + G(seed, i, t); at temperature 0 the argmax of the logits (Gumbel-max; docs/exactness.md).
        Raises `FloatingPointError` where a session's settings make scores that are no numbers.
        """
        firsts = list(itertools.accumulate((session.rows for session in sessions), initial=0))[:-1]
        parts = list(zip(firsts, sessions, strict=True))
        asked = np.array(_asked(sessions))
        choice = self._by_shortlist(logits, parts, asked)
        left = _unsettled(parts, choice.certain)
        if left:
            rows = _rows_of(left)
            of_left = logits if len(rows) == len(asked) else logits[torch.from_numpy(rows)]
            choice.put(rows, self._by_whole_rows(of_left, [session for _, session in left], asked[rows]))
        sampled = _per_session(sessions, choice)
        return [
            with_logprobs(of_session, logits[first : first + session.rows], session) if session.logprobs else of_session
            for (first, session), of_session in zip(parts, sampled, strict=True)
        ]

    def sample_numbers(self, logits: torch.Tensor, sessions: list[VerificationInput]) -> tuple[list[Sampled], bool]:
        """Return what `sample` does, and whether all logits and scores are numbers; else tokens that nobody may take.

        For runners that need a token of any logits.
        """
        if are_numbers(logits):
            try:
                return self.sample(logits, sessions), True
            except FloatingPointError:
                pass
        plain = [VerificationInput(Sampling(), each.transcript, each.prompt_length, each.block) for each in sessions]
        return self.sample(torch.zeros_like(logits), plain), False

    def _by_shortlist(self, logits: torch.Tensor, parts: list[_Part], asked: np.ndarray) -> RowChoices:
        """Return the tokens of the rows that short lists settle; sessions of equal settings are sampled together."""
        choice, vocab = RowChoices.none(len(asked)), logits.shape[1]
        if self._device.type != "cpu" or vocab < SMALLEST_VOCAB:
            return choice
        if self._shortlist is None or self._shortlist.vocab != vocab:
            self._shortlist = Shortlist(vocab)
        groups: defaultdict[Law, list[_Part]] = defaultdict(list)
        for first, session in parts:
            law = Law.of(session.sampling, vocab)
            if session.adjusts:
                rows = _rows_of([(first, session)])
                adjusted = adjusted_logits(logits[first : first + session.rows], session).numpy()
                choice.put(rows, self._shortlist.choose(adjusted, law, _keys([session]), asked[rows]))
            else:
                groups[law].append((first, session))
        for law, members in groups.items():
            rows = _rows_of(members)
            of_law = logits.numpy() if len(rows) == len(asked) else logits.numpy()[rows]
            keys = _keys([session for _, session in members])
            choice.put(rows, self._shortlist.choose(of_law, law, keys, asked[rows]))
        return choice

    def _by_whole_rows(self, logits: torch.Tensor, sessions: list[VerificationInput], asked: np.ndarray) -> RowChoices:
        scores = torch.empty(logits.shape, dtype=torch.float64, device=logits.device)
        first = 0
        for session in sessions:
            rows = slice(first, first + session.rows)
            scores[rows] = processed_logits(logits[rows], session)
            first += session.rows
        logp = scores - torch.logsumexp(scores, dim=-1, keepdim=True)
        tokens = self._choose(scores, sessions)
        wanted = torch.stack([tokens, torch.from_numpy(asked).to(self._device)], dim=1)
        logp_of_tokens, logp_of_asked = logp.gather(1, wanted).T.cpu().numpy()
        return RowChoices(tokens.cpu().numpy(), logp_of_tokens, logp_of_asked, np.ones(len(asked), bool))

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


def _asked(sessions: list[VerificationInput]) -> list[int]:
    """Return [sum of rows] the draft that is verified in each row; 0 in a session's last."""
    return [token for session in sessions for token in (*token_ids(session.block), 0)]


def _keys(sessions: list[VerificationInput]) -> list[int]:
    """Return [sum of rows] the keys of the rows' noise."""
    return [row_key(each.sampling.seed, len(each.transcript) + row) for each in sessions for row in range(each.rows)]


def _rows_of(parts: list[_Part]) -> np.ndarray:
    """Return the indices of all rows of `parts`, one part after the other."""
    return np.concatenate([np.arange(first, first + session.rows) for first, session in parts])


def _unsettled(parts: list[_Part], certain: np.ndarray) -> list[_Part]:
    """Return what is left to sample: a session whole where no row is certain, else its uncertain rows one by one."""
    left: list[_Part] = []
    for first, session in parts:
        open_rows = np.flatnonzero(~certain[first : first + session.rows]).tolist()
        if len(open_rows) == session.rows:
            left.append((first, session))
        else:
            left += [(first + row, session.row(row)) for row in open_rows]
    return left


def _per_session(sessions: list[VerificationInput], choice: RowChoices) -> list[Sampled]:
    tokens, logp_of_tokens, logp_of_asked = choice.tokens.tolist(), choice.logp.tolist(), choice.logp_of_asked.tolist()
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
    """Add the facts by the model's own distribution, softmax(logits), in the rows that matter.

    That is what OpenAI's API and vLLM (`logprobs_mode=raw_logprobs`) call logprobs. It has a value for every token,
    also where the processed distribution is one point or excludes the rest. `logits` are [k + 1, vocab] float32.
    """
    agreed = (draft.id == token.id for draft, token in zip(session.block, sampled.tokens, strict=False))
    count = sum(itertools.takewhile(bool, agreed)) + 1
    committed, beyond = sampled.tokens[:count], sampled.tokens[count:]
    facts = token_facts(logits[:count], token_ids(committed), session.top_logprobs)
    known = [token._replace(facts=of_token) for token, of_token in zip(committed, facts, strict=True)]
    return replace(sampled, tokens=(*known, *beyond))


def token_facts(logits: torch.Tensor, tokens: Sequence[int], top: int) -> tuple[TokenFacts, ...]:
    """Return what the model says of `tokens` [m] by the logits [m, vocab] float32 of the positions before them."""
    log_sums = torch.logsumexp(logits, dim=-1, keepdim=True)
    of_tokens = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    logprobs = (of_tokens - log_sums)[:, 0].tolist()
    ranks = ((logits > of_tokens).sum(dim=-1) + 1).tolist()
    tops = likeliest(logits, log_sums, top) if top else ((),) * len(tokens)
    entropies = torch.special.entr((logits - log_sums).exp_()).sum(dim=-1).tolist()
    return tuple(map(TokenFacts, logprobs, ranks, tops, entropies))


def likeliest(logits: torch.Tensor, log_sums: torch.Tensor, count: int) -> tuple[TopLogprobs, ...]:
    """Return the `count` likeliest tokens of each row [rows, vocab] with log p; the lower token first among equals."""
    least = logits.topk(min(count, logits.shape[1]), dim=-1).values[:, -1:]
    row, token = (logits >= least).nonzero(as_tuple=True)  # in order of row, then token; ties may make them more
    logp = (logits - log_sums)[row, token].tolist()
    pairs: list[list[tuple[int, float]]] = [[] for _ in logits]
    for i, t, value in zip(row.tolist(), token.tolist(), logp, strict=True):
        pairs[i].append((t, value))
    return tuple(tuple(sorted(of_row, key=lambda pair: -pair[1])[:count]) for of_row in pairs)
