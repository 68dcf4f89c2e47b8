"""The coupled rule without a logarithm for each token: it looks only at likely tokens and at tokens of loud noise.

Listed are the tokens with log p >= s (a few dozen) and those with G >= g, which `NoiseSieve` finds by integers alone.
Every other token stays below s + g, so if the best log p + G of the listed ones is at least that, it is the argmax over
the whole vocabulary, bit for bit; if not, g is lowered to where it is. (This is the threshold algorithm of Fagin, Lotem
and Naor 2003 for two rankings.) Where top-k, top-p or min-p ends among the likely, no other token can win at all.

For the CPU. Rows of one law are worked on together, with numpy, whose calls cost a third of torch's on short arrays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from outrider.proto.noise import NoiseSieve, portable_log, uniform
from outrider.proto.types import Sampling

# The machine's own logarithm is within this of the portable one; sums closer than this are settled by the latter.
NEAR_TIE = 1e-9
SMALLEST_VOCAB = 1024
_COLDEST = 1e-3  # below it the scores of near ties are far apart
_FLOAT32 = np.finfo(np.float32)
_BLOCK = 16  # tokens of which one maximum is kept, to find the list's last score
_LISTED = 64
_LOUD = 4.5  # one token in 90
_LISTED_FOR_A_CUT = 256
_LARGEST_NOISE = 37.0
# Probabilities whose sum comes this close to top_p are left to the whole row; sums of float32, of float64.
_NEAR_CUT = 4e-6
_NEAR_EXACT_CUT = 1e-9
_LONGER = 8  # times as long is the next list of a row that is not settled
_LOWEST = float(_FLOAT32.min)


@dataclass(frozen=True, slots=True)
class Law:
    """The settings that turn a row of logits into a distribution; rows of equal laws are sampled together."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def of(cls, sampling: Sampling, vocab: int) -> Law:
        """Return the law of a session; a top-k of the whole vocabulary is none, and at temperature 0 nothing is cut."""
        if sampling.temperature == 0:
            return cls(0.0)
        top_k = sampling.top_k if sampling.top_k < vocab else 0
        return cls(sampling.temperature, top_k, sampling.top_p, sampling.min_p)

    @property
    def cuts(self) -> bool:
        """Whether it excludes tokens."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def listed(self) -> int:
        """Tokens to list, so that a cut likely ends among them."""
        return max(2 * self.top_k, _LISTED_FOR_A_CUT) if self.cuts else _LISTED


@dataclass(frozen=True, slots=True)
class RowChoices:
    """The tokens, log p of them and of the tokens asked for, [rows] each; `certain` False: the row is not settled."""

    tokens: np.ndarray
    logp: np.ndarray
    logp_of_asked: np.ndarray
    certain: np.ndarray

    @classmethod
    def none(cls, rows: int) -> RowChoices:
        """Return a choice that settles no row."""
        return cls(np.zeros(rows, np.int64), np.zeros(rows), np.zeros(rows), np.zeros(rows, bool))

    def put(self, rows: np.ndarray, choice: RowChoices) -> None:
        """Put the rows of another choice in place of `rows` [n]."""
        for name in ("tokens", "logp", "logp_of_asked", "certain"):
            getattr(self, name)[rows] = getattr(choice, name)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of one law: logits [rows, vocab], the best logit of each row [rows], and the temperature."""

    logits: np.ndarray
    best: np.ndarray
    temperature: float

    def row(self, i: int) -> _Rows:
        """Return row `i` alone."""
        return _Rows(self.logits[i : i + 1], self.best[i : i + 1], self.temperature)

    def scores(self, rows: Any, tokens: Any) -> Any:
        """Return log p up to a constant of the row, 0 for the best, in float64, for rows and tokens [n] or one each."""
        return self.scaled(self.logits[rows, tokens], rows)

    def scaled(self, logits: Any, rows: Any) -> Any:
        """Return the scores of `logits` in their rows."""
        return (logits.astype(np.float64) - self.best[rows]) / self.temperature

    def log_sums(self) -> np.ndarray:
        """Return [rows] log of the sum of exp(score), to 1e-6."""
        below = (self.logits - self.best.astype(self.logits.dtype)[:, None]).astype(np.float32, copy=False)
        np.multiply(below, np.float32(1 / self.temperature), out=below)
        torch.from_numpy(below).exp_()  # numpy's takes three times as long
        log_sums: np.ndarray = np.log(below.sum(axis=1), dtype=np.float64)
        return log_sums

    def exact_log_sum(self) -> float:
        """Return `log_sums` of the first row, to 1e-12."""
        below = (self.logits[0].astype(np.float64) - self.best[0]) / self.temperature
        return math.log(torch.from_numpy(below).exp_().sum().item())


