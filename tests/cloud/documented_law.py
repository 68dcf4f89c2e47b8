"""The law of the next token as the documentation has it, token by token and without torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from outrider.proto.types import Sampling


def documented_law(
    logits: Mapping[int, float],
    prompt: tuple[int, ...],
    text: tuple[int, ...],
    sampling: Sampling,
    eos: Collection[int] = (),
) -> dict[int, float]:
    """{token: probability} after `prompt` and `text`; `logits` have the tokens that a grammar allows."""
    score = dict(logits)
    if sampling.allowed_tokens:
        score = {t: s for t, s in score.items() if t in sampling.allowed_tokens}
    if len(text) < sampling.min_tokens:
        score = {t: s for t, s in score.items() if t not in eos and t not in sampling.stop_tokens} or score
    for t, bias in sampling.logit_bias:
        if t in score:
            score[t] += bias
    for t in score:
        if t in prompt + text:
            factor = sampling.repetition_penalty
            score[t] = score[t] / factor if score[t] > 0 else score[t] * factor
        score[t] -= sampling.presence_penalty * (t in text) + sampling.frequency_penalty * text.count(t)
    if sampling.no_repeat_ngram_size:
        n, whole = sampling.no_repeat_ngram_size, prompt + text
        grams = {whole[at : at + n] for at in range(len(whole) - n + 1)}
        score = {t: s for t, s in score.items() if (*whole[max(0, len(whole) - n + 1) :], t) not in grams} or score
    if sampling.temperature == 0:
        return {max(score, key=lambda t: score[t]): 1.0}
    score = {t: s / sampling.temperature for t, s in score.items()}
    if sampling.top_k:
        score = dict(sorted(score.items(), key=lambda item: -item[1])[: sampling.top_k])
    law = normalised({t: math.exp(s) for t, s in score.items()})
    if sampling.top_p < 1:
        kept, total = {}, 0.0
        for t in sorted(law, key=lambda t: -law[t]):
            if total >= sampling.top_p:
                break
            kept[t] = law[t]
            total += law[t]
        law = normalised(kept)
    if sampling.min_p:
        law = normalised({t: p for t, p in law.items() if p >= sampling.min_p * max(law.values())})
    return law


def normalised(weights: Mapping[int, Any]) -> dict[int, Any]:
    """Weights divided by their sum."""
    total = sum(weights.values())
    return {t: weight / total for t, weight in weights.items()}
