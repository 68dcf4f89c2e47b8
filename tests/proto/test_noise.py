"""The shared noise: the same bits everywhere, uniform, independent, and long in the tail."""

from __future__ import annotations

import decimal
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.proto.noise import (
    NoiseSieve,
    TorchNoise,
    exponentials_for_proposals,
    gumbel,
    portable_log,
    random_bits,
    row_key,
    uniform,
)

LAST_SEED = (1 << 64) - 1

# (seed, position, token, bits, u, G): computed once, and never to change; a text depends on them for ever.
KNOWN = [
    (0, 0, 0, 0xE220A8397B1DCDAF, "0x1.c4415072f63b9p-1", "0x1.0b1db1903842cp+1"),
    (0, 0, 1, 0x6E789E6AA1B965F4, "0x1.b9e279aa86e5ap-2", "0x1.640b82427a2fbp-3"),
    (1, 0, 0, 0x0C7BA33B30576AB0, "0x1.8f7467660aed0p-5", "-0x1.1b03c05affb17p+0"),
    (0, 1, 0, 0x003917C34788E82A, "0x1.c8be1a3c47400p-11", "-0x1.f3d16a1a46808p+0"),
    (42, 17, 151935, 0x484429265B482CD3, "0x1.2110a4996d20ap-2", "-0x1.e122f6b2d32edp-3"),
    (LAST_SEED, 0, 0, 0x37867C690A5EE72B, "0x1.bc33e34852f74p-3", "-0x1.b25c797e2c757p-2"),
    (LAST_SEED, (1 << 31) - 1, (1 << 31) - 1, 0xE348F84C832EEA94, "0x1.c691f099065ddp-1", "0x1.107e91c1b1887p+1"),
    (12345678901234567890, 1 << 40, 50256, 0xE6099D23096DB5A1, "0x1.cc133a4612db7p-1", "0x1.1e26056c0274ap+1"),
]


@pytest.fixture(scope="module")
def torch():
    torch = pytest.importorskip("torch", reason="needs torch: pip install --editable '.[all]'")
    torch.set_num_threads(1)
    return torch


@pytest.mark.parametrize(("seed", "position", "token", "bits", "u", "g"), KNOWN)
def test_known_entries_never_change(seed, position, token, bits, u, g):
    tokens = np.array([token])
    assert int(random_bits(seed, position, tokens)[0]) == bits
    assert uniform(random_bits(seed, position, tokens))[0].hex() == u
    assert gumbel(seed, position, tokens)[0].hex() == g


def test_known_row_keys_never_change():
    assert row_key(LAST_SEED, 12345) == 0x7A58C0E57A2D7CD0


@pytest.mark.parametrize(("seed", "position", "token", "bits", "u", "g"), KNOWN)
def test_torch_gives_the_known_entries_too(torch, seed, position, token, bits, u, g):
    noise = TorchNoise(torch)
    keys, tokens = noise.row_keys([seed], [position]), torch.tensor([token])
    assert int(noise.random_bits(keys, tokens)[0, 0]) % (1 << 64) == bits
    assert float(noise.uniform(noise.random_bits(keys, tokens))[0, 0]).hex() == u
    assert float(noise.gumbel(keys, tokens)[0, 0]).hex() == g


def test_numpy_and_torch_agree_bit_for_bit_over_whole_vocabularies(torch):
    noise = TorchNoise(torch)
    pairs = [(0, 0), (1, 5), (LAST_SEED, 99), (1 << 63, 100_000)]
    tokens = np.arange(50_000)
    keys = noise.row_keys([seed for seed, _ in pairs], [position for _, position in pairs])
    in_torch = noise.gumbel(keys, torch.from_numpy(tokens)).numpy()
    in_numpy = np.stack([gumbel(seed, position, tokens) for seed, position in pairs])
    assert np.array_equal(in_torch.view(np.int64), in_numpy.view(np.int64))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, LAST_SEED), position=st.integers(0, 1 << 40), first=st.integers(0, (1 << 31) - 100))