@dataclass(frozen=True, slots=True)
class _Close:
    """The best sum of score and G of each row [rows], and the tokens within `NEAR_TIE` of it, [n] each by row."""

    best: np.ndarray
    rows: np.ndarray
    tokens: np.ndarray
    scores: np.ndarray
    bits: np.ndarray


class Shortlist:
    """The rule for one vocabulary and one thread: it owns its work buffers."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self._sieve = NoiseSieve(vocab)

    @np.errstate(over="ignore")  # a logit of -1e38 at a low temperature is one of -inf
    def choose(self, logits: np.ndarray, law: Law, keys: list[int], asked: np.ndarray) -> RowChoices:
        """Return the token of every row, argmax_t log p(t) + G(key, t); at temperature 0 the argmax of the logits.

        log p is right to 1e-6. Nothing is settled where a row's best logit is no float32 number or the temperature is
        almost 0, and a row whose cut is uncertain is not settled either.

        Args:
            logits: [rows, vocab] float32 or float64, -inf where a token is excluded.
            law: the law of all rows.
            keys: [rows] `row_key` of each.
            asked: [rows] int64, a token of each row whose log p is wanted.
        """
        best = logits.max(axis=1).astype(np.float64)
        if not (np.abs(best) <= _FLOAT32.max).all() or 0 < law.temperature < _COLDEST:
            return RowChoices.none(len(logits))
        rows = _Rows(logits, best, law.temperature or 1.0)
        if law.cuts:
            return self._choose_from_part(rows, law, keys, asked)
        if law.temperature == 0:
            tokens = logits.argmax(axis=1)
        else:
            tokens = self._choose_from_all(rows, law, keys, [_LOUD] * len(keys))
        log_sums, every_row = rows.log_sums(), np.arange(len(logits))
        logp, logp_of_asked = (rows.scores(every_row, wanted) - log_sums for wanted in (tokens, asked))
        return RowChoices(tokens, logp, logp_of_asked, np.ones(len(logits), bool))

    def _choose_from_all(self, rows: _Rows, law: Law, keys: list[int], loud: list[float]) -> np.ndarray:
        """Return [rows] tokens where none is excluded; listed are the likely and those of noise above `loud` [rows]."""
        floor = self._floor(rows, law.listed)
        mask = rows.logits >= floor[:, None]
        for row, key, bound in zip(mask, keys, loud, strict=True):
            if bound < _LARGEST_NOISE:
                row |= self._sieve.reaches(key, bound)
        close = self._best_sums(rows, mask, np.array(keys, np.uint64))
        tokens = _winners(close)
        margin = close.best - rows.scaled(floor, slice(None)) - NEAR_TIE
        for i in np.flatnonzero(margin < loud).tolist():
            tokens[i] = self._choose_from_all(rows.row(i), law, keys[i : i + 1], [float(margin[i])])[0]
        return tokens

    def _choose_from_part(self, rows: _Rows, law: Law, keys: list[int], asked: np.ndarray) -> RowChoices:
        """Return what `choose` does, where tokens are excluded."""
        count = len(keys)
        mask = np.zeros(rows.logits.shape, bool)
        log_sums = np.zeros(count) if law.top_k else rows.log_sums()
        certain, logp_of_asked = np.zeros(count, bool), np.full(count, -math.inf)
        for i, floor in enumerate(self._floor(rows, law.listed).tolist()):
            kept = self._kept(rows.row(i), law, floor, float(log_sums[i]))
            if kept is None:
                mask[i, 0] = True  # any token: every row needs one
                continue
            certain[i], mask[i, kept] = True, True
            log_sums[i] = math.log(np.exp(rows.scores(i, kept)).sum())
            if mask[i, asked[i]]:
                logp_of_asked[i] = rows.scores(i, asked[i]) - log_sums[i]
        tokens = _winners(self._best_sums(rows, mask, np.array(keys, np.uint64)))
        return RowChoices(tokens, rows.scores(np.arange(count), tokens) - log_sums, logp_of_asked, certain)

    def _kept(self, row: _Rows, law: Law, floor: float, log_sum: float) -> np.ndarray | None:
        """Return the tokens [n] of one row that the law keeps; None: a sum comes too close to top-p.

        The first list has the tokens of `floor` and above. Where it does not settle the row, longer ones follow, with
        a sum over the vocabulary in float64, up to the list of all tokens that are not excluded.
        """
        tokens, kept = _cut(row, law, floor, log_sum, _NEAR_CUT)
        listed = law.listed
        while kept is None and floor > _LOWEST:
            if listed == law.listed:
                log_sum = row.exact_log_sum()
            listed *= _LONGER
            floor = float(self._floor(row, listed)[0]) if listed < self.vocab // _BLOCK else _LOWEST
            tokens, kept = _cut(row, law, floor, log_sum, _NEAR_EXACT_CUT)
        return None if kept is None else tokens[kept]

    def _floor(self, rows: _Rows, listed: int) -> np.ndarray:
        """Return [rows] a logit that at least `listed` tokens reach, or all that are not excluded, and few more.

        It is one of the maxima of blocks, which are far fewer than the tokens.
        """
        blocks = self.vocab // _BLOCK
        best_of_block = rows.logits[:, : blocks * _BLOCK].reshape(-1, _BLOCK, blocks).max(axis=1)
        last = blocks - min(listed, blocks)
        return np.maximum(np.partition(best_of_block, last, axis=1)[:, last], _FLOAT32.min)

    def _best_sums(self, rows: _Rows, mask: np.ndarray, keys: np.ndarray) -> _Close:
        """Return the best sums among the tokens of a mask [rows, vocab], which has at least one in each row."""
        flat = np.flatnonzero(mask)
        starts = np.searchsorted(flat, np.arange(len(mask) + 1) * self.vocab)
        row = np.repeat(np.arange(len(mask)), starts[1:] - starts[:-1])
        token = flat - row * self.vocab
        scores, bits = rows.scaled(rows.logits.take(flat), row), self._sieve.bits(keys[row], token)
        totals = scores - np.log(-np.log(uniform(bits)))
        best = np.maximum.reduceat(totals, starts[:-1])
        close = np.flatnonzero(totals >= best[row] - NEAR_TIE)
        return _Close(best, row[close], token[close], scores[close], bits[close])


def _winners(close: _Close) -> np.ndarray:
    """Return [rows] the token of the largest sum in each row; near ties by the portable noise, then token id."""
    if len(close.tokens) == len(close.best):
        return close.tokens
    exact = close.scores - portable_log(-portable_log(uniform(close.bits)))
    order = np.lexsort((close.tokens, -exact, close.rows))
    return close.tokens[order[np.unique(close.rows[order], return_index=True)[1]]]


def _cut(row: _Rows, law: Law, floor: float, log_sum: float, near: float) -> tuple[np.ndarray, np.ndarray | None]:
    """List the tokens of `floor` and above in one row, and keep those that top-k, top-p and min-p keep.

    `_LOWEST` as floor lists all tokens that are not excluded; `log_sum`, that of exp(score) over all tokens, is not
    used with top-k. Sums of probabilities that come as close as `near` to top-p settle nothing.

    Returns:
        The list [n], and which of it to keep, [m] indices; None: the list does not settle it.
    """
    tokens = np.flatnonzero(row.logits[0] >= floor)
    scores = row.scores(0, tokens)
    max_of_rest = float(row.scaled(np.float64(floor), 0)) if floor > _LOWEST else -math.inf
    ordered = np.sort(scores)[::-1]
    end, complete = len(ordered), floor <= _LOWEST
    if law.top_k > 0:
        least = ordered[law.top_k - 1] if law.top_k <= end else max_of_rest
        if least <= max_of_rest and not complete:
            return tokens, None
        end, complete = int((ordered >= least).sum()), True
    if law.top_p < 1:
        weights = np.exp(ordered[:end])
        probability = weights / (weights.sum() if complete else math.exp(log_sum))
        before = np.cumsum(probability) - probability
        if (np.abs(before - law.top_p) < (_NEAR_EXACT_CUT if complete else near)).any():
            return tokens, None
        kept = int((before < law.top_p).sum())
        if not complete and (kept == end or ordered[kept - 1] <= max_of_rest):
            return tokens, None
        end, complete = kept, True
    if law.min_p > 0:
        if not complete and math.log(law.min_p) <= max_of_rest:
            return tokens, None
        end = min(end, int((ordered >= math.log(law.min_p)).sum()))
    above, tied = np.flatnonzero(scores > ordered[end - 1]), np.flatnonzero(scores == ordered[end - 1])
    return tokens, np.concatenate([above, tied[len(above) + len(tied) - end :]])  # the larger ids of those that tie
