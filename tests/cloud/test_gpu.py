"""Promises that must hold on a GPU too; skipped where there is none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.cloud.target.target import SessionRows
from outrider.cloud.target.target_loading import load_target
from outrider.proto.noise import TorchNoise, gumbel

pytestmark = pytest.mark.gpu


def test_the_noise_has_the_same_bits_on_the_gpu() -> None:
    noise = TorchNoise(torch, "cuda")
    tokens = torch.arange(8192, device="cuda")
    on_gpu = noise.gumbel(noise.row_keys([7], [12345]), tokens)[0].cpu().numpy()
    assert np.array_equal(on_gpu, gumbel(7, 12345, np.arange(8192)))


def test_the_target_on_the_gpu_agrees_with_the_one_on_the_cpu() -> None:
    tokens = tuple(range(100, 160))
    logits = []
    for device in ("cpu", "cuda"):
        target = load_target("reference", device=device)
        logits.append(target.forward([SessionRows(target.pool.allocate(64), tokens, len(tokens))]).cpu())
    assert torch.allclose(*logits, atol=1e-3)
    assert torch.equal(*(one.argmax(dim=-1) for one in logits))
