"""vLLM's own sampler in the place of the rule in torch: the same tokens for every setting, whatever it saw before."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from outrider.cloud.distribution import VerificationInput
from outrider.cloud.sampling import Sampler
from outrider.cloud.vllm.native_rule import NativeRule, native_settings
from outrider.cloud.vllm_rule import VllmRule
from outrider.proto.types import DraftToken, Noise, Sampling, token_ids

CPU = torch.device("cpu")
VOCAB = 1100
SETTINGS = [
    Sampling(temperature=1.0, seed=3),
    Sampling(),
    Sampling(temperature=0.7, top_k=20, top_p=0.9, seed=(1 << 64) - 1),  # vLLM's -1, which it takes for no seed
    Sampling(temperature=1.5, min_p=0.1, seed=1 << 63),
    Sampling(temperature=0.9, seed=5, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3),
    Sampling(repetition_penalty=1.9, frequency_penalty=1.5),
    Sampling(temperature=1.1, seed=9, presence_penalty=3.0),  # more than vLLM takes
    Sampling(temperature=0.8, seed=6, logit_bias=((4, 6.0), (9, -3.0))),
    Sampling(temperature=1.2, seed=7, allowed_tokens=(3, 50, 1099)),
]


def runner(vocab: int = VOCAB) -> SimpleNamespace:
    """The part of a runner that the rule looks at."""
    settings = SimpleNamespace(reasoning_config=None)
    model = SimpleNamespace(use_fp64_gumbel=False)
    return SimpleNamespace(device=CPU, max_num_reqs=16, vocab_size=vocab, vllm_config=settings, model_config=model)


def session_of(sampling: Sampling, transcript: list[int], drafts: tuple[int, ...]) -> VerificationInput:
    return VerificationInput(replace(sampling, noise=Noise.VLLM), transcript, 3, tuple(map(DraftToken, drafts)))


def test_tokens_and_log_probabilities_are_those_of_the_rule_in_torch() -> None:
    rng = np.random.default_rng(2)
    native, plain = Sampler(CPU, NativeRule(runner())), Sampler(CPU)
    for _ in range(4):  # sessions change places, texts and drafts, as they do between steps
        sessions = []
        for i in rng.permutation(len(SETTINGS)):
            text = rng.integers(0, 60, 4 + rng.integers(6)).tolist()
            sessions.append(session_of(SETTINGS[i], text, tuple(rng.integers(0, 60, rng.integers(4)).tolist())))
        rows = sum(session.rows for session in sessions)
        logits = torch.from_numpy(rng.normal(0, 2, (rows, VOCAB)).astype(np.float32))
        before = logits.clone()
        ours, theirs = plain.sample(logits, sessions), native.sample(logits, sessions)
        assert torch.equal(logits, before)
        assert [token_ids(each.tokens) for each in theirs] == [token_ids(each.tokens) for each in ours]
        for one, other in zip(ours, theirs, strict=True):
            for token, same in zip(one.tokens, other.tokens, strict=True):
                assert same.logp == pytest.approx(token.logp, abs=1e-4)


def test_it_takes_the_tokens_that_were_recorded_from_vllm() -> None:
    golden = json.loads((Path(__file__).parents[2] / "proto" / "vllm_noise.json").read_text())
    vocab, rows = golden["vocab"], len(golden["drafts"]) + 1
    numbers = np.arange(1, vocab + 1, dtype=np.uint64) * np.arange(1, rows + 1, dtype=np.uint64)[:, None]
    mixed = (numbers * np.uint64(2654435761)) % np.uint64(1 << 32)
    logits = torch.from_numpy(((mixed >> np.uint64(12)).astype(np.float64) / 65536 - 8).astype(np.float32))
    sampler = Sampler(CPU, NativeRule(runner(vocab)))
    drafts = tuple(map(DraftToken, golden["drafts"]))
    for draw in golden["draws"]:
        settings = dict(draw["settings"])
        bias = tuple((int(token), value) for token, value in settings.pop("logit_bias", {}).items())
        allowed = tuple(settings.pop("allowed_token_ids", ()))
        seed = draw["seed"] % (1 << 64)
        sampling = Sampling(seed=seed, logit_bias=bias, allowed_tokens=allowed, noise=Noise.VLLM, **settings)
        session = VerificationInput(sampling, golden["prompt"] + golden["text"], len(golden["prompt"]), drafts)
        assert list(token_ids(sampler.sample(logits, [session])[0].tokens)) == draw["tokens"], draw


def test_settings_that_vllm_refuses_are_left_to_the_rule_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native_settings(Sampling(temperature=1.0, presence_penalty=3.0)) is None
    assert native_settings(Sampling(temperature=1.0, logit_bias=tuple((i, 1.0) for i in range(2000)))) is None
    left: list[Sampling] = []
    choose = VllmRule.choose
    monkeypatch.setattr(VllmRule, "choose", lambda *args: left.extend(s.sampling for s in args[2]) or choose(*args))
    sessions = [session_of(sampling, [1, 2, 3, 4], ()) for sampling in SETTINGS]
    Sampler(CPU, NativeRule(runner())).sample(torch.randn(len(sessions), VOCAB), sessions)
    assert [sampling.presence_penalty for sampling in left] == [3.0]