def test_an_entry_does_not_depend_on_what_it_is_asked_with(seed, position, first):
    tokens = np.arange(first, first + 50)
    together = gumbel(seed, position, tokens)
    assert together[17] == gumbel(seed, position, tokens[17:18])[0]
    assert np.array_equal(together[::-1], gumbel(seed, position, tokens[::-1]))
    assert np.array_equal(together, gumbel(seed, position, tokens.astype(np.uint32)))


def test_the_torch_logarithm_equals_the_portable_one_bit_for_bit(torch):
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.random(20_000), np.exp(rng.uniform(-700, 700, 20_000)), 1 + rng.normal(0, 1e-6, 20_000)])
    assert np.array_equal(TorchNoise(torch).log(torch.from_numpy(x)).numpy(), portable_log(x))


def test_the_portable_logarithm_is_accurate_to_1e_13():
    rng = np.random.default_rng(1)
    x = np.concatenate(
        [
            rng.random(2000),
            1 - rng.random(2000) * 2.0 ** -rng.integers(1, 53, 2000),
            1 + rng.random(2000) * 2.0 ** -rng.integers(1, 52, 2000),
            np.exp(rng.uniform(-700, 700, 2000)),
            np.array([0.6875, 1.375, np.nextafter(1.375, 0), np.nextafter(0.6875, 1), 2.0**-1022, 1.5e308]),
        ]
    )
    x = x[x != 1.0]
    with decimal.localcontext(prec=40):
        exact = [decimal.Decimal(float(v)).ln() for v in x]
        errors = [abs(decimal.Decimal(float(v)) / e - 1) for v, e in zip(portable_log(x), exact, strict=True)]
    assert max(errors) < 1e-13
    assert portable_log(np.array([1.0]))[0] == 0.0


def test_the_portable_logarithm_of_a_power_of_two_is_within_one_bit():
    for k in (-1000, -52, -1, 1, 10, 1000):
        assert portable_log(np.array([2.0**k]))[0] == pytest.approx(k * math.log(2), rel=3e-16)


def test_uniforms_reach_from_2_to_the_minus_53_to_one_minus_that():
    ends = uniform(np.array([0, (1 << 64) - 1], dtype=np.uint64))
    assert ends.tolist() == [2.0**-53, 1 - 2.0**-53]
    noise = -portable_log(-portable_log(ends))
    assert noise.tolist() == pytest.approx([-math.log(53 * math.log(2)), 53 * math.log(2)])
    assert np.isfinite(noise).all()


def test_the_tail_is_not_cut_where_float32_would_cut_it():
    above = (1 << 64) - (1 << 33)  # u just above 1 - 2^-30, which float32 rounds to 1
    u = uniform(np.array([above], dtype=np.uint64))[0]
    assert 1 - 2.0**-30 < u < 1
    assert -math.log(-math.log(u)) > 20 > 16.7, "float32 uniforms end at 16.6"
    neighbours = uniform(np.array([above, above + (1 << 12)], dtype=np.uint64))
    assert neighbours[1] > neighbours[0], "one more of the 52 bits is another number"


