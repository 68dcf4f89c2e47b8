"""The documented rule for one token, written apart from the product: plain float64, one position at a time."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.proto.types import Sampling

RIVALS = 4
_MASK = (1 << 64) - 1
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True)
class Choice:
    """The token of one position.

    Attributes:
        token: its id.
        logp: log p by the processed distribution; None: a cut is so close that rounding may move it.
        logprob: log p by the model's own distribution.
        rivals: tokens that came next, the likeliest first.
        doubtful: whether rounding may decide between it and another.
        doubt: what rounding may add to a log probability.
    """

    token: int
    logp: float | None
    logprob: float
    rivals: tuple[int, ...]
    doubtful: bool
    doubt: float


class NoLaw(Exception):
    """Settings with which a text has no law, even in float64."""


def choose(
    logits: np.ndarray,
    sampling: Sampling,
    text: Sequence[int],
    prompt_length: int,
    ends: Collection[int],
    allowed: np.ndarray | None,
    rounding: float,
) -> Choice:
    """Return the token that follows `text`.

    Args:
        logits: [vocab] the model's.
        sampling: settings of the text.
        text: prompt and text so far.
        prompt_length: tokens of the prompt.
        ends: EOS tokens.
        allowed: [vocab] bool, what the grammar allows; None: there is none.
        rounding: share of the largest logit that another order of sums may change.

    Raises:
        NoLaw: what is left after the settings is no number.
    """
    own = logits.astype(np.float64)
    doubt = rounding * max(1.0, float(np.abs(own).max())) / (min(1.0, sampling.temperature) or 1.0)
    with np.errstate(over="ignore", invalid="ignore"):
        edited = _edited(own, sampling, text, prompt_length, ends, allowed)
        scores = edited if sampling.temperature == 0 else (edited - edited.max()) / sampling.temperature
    if not np.isfinite(edited.max()) or np.isnan(scores).any():
        raise NoLaw("the settings leave no number")
    logprobs = own - _log_sum(own)
    if sampling.temperature == 0:
        order = np.argsort(-edited, kind="stable")
        token = int(order[0])
        logp = float(edited[token] - _log_sum(edited))
        close = edited[order[0]] - edited[order[1]] <= 2 * doubt
        return Choice(token, logp, float(logprobs[token]), _finite(edited, order), bool(close), doubt)
    noise = _gumbel(sampling.seed, len(text), len(scores))
    kept = [_cut(scores, sampling, slack) for slack in (0.0, doubt, -doubt)]
    orders = [np.argsort(-np.where(keep, scores + noise, -np.inf), kind="stable") for keep in kept]
    total, order = scores + noise, orders[0]
    token = int(order[0])
    close = total[order[0]] - np.where(kept[0], total, -np.inf)[order[1]] <= 2 * doubt
    logp = float(scores[token] - _log_sum(np.where(kept[0], scores, -np.inf)))
    same_cut = all((keep == kept[0]).all() for keep in kept)
    return Choice(
        token,
        logp if same_cut else None,
        float(logprobs[token]),
        _finite(np.where(kept[0], scores, -np.inf), order),
        bool(close) or any(each[0] != token for each in orders),
        doubt,
    )


def _edited(
    logits: np.ndarray,
    sampling: Sampling,
    text: Sequence[int],
    prompt_length: int,
    ends: Collection[int],
    allowed: np.ndarray | None,
) -> np.ndarray:
    """Return [vocab] logits with masks, bias and penalties."""
    scores = logits.copy()
    if allowed is not None:
        scores[~allowed] = -np.inf
    if sampling.allowed_tokens:
        others = np.ones(len(scores), bool)
        others[list(sampling.allowed_tokens)] = False
        scores[others] = -np.inf
    if len(text) - prompt_length < sampling.min_tokens:
        held = scores.copy()
        held[list({*ends, *sampling.stop_tokens})] = -np.inf
        if held.max() > -np.inf:
            scores = held
    for token, bias in sampling.logit_bias:
        scores[token] += bias
    for token in set(text):
        factor = sampling.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    written = text[prompt_length:]
    for token in set(written):
        scores[token] -= sampling.presence_penalty + sampling.frequency_penalty * written.count(token)
    return scores


def _cut(scores: np.ndarray, sampling: Sampling, slack: float) -> np.ndarray:
    """Return [vocab] bool, the tokens that top-k, top-p and min-p keep, each with its bound moved by `slack`."""
    keep = scores > -np.inf
    order = np.argsort(-scores, kind="stable")
    best = order[0]
    if 0 < sampling.top_k < len(scores):
        keep &= scores >= scores[order[sampling.top_k - 1]] - slack
        keep[best] = True
    if sampling.top_p < 1:
        p = np.where(keep, np.exp(scores), 0.0)
        p /= p.sum()
        before = np.concatenate([[0.0], np.cumsum(p[order])[:-1]])
        nucleus = np.zeros(len(scores), bool)
        nucleus[order[before < sampling.top_p + slack]] = True
        keep &= nucleus
    if sampling.min_p > 0:
        keep &= scores >= math.log(sampling.min_p) + scores[best] - slack
    keep[best] = True
    return keep


def _mix(number: int) -> int:
    number = ((number ^ (number >> 30)) * _FIRST) & _MASK
    number = ((number ^ (number >> 27)) * _SECOND) & _MASK
    return number ^ (number >> 31)


def _gumbel(seed: int, position: int, vocab: int) -> np.ndarray:
    """Return [vocab] the noise of a position."""
    key = _mix(_mix((seed + _STEP) & _MASK) ^ _mix((position * _FIRST + _STEP) & _MASK))
    with np.errstate(over="ignore"):
        bits = (np.arange(vocab, dtype=np.uint64) + np.uint64(1)) * np.uint64(_STEP) + np.uint64(key)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(_FIRST)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(_SECOND)
        bits ^= bits >> np.uint64(31)
    drawn = (bits >> np.uint64(12)).astype(np.float64)
    return -np.log(-np.log((drawn + 0.5) * 2.0**-52))


def _log_sum(scores: np.ndarray) -> float:
    best = float(scores.max())
    with np.errstate(over="ignore"):
        return best + math.log(float(np.exp(scores - best).sum()))


def _finite(scores: np.ndarray, order: np.ndarray) -> tuple[int, ...]:
    return tuple(int(token) for token in order[1 : 1 + RIVALS] if scores[token] > -np.inf)
