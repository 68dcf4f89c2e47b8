"""vLLM's noise as Outrider computes it: the bits of vLLM's kernels, the same in numpy and torch, and Gumbel."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from outrider.proto.vllm_noise import (
    TorchVllmNoise,
    VllmNoiseSieve,
    exponentials_for_proposals,
    gumbel32,
    gumbel32_of_bits,
    hashed,
    row_state,
    uniform32,
)

# Recorded from vLLM; the file says how. Its seeds are signed, and its positions those of the token before.
GOLDEN = json.loads((Path(__file__).parent / "vllm_noise.json").read_text())
ENTRIES = [(seed % (1 << 64), position + 1, token, *rest) for seed, position, token, *rest in GOLDEN["entries"]]
ENDS = np.array([0, 1, (1 << 30) - 1, 1 << 30, (1 << 32) - 200, (1 << 32) - 1], dtype=np.uint32)
PAIRS = [(0, 1), (1, 5), ((1 << 64) - 1, 99), (1 << 63, 100_000)]


@pytest.fixture(scope="module")
def torch():
    torch = pytest.importorskip("torch", reason="needs torch: pip install --editable '.[all]'")
    torch.set_num_threads(1)
    return torch


def test_the_table_has_seeds_of_both_signs_and_all_bits():
    assert len(ENTRIES) == 168
    assert {seed >> 63 for seed, *_ in ENTRIES} == {0, 1}
    assert any(seed >> 32 and not seed >> 63 for seed, *_ in ENTRIES)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: "-".join(map(str, entry[:3])))
def test_bits_and_uniforms_are_vllms_and_the_noise_is_but_for_its_last_bits(entry):
    seed, position, token, bits, u, noise = entry
    tokens = np.array([token])
    assert int(hashed(row_state(seed, position), tokens)[0]) == bits
    assert float(uniform32(np.array([bits], np.uint32))[0]).hex() == u
    ours, theirs = gumbel32(seed, position, tokens)[0], np.float32(float.fromhex(noise))
    # Near 0 the noise keeps the absolute error of the logarithm inside it.
    assert abs(ours - theirs) <= 2 * max(np.spacing(abs(theirs)), np.float32(2.0**-24))


@pytest.mark.parametrize(
    "wrong", [lambda s, p: (s, p - 1), lambda s, p: (s >> 32, p), lambda s, p: (s & 0xFFFFFFFF, p)]
)
def test_another_count_of_positions_or_half_a_seed_gives_other_noise(wrong):
    of_table = {(seed, position): bits for seed, position, token, bits, *_ in ENTRIES if token == 0}
    differing = [bits != int(hashed(row_state(*wrong(*key)), np.array([0]))[0]) for key, bits in of_table.items()]
    assert sum(differing) > len(differing) / 4


def test_numpy_and_torch_agree_bit_for_bit_over_whole_vocabularies(torch):
    noise, tokens = TorchVllmNoise(torch), np.arange(60_000)
    states = noise.row_states([seed for seed, _ in PAIRS], [position for _, position in PAIRS])
    bits = noise.hashed(states, torch.from_numpy(tokens))
    in_numpy = np.stack([gumbel32(seed, position, tokens) for seed, position in PAIRS])
    assert np.array_equal(noise.gumbel32_of_bits(bits).numpy().view(np.int32), in_numpy.view(np.int32))
    ends = torch.from_numpy(ENDS.astype(np.int64))
    assert np.array_equal(noise.gumbel32_of_bits(ends).numpy(), gumbel32_of_bits(ENDS))
    assert np.array_equal(noise.uniform32(ends).numpy(), uniform32(ENDS))


def test_the_fast_noise_is_the_noise_to_5e_6(torch):
    noise = TorchVllmNoise(torch)
    bits = torch.cat([torch.from_numpy(ENDS.astype(np.int64)), torch.randint(1 << 32, (100_000,))])
    assert float((noise.fast_gumbel32_of_bits(bits) - noise.gumbel32_of_bits(bits)).abs().max()) < 5e-6


def test_noise_for_proposals_is_the_noise_to_3e_6_but_for_the_quietest():
    tokens = np.arange(200_000)
    noise = gumbel32(3, 4, tokens)
    difference = np.abs(noise + np.log(exponentials_for_proposals(3, 4, tokens)))
    assert difference[noise > -1].max() < 3e-6
    assert difference.max() < 1e-3


def test_uniforms_reach_from_2_to_the_minus_33_to_one():
    assert uniform32(ENDS)[[0, -1]].tolist() == [2.0**-33, 1.0]
    assert gumbel32_of_bits(ENDS)[[0, -1]].tolist() == pytest.approx([33 * math.log(2), -math.log(24 * math.log(2))])


def test_the_noise_is_gumbel():
    noise = np.sort(gumbel32(8, 9, np.arange(1 << 16)).astype(float))
    cdf = np.exp(-np.exp(-noise))
    distance = np.abs(cdf - (np.arange(len(noise)) + 0.5) / len(noise)).max()
    assert distance < 1.95 / math.sqrt(len(noise)), "Kolmogorov-Smirnov at 0.1 %"
    assert noise.mean() == pytest.approx(0.57722, abs=0.02)


@pytest.mark.parametrize("kind", ["token", "position", "seed"])
def test_hashes_fill_256_buckets_evenly_and_neighbours_are_independent(kind):
    if kind == "token":
        bits = hashed(row_state(7, 11), np.arange(1 << 14))
    else:
        keys = [(7, i) if kind == "position" else (i, 7) for i in range(1, 1 << 13)]
        bits = np.array([hashed(row_state(*key), np.array([11]))[0] for key in keys])
    for buckets in (bits >> np.uint32(24), (bits[:-1] >> np.uint32(28)) * np.uint32(16) + (bits[1:] >> np.uint32(28))):
        counts = np.bincount(buckets, minlength=256)
        expected = len(buckets) / 256
        assert abs(((counts - expected) ** 2 / expected).sum() - 255) < 5 * math.sqrt(2 * 255)


@pytest.mark.parametrize("vocab", [5, 8192, 20_000])
def test_the_sieve_finds_every_token_that_reaches_a_bound_and_hardly_any_other(vocab):
    sieve, tokens = VllmNoiseSieve(vocab), np.arange(vocab)
    for seed, position in PAIRS:
        noise = gumbel32(seed, position, tokens)
        assert np.array_equal(sieve.bits(row_state(seed, position)), hashed(row_state(seed, position), tokens))
        for bound in [*map(float, np.sort(noise)[[0, vocab // 2, -2, -1]]), -5.0, -1.0, 0.0, 0.3665, 1.25, 2.0, 6.5]:
            mask = sieve.bits(row_state(seed, position)) <= sieve.most_bits(bound)
            assert mask[noise >= bound].all(), bound
            assert mask.sum() <= (noise >= bound - 1e-2).sum(), bound
    assert sieve.most_bits(-math.inf) == (1 << 32) - 1