@pytest.mark.parametrize("vocab", [5, 8192, 20_000])
def test_the_sieve_finds_every_token_that_reaches_a_bound_and_hardly_any_other(vocab):
    sieve, tokens = NoiseSieve(vocab), np.arange(vocab)
    for seed, position in [(0, 0), (LAST_SEED, 7), (5, 1 << 40)]:
        noise = gumbel(seed, position, tokens)
        reached = [float(g) for g in np.sort(noise)[[0, vocab // 2, -2, -1]]]  # bounds that a token meets exactly
        for bound in [*reached, -5.0, -1.0, 0.0, 0.3665, 0.3666, 2.0, 6.5]:
            mask = sieve.reaches(row_key(seed, position), bound)
            assert mask[noise >= bound].all(), bound
            assert mask.sum() <= (noise >= bound - 1e-5).sum(), bound


def test_the_sieve_keeps_all_above_no_bound_and_none_above_the_largest_noise():
    sieve = NoiseSieve(1000)
    assert sieve.reaches(3, -math.inf).all()
    assert not sieve.reaches(3, 40.0).any()
    assert not sieve.reaches(3, math.inf).any()


def test_the_sieve_has_the_bits_of_pairs_of_a_key_and_a_token():
    pairs = [(0, 0, 3), (LAST_SEED, 9, 4999), (12, 1 << 40, 0)]
    keys = np.array([row_key(seed, position) for seed, position, _ in pairs], np.uint64)
    got = NoiseSieve(5000).bits(keys, np.array([token for *_, token in pairs]))
    assert got.tolist() == [int(random_bits(s, p, np.array([t]))[0]) for s, p, t in pairs]


def test_noise_for_proposals_is_the_noise_to_1e_12():
    tokens = np.arange(100_000)
    assert np.abs(gumbel(3, 4, tokens) + np.log(exponentials_for_proposals(3, 4, tokens))).max() < 1e-12


def chi_square_z(counts, expected):
    """Return by how many standard deviations the statistic lies above its mean."""
    freedom = len(counts) - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


def rows(kind, n=1 << 16):
    """[n] uniforms along one coordinate, the other two fixed."""
    if kind == "token":
        return uniform(random_bits(7, 11, np.arange(n)))
    if kind == "position":
        return np.array([uniform(random_bits(7, i, np.array([11])))[0] for i in range(n // 8)])
    return np.array([uniform(random_bits(i, 7, np.array([11])))[0] for i in range(n // 8)])


@pytest.mark.parametrize("kind", ["token", "position", "seed"])
def test_uniforms_fill_256_buckets_evenly_along_each_coordinate(kind):
    u = rows(kind)
    counts = np.bincount((u * 256).astype(int), minlength=256)
    assert abs(chi_square_z(counts, len(u) / 256)) < 4


@pytest.mark.parametrize("kind", ["token", "position", "seed"])
def test_neighbours_along_each_coordinate_are_independent(kind):
    u = rows(kind)
    for lag in (1, 2, 3, 64):
        pairs = (u[:-lag] * 16).astype(int) * 16 + (u[lag:] * 16).astype(int)
        counts = np.bincount(pairs, minlength=256)
        assert abs(chi_square_z(counts, len(pairs) / 256)) < 5, f"lag {lag}"
        assert abs(np.corrcoef(u[:-lag], u[lag:])[0, 1]) < 4 / math.sqrt(len(u)), f"lag {lag}"


def test_rows_of_neighbouring_seeds_and_positions_are_independent():
    tokens = np.arange(1 << 14)
    bound = 4 / math.sqrt(len(tokens))
    row = gumbel(100, 200, tokens)
    for seed, position in [(101, 200), (100, 201), (101, 201), (200, 100), (101, 199)]:
        assert abs(np.corrcoef(row, gumbel(seed, position, tokens))[0, 1]) < bound, (seed, position)


def test_no_row_is_a_shifted_copy_of_a_neighbouring_one():
    seen = {}
    for seed in range(8):
        for position in range(64):
            for bits in random_bits(seed, position, np.arange(64)).tolist():
                assert bits not in seen, f"{(seed, position)} repeats {seen.get(bits)}"
                seen[bits] = (seed, position)


def test_every_single_bit_is_fair():
    bits = random_bits(5, 6, np.arange(1 << 15))
    shares = [((bits >> np.uint64(k)) & np.uint64(1)).mean() for k in range(64)]
    assert max(abs(share - 0.5) for share in shares) < 4.5 * 0.5 / math.sqrt(1 << 15)


def test_the_noise_is_gumbel():
    noise = np.sort(gumbel(8, 9, np.arange(1 << 16)))
    cdf = np.exp(-np.exp(-noise))
    distance = np.abs(cdf - (np.arange(len(noise)) + 0.5) / len(noise)).max()
    assert distance < 1.95 / math.sqrt(len(noise)), "Kolmogorov-Smirnov at 0.1 %"
    assert noise.mean() == pytest.approx(0.57722, abs=0.02)
