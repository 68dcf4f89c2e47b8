"""The coupled rule with vLLM's noise and in vLLM's arithmetic: the tokens that a plain vLLM takes for these logits.

Model Runner V2 of vLLM 0.32 works in float32: logits, adjusted and divided by the temperature, cut, plus the noise of
`outrider.proto.vllm_noise`; the largest sum wins, the lower token among equals. Nothing is normalised before, since
that would round differently. Everything here is in its order and operation by operation as its kernels have it
(`vllm/v1/worker/gpu/sample`); top-k and top-p are those of its PyTorch path with a stable sort. Kernels that fuse a
product and a sum, or take an approximate logarithm, may still differ in a last bit, as vLLM does between two devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from outrider.cloud.distribution import VerificationInput, checked, masked, penalise, scores_by_session
from outrider.cloud.shortlist import SMALLEST_VOCAB, RowChoices
from outrider.proto.types import Sampling
from outrider.proto.vllm_noise import TorchVllmNoise, VllmNoiseSieve, gumbel32_of_bits, row_state

_LOWEST_TEMPERATURE = 0.01  # vLLM raises lower ones to it
_LISTED_BELOW = 6.0  # in units of the score; a token so far below the best wins by loud noise alone
_LOUD = 4.5  # one token in 90
_BLOCK = 16  # tokens of which one maximum is kept, to find a list's last score
_LISTED_FOR_A_CUT, _LONGER = 256, 8  # and how much longer the next list is, where one does not settle a row
_NEAR_CUT = 2e-5  # sums of float32 that come this close to top_p are left to sorting
# The machine's logarithm leaves sums this close undecided: an absolute part, and a part of the sum itself.
_NEAR, _NEAR_RELATIVE = 2e-5, 1e-6


def temperature_of(sampling: Sampling) -> float:
    """Return the temperature that vLLM samples with."""
    return max(sampling.temperature, _LOWEST_TEMPERATURE) if sampling.temperature > 0 else 0.0


def vllm_scores(logits: torch.Tensor, session: VerificationInput) -> torch.Tensor:
    """Return processed logits [k + 1, vocab] float32, to which the noise is added; -inf: excluded.

    The order is grammar, allowed tokens, bias, repetition, frequency and presence penalty, temperature, min-p, top-k,
    top-p. At temperature 0 it ends before the temperature. Raises `FloatingPointError` where what is to be cut is no
    number.

    Args:
        logits: [k + 1, vocab], the target's.
        session: session of the rows.
    """
    sampling = session.sampling
    scores = masked(logits.float(), session)
    if sampling.logit_bias:
        biased = torch.tensor([token for token, _ in sampling.logit_bias], device=scores.device)
        bias = torch.tensor([bias for _, bias in sampling.logit_bias], dtype=torch.float32, device=scores.device)
        scores = scores.index_add(1, biased, bias.expand(len(scores), -1))
    if sampling.penalises:
        scores = penalise(scores.clone(), session, _penalised)
    temperature = temperature_of(sampling)
    if temperature == 0:
        return checked(scores)
    if temperature != 1:
        scores = scores / torch.tensor(temperature, dtype=torch.float32, device=scores.device)
    checked(scores)
    if sampling.min_p > 0:
        least = scores.max(dim=-1, keepdim=True).values + float(np.log(np.float32(sampling.min_p)))
        scores = scores.masked_fill(scores < least, -math.inf)
    return _cut(scores, sampling)


def _penalised(columns: torch.Tensor, in_text: torch.Tensor, seen: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    penalty = torch.tensor(sampling.repetition_penalty, dtype=torch.float32, device=columns.device)
    scale = torch.where(seen, penalty, torch.ones_like(penalty))
    columns = columns * torch.where(columns > 0, 1 / scale, scale)
    columns = columns - torch.tensor(sampling.frequency_penalty, dtype=torch.float32) * in_text.float()
    return columns - torch.tensor(sampling.presence_penalty, dtype=torch.float32) * (in_text > 0).float()


def _cut(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Apply top-k and top-p: on a CPU by a short list where that decides, since sorting a row takes milliseconds."""
    top_k = sampling.top_k if 0 < sampling.top_k < scores.shape[1] else 0
    if sampling.top_p == 1:
        if not top_k:
            return scores
        return scores.masked_fill(scores < scores.topk(top_k, dim=-1).values[:, -1:], -math.inf)
    if scores.device.type != "cpu" or scores.shape[1] < SMALLEST_VOCAB:
        return cut_by_sorting(scores, top_k, sampling.top_p)
    cut = torch.full_like(scores, -math.inf)
    for of_cut, row in zip(cut, scores, strict=True):
        kept = kept_by_list(row.numpy(), top_k, sampling.top_p)
        if kept is None:
            of_cut.copy_(cut_by_sorting(row[None], top_k, sampling.top_p)[0])
        else:
            of_cut.numpy()[kept] = row.numpy()[kept]
    return cut


