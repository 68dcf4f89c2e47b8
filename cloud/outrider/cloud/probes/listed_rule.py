"""The coupled rule on rows of which the likeliest tokens alone are known: a certain token, or what the row lacks.

A token that a list lacks is no likelier than the list's bound, and its noise is known. Three kinds are told apart:
listed tokens that are kept whatever the rest is, listed tokens that may be kept, and missing ones that may be kept and
win. A token is certain where the winner of the second kind is of the first, and there is none of the third: then it is
that of `Sampler` over the whole row. Log probabilities stand for logits, since constants cancel.
"""

from __future__ import annotations

import functools
import math
import threading
from dataclasses import dataclass, field

import numpy as np

from outrider.cloud.probes.scoring import ListedRow, ServerFacts
from outrider.cloud.target.verification import VerificationInput
from outrider.proto.errors import InvalidArgument, OutriderError
from outrider.proto.noise import NoiseSieve, gumbel, row_key
from outrider.proto.token_counts import TokenCounts
from outrider.proto.types import Sampling, token_ids

_NEAR_TIE = 1e-9  # more than rounding adds where the best score, from which all are counted, may be missing
_NEAR_CUT = 1e-5  # how far from 1 the sum of a row may be: servers tell float32, off by 4e-6 where logits are 64
_MOST_NAMED = 2048  # where more are missing, not all of them are asked for by name
_LARGEST_NOISE = 37.0


@dataclass(frozen=True, slots=True, eq=False)
class ListedChoice:
    """The target's token in one row, or what the row lacks.

    Attributes:
        token: the target's; None: open.
        logp: natural log of its processed probability; NaN where the list leaves more than 3e-5 of it open, as a short
            list mostly does at a temperature other than 0 and 1 without a cut.
        wanted: [m] int64, missing tokens that bring an open row further: once they are known, it is certain or has at
            most two more wishes. A longer list serves as well, and is needed where nothing is wanted.
    """

    token: int | None
    logp: float = math.nan
    wanted: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))


def choose(row: ListedRow, session: VerificationInput, j: int, vocab: int) -> ListedChoice:
    """Return the choice in row `j` of a session's block, at position len(transcript) + j, after the drafts before it.

    Raises `FloatingPointError` where the settings leave no token a chance.
    """
    known = _known(row, session, j, vocab)
    if len(known.tokens):
        drawn = session.sampling.temperature > 0
        return _drawn(known, session.sampling, len(session.transcript) + j) if drawn else _greedy(known)
    if known.ceiling == -math.inf:
        raise FloatingPointError("a session's settings leave no token of the row a chance")
    return ListedChoice(None, wanted=known.missing()[0])


def refusal(sampling: Sampling, facts: ServerFacts, vocab: int, eos_tokens: frozenset[int]) -> OutriderError | None:
    """Return why texts of these settings cannot be promised to be exact on a server; None: they can be.

    Where lists are limited, they must have more tokens than top-k keeps and the settings lower, and tokens that the
    settings raise must be told by name. A tie as long as a whole list is not foreseen: its row stays open.
    """
    if sampling.repetition_penalty != 1:
        why = "needs the target's logits, and this server tells log probabilities; use presence_penalty instead"
        return InvalidArgument(why, field="sampling.repetition_penalty")
    most, names, drawn = facts.max_list, facts.names or facts.names_in_rows, sampling.temperature > 0
    if most >= vocab:
        return None
    top_k = sampling.top_k if drawn and sampling.top_k < vocab else 0
    everything, biases = drawn and not top_k, [bias for _, bias in sampling.logit_bias]
    penalties = {name: getattr(sampling, name) for name in ("presence_penalty", "frequency_penalty")}
    lowers = {
        "grammar": vocab if sampling.grammar else 0,
        "allowed_tokens": vocab if len(sampling.allowed_tokens) > _MOST_NAMED else 0,
        "logit_bias": sum(bias < 0 for bias in biases),
        "min_tokens": len(eos_tokens | {*sampling.stop_tokens}) if sampling.min_tokens else 0,
        **{name: sampling.max_tokens if penalty > 0 else 0 for name, penalty in penalties.items()},
        "no_repeat_ngram_size": vocab if sampling.no_repeat_ngram_size else 0,
    }
    raises = {
        "grammar": sampling.grammar,
        "allowed_tokens": sampling.allowed_tokens,
        "logit_bias": max(biases, default=0) > 0,
    }
    raises |= {name: penalty < 0 for name, penalty in penalties.items()}
    too_few = top_k + sum(lowers.values()) >= most and (top_k or not names or (drawn and sampling.min_p > 0))
    reasons = {
        "top_k": top_k >= most,
        "top_p": everything and sampling.top_p < 1,
        "min_p": everything and not names and sampling.min_p > 0,
        "temperature": everything and not names,
        **{name: (count and too_few) or (raises.get(name) and not names) for name, count in lowers.items()},
    }
    field = next((name for name, refused in reasons.items() if refused), None)
    remedy = f", or set a top_k below {most}" if field in ("top_k", "top_p", "min_p", "temperature") else ""
    why = f"takes more tokens than the {most} that this server lists; start vLLM with --max-logprobs -1{remedy}"
    return InvalidArgument(why, field=f"sampling.{field}") if field else None


