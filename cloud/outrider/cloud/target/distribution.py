"""The distribution that a session's rows are sampled from: the target's logits after the session's settings.

Every row knows what came before it *including the drafts earlier in its own block*, so a penalty counts a draft that
is verified in the same step exactly as if it had been committed before.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from outrider.cloud.target.verification import VerificationInput
from outrider.proto.token_counts import TokenCounts
from outrider.proto.types import Sampling, token_ids


def are_numbers(rows: torch.Tensor) -> bool:
    """Return whether there is text to make of logits or scores [rows, vocab]: none is NaN or +inf, one a row is finite.

    It looks at all of a row: a mask, allowed tokens or a short list may hide what is no number from the law of a text,
    which is then another one.
    """
    return bool(rows.amax(dim=-1).isfinite().all())


def processed_logits(logits: torch.Tensor, session: VerificationInput) -> torch.Tensor:
    """Return unnormalised log probabilities [k + 1, vocab] float64 of the processed distribution; -inf: excluded.

    After `adjusted_logits` come, in this order, temperature, top-k, top-p (Holtzman et al. 2020) and min-p (Nguyen et
    al. 2024). At temperature 0 none of them does: only the argmax matters. Ties at a cut are kept by top-k. Of
    tokens that tie at top-p's, the larger ids stay, as where transformers and vLLM sort stably (on a CPU, torch.sort
    orders equals of more than 16 tokens by no rule that could be followed). `logits` are [k + 1, vocab] float32.
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

    They come in this order: grammar, allowed tokens, `min_tokens`, bias, repetition penalty (Keskar et al. 2019,
    section 4.1), presence and frequency penalty, n-grams. Raises `FloatingPointError` where they are no numbers.
    """
    sampling = session.sampling
    scores = masked(logits.double(), session)
    if sampling.logit_bias:
        biased = torch.tensor([token for token, _ in sampling.logit_bias], device=scores.device)
        scores[:, biased] += torch.tensor([bias for _, bias in sampling.logit_bias], device=scores.device).double()
    if sampling.has_penalties:
        _penalise(scores, session)
    if sampling.no_repeat_ngram_size:
        _forbid_repeats(scores, session)
    if not are_numbers(scores):
        raise FloatingPointError("a session's settings make scores of its logits that are no numbers")
    return scores


def masked(scores: torch.Tensor, session: VerificationInput) -> torch.Tensor:
    """Return `scores` [k + 1, vocab] with -inf for what the grammar, the allowed tokens or `min_tokens` exclude."""
    if session.allowed is not None:
        scores = scores.masked_fill(~torch.from_numpy(session.allowed).to(scores.device), -math.inf)
    if session.sampling.allowed_tokens:
        allowed = torch.tensor(session.sampling.allowed_tokens, device=scores.device)
        kept = torch.full_like(scores, -math.inf)
        kept[:, allowed] = scores[:, allowed]
        scores = kept
    return _without_ends(scores, session) if session.rows_before_end else scores


def _without_ends(scores: torch.Tensor, session: VerificationInput) -> torch.Tensor:
    """Return `scores` [k + 1, vocab] with -inf for EOS and stop tokens in the rows before `min_tokens`.

    A row where nothing else may come, such as that after a complete grammar, keeps them: some token must come.
    """
    ends = {*(session.eos_tokens or ()), *session.sampling.stop_tokens}
    columns = torch.tensor(sorted(token for token in ends if token < scores.shape[1]), device=scores.device).long()
    early = scores[: session.rows_before_end].index_fill(1, columns, -math.inf)
    only_ends = early.amax(dim=-1, keepdim=True) == -math.inf
    early = torch.where(only_ends, scores[: session.rows_before_end], early)
    return torch.cat([early, scores[session.rows_before_end :]])


def _penalise(scores: torch.Tensor, session: VerificationInput) -> None:
    """Penalise the tokens that came before, a few columns of `scores` [k + 1, vocab], in place."""
    counts = session.counts or TokenCounts(session.prompt_length, session.transcript)
    block = np.array(token_ids(session.block), dtype=np.int64)
    drafted = np.unique(block)
    earlier = np.zeros((session.rows, len(drafted)), dtype=np.int64)  # in the same block
    earlier[np.arange(1, session.rows), np.searchsorted(drafted, block)] = 1
    used = counts.used

    def penalised(tokens: np.ndarray, earlier: np.ndarray) -> torch.Tensor:
        """Return the columns [rows, n] of `tokens` [n], which came `earlier` [rows or 1, n] times beside `counts`."""
        in_text = torch.from_numpy(counts.in_text(tokens) + earlier).to(scores.device)
        seen = (in_text + torch.from_numpy(counts.in_prompt(tokens)).to(scores.device)) > 0
        columns = scores.index_select(1, torch.from_numpy(tokens).to(scores.device))
        return _penalised(columns, in_text, seen, session.sampling)

    of_drafted = penalised(drafted, earlier.cumsum(axis=0))
    for tokens, columns in (
        (used, penalised(used, np.zeros((1, len(used)), np.int64))),
        (drafted, of_drafted),  # after those of the transcript alone, which it corrects
    ):
        scores.index_copy_(1, torch.from_numpy(tokens).to(scores.device), columns)


def _penalised(columns: torch.Tensor, in_text: torch.Tensor, seen: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return penalised `columns` [rows, n] of scores; `in_text` counts generated tokens, `seen` also the prompt's."""
    if sampling.repetition_penalty != 1:
        factor = sampling.repetition_penalty
        columns = torch.where(seen, torch.where(columns > 0, columns / factor, columns * factor), columns)
    in_text = in_text.double()  # a float times integers would be float32
    return columns - sampling.presence_penalty * (in_text > 0).double() - sampling.frequency_penalty * in_text


def _forbid_repeats(scores: torch.Tensor, session: VerificationInput) -> None:
    """Exclude, in place, the tokens of each row that would complete an n-gram of the tokens before it once more.

    A row where nothing else may come keeps its tokens: some token must come.
    """
    n = session.sampling.no_repeat_ngram_size
    tokens = np.array([*session.transcript, *token_ids(session.block)], dtype=np.int64)
    for row, length in zip(scores, range(len(session.transcript), len(tokens) + 1), strict=True):
        if length < n:
            continue
        before = tokens[:length]
        follow = np.arange(n - 1, length)  # indices of tokens that end an n-gram
        for back in range(1, n):
            follow = follow[before[follow - back] == before[-back]]
        repeated = before[follow]
        columns = torch.from_numpy(repeated[repeated < scores.shape[1]]).to(scores.device)
        kept = row.index_fill(0, columns, -math.inf)
        if kept.amax() > -math.inf:
            row.copy_(kept)


def _top_p(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the fewest most likely tokens whose probabilities sum to `top_p` or more; the larger id first in a tie."""
    ordered, order = torch.sort(scores, dim=-1, stable=True)
    ordered, order = ordered.flip(-1), order.flip(-1)
    probability = torch.softmax(ordered, dim=-1)
    before = probability.cumsum(dim=-1) - probability
    ordered = ordered.masked_fill(before >= top_p, -math.inf)
    return torch.empty_like(scores).scatter_(1, order, ordered)