def kept_by_list(row: np.ndarray, top_k: int, top_p: float) -> np.ndarray | None:
    """Return the tokens [n] of a row [vocab] float32 that top-k (0: none) and top-p keep; None: lists do not tell.

    A list has every token of a floor and above. Of tokens that tie at the end of top-p, the larger ids are kept.
    """
    blocks, best = len(row) // _BLOCK, row.max()
    best_of_block = row[: blocks * _BLOCK].reshape(_BLOCK, blocks).max(axis=0)
    total = 0.0 if top_k else float(torch.from_numpy(row - best).exp_().sum())
    wanted = max(2 * top_k, _LISTED_FOR_A_CUT)
    while wanted < blocks:
        floor = np.partition(best_of_block, blocks - wanted)[blocks - wanted]
        if floor == -math.inf:
            return None
        listed = np.flatnonzero(row >= floor)
        if top_k:
            listed = listed[row[listed] >= np.partition(row[listed], -top_k)[-top_k]]
        listed = listed[np.lexsort((-listed, -row[listed]))]
        weights = np.exp(row[listed].astype(np.float64) - best)
        before = (np.cumsum(weights) - weights) / (weights.sum() if top_k else total)
        if (np.abs(before - top_p) < _NEAR_CUT).any():
            return None
        end = int((before < top_p).sum())
        if top_k or end < len(listed):
            return listed[:end]
        wanted *= _LONGER
    return None


