"""Settings at their bounds give numbers on every path of the sampler; settings beyond raise before a list is made."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conformance import Suite, Text
from conformance_oracle import Oracle, save_conformance_target
from emulated_vllm import EmulatedCore, emulated_backend

from outrider.cloud.target.distribution import VerificationInput
from outrider.cloud.target.sampler import Sampler
from outrider.cloud.target.shortlist import SMALLEST_VOCAB
from outrider.proto.types import BOUNDS, DraftToken, Sampling

VOCABS = (64, 2 * SMALLEST_VOCAB)  # whole rows, and a short list
EXTREMES: dict[str, tuple[Any, ...]] = {
    "temperature": (1.0, 0.0, BOUNDS["temperature"].low, BOUNDS["temperature"].high),
    **{name: (1.0, BOUNDS[name].low, BOUNDS[name].high) for name in ("repetition_penalty", "top_p")},
    **{name: (0.0, BOUNDS[name].low, BOUNDS[name].high) for name in ("presence_penalty", "frequency_penalty")},
    "logit_bias": ((), tuple((t, BOUNDS["logit_bias"].low if t % 2 else BOUNDS["logit_bias"].high) for t in range(64))),
    "min_p": (0.0, 1.0),
    "top_k": (0, 1, 60),
}
BEYOND = {
    "frequency_penalty": -1e308,
    "presence_penalty": math.inf,
    "repetition_penalty": 1e-320,
    "logit_bias": ((3, 3.4e38), (4, math.nan)),
}


def session(vocab: int, sampling: Sampling) -> VerificationInput:
    prompt = [*range(vocab // 2), 3, 4]
    return VerificationInput(sampling, [*prompt, 5, 5, 6], len(prompt), (DraftToken(5), DraftToken(4)))


def extremes(most: int) -> Iterator[dict[str, Any]]:
    """Settings of which up to `most` are extreme."""
    for values in itertools.product(*EXTREMES.values()):
        chosen = dict(zip(EXTREMES, values, strict=True))
        if sum(value != EXTREMES[name][0] for name, value in chosen.items()) <= most:
            yield chosen


@pytest.mark.parametrize("vocab", VOCABS)
def test_settings_at_their_bounds_give_a_token_and_its_probability(vocab: int) -> None:
    torch.manual_seed(3)
    sampler, logits = Sampler(torch.device("cpu")), 20 * torch.randn(3, vocab)
    for settings in extremes(3 if vocab == VOCABS[0] else 2):
        (sampled,) = sampler.sample(logits.clone(), [session(vocab, Sampling(**settings))])
        assert all(0 <= token.id < vocab for token in sampled.tokens), settings
        assert not any(math.isnan(token.logp or 0.0) for token in sampled.tokens), settings


def beyond(name: str, temperature: float) -> Sampling:
    sampling = Sampling(temperature=temperature, top_k=60, top_p=0.9, frequency_penalty=0.1)
    object.__setattr__(sampling, name, BEYOND[name])
    return sampling


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("name", BEYOND)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_that_are_no_numbers_raise_whatever_made_them(vocab, name, temperature) -> None:
    sampler, logits = Sampler(torch.device("cpu")), torch.randn(3, vocab)
    spoiled = session(vocab, beyond(name, temperature))
    with pytest.raises(FloatingPointError):
        sampler.sample(logits, [spoiled])
    sampled, numbers = sampler.sample_numbers(logits, [spoiled])
    assert not numbers
    assert len(sampled[0].tokens) == 3


def test_a_pass_of_vllms_workers_with_such_scores_is_no_text(tmp_path) -> None:
    oracle = Oracle(save_conformance_target(tmp_path))
    suite = Suite(emulated_backend(EmulatedCore(oracle)), oracle)
    text = Text(suite, suite.prompt(8), beyond("logit_bias", 1.0))
    with pytest.raises(FloatingPointError):
        suite.backend.step([text.row()])
