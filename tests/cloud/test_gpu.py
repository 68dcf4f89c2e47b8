"""Promises that must hold on a GPU too; skipped where there is none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.cloud.distribution import VerificationInput
from outrider.cloud.target import SessionRows, load_target
from outrider.cloud.vllm_rule import VllmRule
from outrider.proto.noise import TorchNoise, gumbel
from outrider.proto.types import DraftToken, Noise, Sampling
from outrider.proto.vllm_noise import TorchVllmNoise, gumbel32

pytestmark = pytest.mark.gpu


def test_the_noise_has_the_same_bits_on_the_gpu() -> None:
    noise = TorchNoise(torch, "cuda")
    tokens = torch.arange(8192, device="cuda")
    on_gpu = noise.gumbel(noise.row_keys([7], [12345]), tokens)[0].cpu().numpy()
    assert np.array_equal(on_gpu, gumbel(7, 12345, np.arange(8192)))


def test_vllms_noise_has_the_same_bits_and_tokens_on_the_gpu() -> None:
    noise = TorchVllmNoise(torch, "cuda")
    tokens = torch.arange(8192, device="cuda")
    on_gpu = noise.gumbel32_of_bits(noise.hashed(noise.row_states([7], [12345]), tokens))[0].cpu().numpy()
    assert np.array_equal(on_gpu, gumbel32(7, 12345, np.arange(8192)))
    cut = Sampling(temperature=0.8, seed=9, top_k=50, repetition_penalty=1.2, noise=Noise.VLLM)
    for sampling in (Sampling(temperature=1.0, seed=9, noise=Noise.VLLM), cut):
        session = VerificationInput(sampling, [1, 2, 3], 1, tuple(map(DraftToken, (4, 5))))
        logits = torch.randn(3, 8192, generator=torch.Generator().manual_seed(1))
        chosen = [
            VllmRule(torch.device(device)).choose(logits.to(device), [session], np.zeros(3, np.int64)).tokens.tolist()
            for device in ("cpu", "cuda")
        ]
        assert chosen[0] == chosen[1]


def test_the_target_on_the_gpu_agrees_with_the_one_on_the_cpu() -> None:
    tokens = tuple(range(100, 160))
    logits = []
    for device in ("cpu", "cuda"):
        target = load_target("reference", device=device)
        logits.append(target.forward([SessionRows(target.pool.allocate(64), tokens, len(tokens))]).cpu())
    assert torch.allclose(*logits, atol=1e-3)
    assert torch.equal(*(one.argmax(dim=-1) for one in logits))