def cut_by_sorting(scores: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Return scores [rows, vocab] cut as `apply_top_k_top_p_pytorch` of vLLM does it, with a stable sort."""
    ordered, order = scores.sort(dim=-1, stable=True)
    if top_k:
        ordered = ordered.masked_fill(ordered < ordered[:, -top_k, None], -math.inf)
    mass = ordered.softmax(dim=-1).cumsum(dim=-1)
    cut = mass <= 1 - torch.tensor(top_p, dtype=torch.float32, device=scores.device)
    cut[:, -1] = False
    return torch.empty_like(scores).scatter_(1, order, ordered.masked_fill(cut, -math.inf))


def choices(scores: torch.Tensor, tokens: torch.Tensor, asked: np.ndarray) -> RowChoices:
    """Return `tokens` [rows] int64 with log p, to 1e-6, under softmax(scores) [rows, vocab] float32."""
    best = scores.max(dim=-1, keepdim=True).values
    log_sums = best[:, 0].double() + (scores - best).exp().sum(dim=-1).double().log()
    wanted = torch.stack([tokens, torch.from_numpy(asked).to(tokens.device)], dim=1)
    logp = (scores.gather(1, wanted).double() - log_sums[:, None]).T.cpu().numpy()
    return RowChoices(tokens.cpu().numpy(), logp[0], logp[1], np.ones(len(asked), bool))


class VllmRule:
    """The rule on one device: by the likely and the loud tokens where these settle a row (on a CPU), else by all."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._noise = TorchVllmNoise(torch, device)
        self._sieve: VllmNoiseSieve | None = None
        self._loud_bits = 0

    def choose(self, logits: torch.Tensor, sessions: Sequence[VerificationInput], asked: np.ndarray) -> RowChoices:
        """Return the token of every row, its log p and that of the token asked for.

        Args:
            logits: [sum of rows, vocab], the target's.
            sessions: sessions of the rows.
            asked: [sum of rows] int64, a token of each row.
        """
        scores = scores_by_session(logits, sessions, vllm_scores, torch.float32)
        return choices(scores, self._tokens(scores, sessions), asked)

    def _tokens(self, scores: torch.Tensor, sessions: Sequence[VerificationInput]) -> torch.Tensor:
        """Return [rows] int64 the argmax of scores plus noise; of the scores alone at temperature 0."""
        tokens = scores.argmax(dim=-1)
        noisy, states = _states(sessions)
        if self._device.type == "cpu":
            noisy, states = self._settle_by_few(scores, tokens, noisy, states)
        if noisy:
            rows = torch.tensor(noisy, device=self._device)
            tokens[rows] = self.argmax(scores[rows], torch.tensor(states, device=self._device))
        return tokens

    def _settle_by_few(
        self, scores: torch.Tensor, tokens: torch.Tensor, noisy: list[int], states: list[int]
    ) -> tuple[list[int], list[int]]:
        """Put the tokens of rows that the likely and the loud settle into `tokens`; return the rows that are left."""
        vocab = scores.shape[1]
        if self._sieve is None or self._sieve.vocab != vocab:
            self._sieve = VllmNoiseSieve(vocab)
            self._loud_bits = self._sieve.most_bits(_LOUD)
        left: tuple[list[int], list[int]] = ([], [])
        of_rows, into = scores.numpy(), tokens.numpy()
        for row, state in zip(noisy, states, strict=True):
            of_row = of_rows[row]
            floor = of_row.max() - np.float32(_LISTED_BELOW)
            bits = self._sieve.bits(state)
            listed = np.flatnonzero((of_row >= floor) | (bits <= self._loud_bits))
            sums = of_row[listed] + gumbel32_of_bits(bits[listed])
            best = int(sums.argmax())
            if sums[best] > floor + np.float32(_LOUD):  # no other token has so large a sum
                into[row] = listed[best]
            else:
                left[0].append(row)
                left[1].append(state)
        return left

    def argmax(self, scores: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return [rows] the argmax of scores [rows, vocab] float32 + G, of which the portable logarithm is the judge.

        The machine's logarithm, which is faster, leaves those tokens whose sums come close to the largest.
        """
        bits = self._noise.hashed(states, torch.arange(scores.shape[1], device=self._device))
        total = scores + self._noise.fast_gumbel32_of_bits(bits)
        best, tokens = torch.max(total, dim=-1)
        close = total >= (best - _NEAR - _NEAR_RELATIVE * best.abs())[:, None]
        for row in (close.sum(dim=-1) > 1).nonzero()[:, 0].tolist():
            tied = close[row].nonzero()[:, 0]
            sums = scores[row, tied] + self._noise.gumbel32_of_bits(bits[row, tied])
            tokens[row] = tied[(sums == sums.max()).nonzero()[0, 0]]
        return tokens


def _states(sessions: Sequence[VerificationInput]) -> tuple[list[int], list[int]]:
    """Return the rows that are drawn, and the state of the noise of each."""
    noisy: list[int] = []
    states: list[int] = []
    first = 0
    for session in sessions:
        if session.sampling.temperature > 0:
            noisy += range(first, first + session.rows)
            position = len(session.transcript)
            states += [row_state(session.sampling.seed, position + row) for row in range(session.rows)]
        first += session.rows
    return noisy, states