def loudest(sampling: Sampling, position: int, count: int, vocab: int) -> np.ndarray:
    """Return the tokens [count] of the loudest noise at a position, the loudest first; none at temperature 0."""
    count = min(count, vocab) if sampling.temperature > 0 else 0
    share = (count + 4 * math.sqrt(count) + 4) / vocab
    bound = -math.log(-math.log1p(-share)) if share < 1 else -math.inf
    tokens = np.flatnonzero(_loud(vocab, sampling, position, bound))
    if len(tokens) < count:
        tokens = np.arange(vocab)
    return tokens[np.argsort(-gumbel(sampling.seed, position, tokens), kind="stable")[:count]]


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """The facts of a row after the adjustments of single tokens.

    Attributes:
        tokens: [n] the listed ones that have a chance, the best first, of equals the larger id.
        scores: [n] of these.
        row: the list.
        rest: [vocab] the most that each missing token can have, -inf elsewhere; None: each can have the list's bound.
        ceiling: the most that any missing token can have; -inf: there is none.
    """

    tokens: np.ndarray
    scores: np.ndarray
    row: ListedRow
    rest: np.ndarray | None
    ceiling: float
    vocab: int

    def missing(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the missing tokens that have a chance, and the most that each can have, [m] each."""
        rest = self.rest
        if rest is None:
            rest = np.full(self.vocab, self.row.bound)
            rest[self.row.tokens] = -math.inf
        tokens = np.flatnonzero(rest > -math.inf)
        return tokens, rest[tokens]

    def wish(self, least: float) -> ListedChoice:
        """Ask for the missing tokens that the settings moved and that can have `least`; else for all, if few."""
        tokens, ceilings = self.missing()
        moved = tokens[(ceilings != self.row.bound) & (ceilings >= least)]
        return ListedChoice(None, wanted=moved if len(moved) else tokens[: len(tokens) * (len(tokens) <= _MOST_NAMED)])

    def rest_of_sum(self, temperature: float) -> tuple[float, float]:
        """Return the least and the most that exp((score - best listed) / T) of the missing tokens sum to.

        Those that nothing moved share the probability that is left, none with more than the bound. By Jensen their sum
        lies between that of equal shares, and that of shares of the bound, as many as there are, and none.
        """
        bound, count, of_moved = self.row.bound, self.vocab - len(self.row.tokens), 0.0
        if self.ceiling == -math.inf:
            return 0.0, 0.0
        unmoved = count
        if self.rest is not None:
            moved = self.rest[(self.rest != bound) & (self.rest > -math.inf)]
            unmoved, of_moved = int((self.rest == bound).sum()), float(self._powers(moved, temperature).sum())
        if not unmoved:
            return 0.0, of_moved
        left, most = 1 - np.exp(self.row.logp).sum(), unmoved * math.exp(bound)
        lacking = (count - unmoved) * math.exp(bound)
        with np.errstate(divide="ignore"):
            logs = np.log(np.clip([left - _NEAR_CUT - lacking, max(left, 0.0) + _NEAR_CUT], 0, most))
        at_bound = self._powers(bound, temperature) * np.exp(logs - bound)
        equal = self._powers(logs - math.log(unmoved), temperature) * unmoved
        return float(min(at_bound[0], equal[0])), float(max(at_bound[1], equal[1])) + of_moved

    @np.errstate(over="ignore")
    def _powers(self, scores: np.ndarray | float, temperature: float) -> np.ndarray:
        powers: np.ndarray = np.exp((scores - self.scores[0]) / temperature)
        return powers

    def reaching(self, sampling: Sampling, position: int, floor: float, best: float) -> np.ndarray:
        """Return the missing tokens that can have a scaled score of `floor`, and with their noise one of `best`."""
        best -= _NEAR_TIE
        unmoved = (self.row.bound - self.scores[0]) / sampling.temperature
        loud = np.zeros(self.vocab, bool)
        if unmoved >= floor and best - unmoved <= _LARGEST_NOISE:
            loud = _loud(self.vocab, sampling, position, best - unmoved)
        if self.rest is not None:
            loud = (loud | (self.rest != self.row.bound)) & (self.rest > -math.inf)
        loud[self.row.tokens] = False
        tokens = np.flatnonzero(loud)
        ceilings = self.row.bound if self.rest is None else self.rest[tokens]
        scaled = (ceilings - self.scores[0]) / sampling.temperature
        totals = scaled + gumbel(sampling.seed, position, tokens)
        return np.compress((scaled >= floor) & (totals >= best), tokens)


def _known(row: ListedRow, session: VerificationInput, j: int, vocab: int) -> _Known:
    tokens, scores, rest = row.tokens, row.logp, None
    ceiling = row.bound if len(tokens) < vocab else -math.inf
    if session.adjusts:
        rest = np.full(vocab, row.bound)  # adjustments keep the order, so those of a bound are bounds
        rest[tokens] = scores
        rest = _adjusted(rest, session, j)
        scores = rest[tokens]
        rest[tokens] = -math.inf
        ceiling = float(rest.max())
    order = np.lexsort((-tokens, -scores))
    order = order[scores[order] > -math.inf]
    return _Known(tokens[order], scores[order], row, rest, ceiling, vocab)


def _adjusted(scores: np.ndarray, session: VerificationInput, j: int) -> np.ndarray:
    """Return `scores` [vocab] after what `adjusted_logits` does to row `j`, but for the repetition penalty."""
    sampling, drafts = session.sampling, np.array(token_ids(session.block[:j]), np.int64)
    if session.allowed is not None:
        scores = np.where(session.allowed[j], scores, -math.inf)
    if sampling.allowed_tokens:
        scores[np.delete(np.arange(len(scores)), sampling.allowed_tokens)] = -math.inf
    if j < session.rows_before_end:
        scores = _without(scores, np.array([*(session.eos_tokens or ()), *sampling.stop_tokens], np.int64))
    if sampling.logit_bias:
        biased, biases = zip(*sampling.logit_bias, strict=True)
        scores[list(biased)] += np.array(biases, np.float32)  # as the wire has them
    if sampling.presence_penalty or sampling.frequency_penalty:
        counts = session.counts or TokenCounts(session.prompt_length, session.transcript)
        used = np.union1d(counts.used, drafts)
        in_text = counts.in_text(used) + (used[:, None] == drafts).sum(axis=1)
        scores[used] -= sampling.presence_penalty * (in_text > 0)
        scores[used] -= sampling.frequency_penalty * in_text
    if n := sampling.no_repeat_ngram_size:
        before = np.array([*session.transcript, *drafts], np.int64)
        follow = np.arange(n - 1, len(before))  # indices of tokens that end an n-gram
        for back in range(1, n):
            follow = follow[before[follow - back] == before[-back]]
        scores = _without(scores, before[follow])
    return scores


def _without(scores: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return `scores` [vocab] with -inf for `tokens`, or as they are where nothing else has a chance.

    Where only missing tokens may have one, no listed token is left, and the row stays open until they are known.
    """
    left = scores.copy()
    left[tokens[tokens < len(left)]] = -math.inf
    return left if left.max() > -math.inf else scores


@functools.lru_cache(maxsize=8)
def _sieve(vocab: int, thread: int) -> NoiseSieve:
    del thread  # each has its own, since a sieve has buffers
    return NoiseSieve(vocab)


def _loud(vocab: int, sampling: Sampling, position: int, bound: float) -> np.ndarray:
    """Return [vocab] bool: where the noise at a position reaches a bound, and hardly anywhere else."""
    return _sieve(vocab, threading.get_ident()).reaches(row_key(sampling.seed, position), bound)


def _greedy(known: _Known) -> ListedChoice:
    best = known.scores[0]
    token = int(known.tokens[known.scores == best].min())
    if known.ceiling >= best:
        tokens, ceilings = known.missing()
        wanted = tokens[(ceilings > best) | ((ceilings == best) & (tokens < token))]
        if len(wanted):
            return ListedChoice(None, wanted=wanted)
    (least, most), listed = known.rest_of_sum(1.0), np.exp(known.scores - best).sum()
    return ListedChoice(token, _logp(0.0, listed + least, listed + most))


def _drawn(known: _Known, sampling: Sampling, position: int) -> ListedChoice:
    best_score, temperature, top_k, top_p = known.scores[0], sampling.temperature, sampling.top_k, sampling.top_p
    scores, ceiling = (known.scores - best_score) / temperature, (known.ceiling - best_score) / temperature
    top_k = top_k if top_k < known.vocab else 0
    cuts = bool(top_k or top_p < 1 or sampling.min_p > 0)
    if cuts and ceiling > 0:  # cuts are counted from the best, which may be missing
        return known.wish(best_score)
    sure = possible = np.ones(len(scores), bool)
    floor = -math.inf  # missing tokens below it are not kept
    if top_k:
        floor = scores[top_k - 1] if top_k <= len(scores) else -math.inf
        possible = scores >= floor
        sure = possible & (scores >= ceiling)
    weights = np.exp(scores) * possible
    if top_p < 1:
        complete = ceiling < floor or ceiling == -math.inf
        least, most = (0.0, 0.0) if complete else known.rest_of_sum(temperature)
        least, most = (weights * sure).sum() + (0.0 if top_k else least), weights.sum() + most
        near = 0.0 if complete else _NEAR_CUT
        at_least, at_most = (np.cumsum(each) - each for each in (weights * sure / most, weights / least))
        if (weights * sure)[scores > ceiling].sum() / most >= top_p + near:
            floor = math.inf
        sure = sure & ((at_most < top_p - near) | (at_most == 0)) & (scores > ceiling)
        possible = possible & (at_least < top_p + near)
    if sampling.min_p > 0:
        floor = max(floor, math.log(sampling.min_p))
        possible = possible & (scores >= math.log(sampling.min_p))
        sure = sure & possible
    totals = np.where(possible, scores + gumbel(sampling.seed, position, known.tokens), -math.inf)
    best = totals.max()
    winner = np.lexsort((known.tokens, -totals))[0]
    if not sure[winner] or (ceiling > 0 and (totals >= best - _NEAR_TIE).sum() > 1):
        return known.wish(best_score + floor * temperature - _NEAR_TIE)
    rest = (0.0, 0.0)
    if floor <= ceiling and ceiling > -math.inf:
        reaching = known.reaching(sampling, position, floor, best)
        if len(reaching):
            return ListedChoice(None, wanted=reaching)
        rest = known.rest_of_sum(temperature)
    least, most = (weights * sure).sum() + (0.0 if cuts else rest[0]), (weights * possible).sum() + rest[1]
    return ListedChoice(int(known.tokens[winner]), _logp(scores[winner], least, most))


def _logp(score: float, least: float, most: float) -> float:
    """Return a score less the log of a sum between `least` and `most`; NaN: that leaves too much open."""
    return float(score - math.log((least + most) / 2)) if most - least <= 3 * _NEAR_CUT * least else math.nan
