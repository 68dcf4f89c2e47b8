"""Counter-based Gumbel noise: any entry (seed, position, token) on its own, the same bits in numpy and torch.

The coupled rule (Daliri, Musco, Suresh 2024, "Coupling without Communication") takes, at absolute position i,

    y_i = argmax_t  log p_i(t) + G(seed, i, t),        G = -log(-log u),  u uniform on (0, 1)

which is a sample of p_i by the Gumbel-max theorem, and the drafter proposes argmax_t log q_i(t) + G(seed, i, t)
with the same G. Both sides need the same numbers, whatever machine they run on, so nothing here depends on a
mathematics library: integers are mixed with SplitMix64's finaliser (Steele, Lea, Flood 2014), and the logarithm is
made of float64 additions and multiplications, which IEEE 754 rounds the same everywhere.

u has 52 random bits, u = (k + 1/2) / 2^52: never 0, never 1, and its ends reach G = -3.6 and G = 36.7. (With float32
uniforms the noise would stop at 16.6 and tokens of probability below 1e-7 would never be drawn.)
"""

from __future__ import annotations

import decimal
import math
from typing import Any

import numpy as np

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_GOLDEN_64, _MIX_1_64, _MIX_2_64 = np.uint64(_GOLDEN), np.uint64(_MIX_1), np.uint64(_MIX_2)
_SHIFT_1, _SHIFT_2, _SHIFT_3, _UNUSED_BITS = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(12)

# log(x) = k log 2 + log c + log1p(z / c - 1) with z in [0.6875, 1.375) and c the middle of one of 2^9 slices;
# slices next to 1 have c = 1, so that logarithms near 0 keep their relative accuracy.
_SLICE_BITS = 9
_OFFSET = 0x3FE6000000000000
_LN2 = 0.6931471805599453


def _slice_table() -> tuple[np.ndarray, np.ndarray]:
    """Return 1/c and log c of every slice, [2^9] float64 each; decimal arithmetic is the same on every machine."""
    width = np.int64(1) << np.int64(52 - _SLICE_BITS)
    low_bits = np.int64(_OFFSET) + np.arange(1 << _SLICE_BITS, dtype=np.int64) * width
    middle = (low_bits.view(np.float64) + (low_bits + width).view(np.float64)) / 2
    one = np.int64(0x3FF0000000000000)
    middle[(low_bits >= one - 2 * width) & (low_bits < one + width)] = 1.0
    inverse = (1.0 / middle).astype(np.float32).astype(np.float64)  # short numbers, whose exact log c follows
    with decimal.localcontext(prec=30):
        log_c = [-float(decimal.Decimal(float(number)).ln()) for number in inverse]
    return inverse, np.array(log_c)


_INVERSE, _LOG_C = _slice_table()


def row_key(seed: int, position: int) -> int:
    """Return the 64-bit key of all noise at one position, as an unsigned Python integer."""
    return _mix_int(_mix_int((seed + _GOLDEN) & _MASK) ^ _mix_int((position * _MIX_1 + _GOLDEN) & _MASK))


def _mix_int(x: int) -> int:
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def random_bits(seed: int, position: int, tokens: np.ndarray) -> np.ndarray:
    """Return 64 random bits for each token, uint64 in the shape of `tokens` (any integer type, ids >= 0)."""
    # In place, with constants made once: a drafter needs 128 entries a token, where each new array costs 1 us.
    x = tokens.astype(np.uint64)
    x *= _GOLDEN_64
    x += np.uint64((row_key(seed, position) + _GOLDEN) & _MASK)  # the golden ratio once more: tokens count from one
    high = np.empty_like(x)
    x ^= np.right_shift(x, _SHIFT_1, out=high)
    x *= _MIX_1_64
    x ^= np.right_shift(x, _SHIFT_2, out=high)
    x *= _MIX_2_64
    x ^= np.right_shift(x, _SHIFT_3, out=high)
    return x


def uniform(bits: np.ndarray) -> np.ndarray:
    """Return u = (k + 1/2) / 2^52 in (0, 1) from the upper 52 bits; float64 in the shape of `bits`."""
    u: np.ndarray = (bits >> _UNUSED_BITS).astype(np.float64)
    u += 0.5
    u *= 2.0**-52
    return u


def gumbel(seed: int, position: int, tokens: np.ndarray) -> np.ndarray:
    """Return G(seed, position, token) for each token; float64 in the shape of `tokens`."""
    return -portable_log(-portable_log(uniform(random_bits(seed, position, tokens))))


def exponentials_for_proposals(seed: int, position: int, tokens: np.ndarray) -> np.ndarray:
    """Return E = -log u, whose -log E is `gumbel` to within 1e-12, in a quarter of its time; float64.

    It takes the machine's own logarithm, so drafters alone may use it: a last bit that differs costs a proposal one hit
    in a million million, and no text.
    """
    x = uniform(random_bits(seed, position, tokens))
    np.log(x, out=x)
    np.negative(x, out=x)
    return x


def portable_log(x: np.ndarray) -> np.ndarray:
    """Return the natural logarithm of positive normal float64: relative error below 1e-13, bit-equal anywhere."""
    bits = x.view(np.int64)
    shifted = bits - np.int64(_OFFSET)
    exponent = shifted >> np.int64(52)
    slice_ = (shifted >> np.int64(52 - _SLICE_BITS)) & np.int64((1 << _SLICE_BITS) - 1)
    z = (bits - (exponent << np.int64(52))).view(np.float64)
    r = z * _INVERSE[slice_] - 1.0
    logarithm: np.ndarray = exponent.astype(np.float64) * _LN2 + (_LOG_C[slice_] + _log1p_series(r))
    return logarithm


def _log1p_series(r: Any) -> Any:
    """Return log(1 + r) for |r| < 2^-8 by its Taylor series to r^7, on numpy and torch arrays alike."""
    tail = ((((r * (1 / 7) - 1 / 6) * r + 1 / 5) * r - 1 / 4) * r + 1 / 3) * r - 1 / 2
    return r + r * r * tail


class NoiseSieve:
    """Finds the few tokens whose noise reaches a bound, with one integer hash and one comparison a token.

    G grows with u, and u with the bits, so a bound on G is a bound on the bits and no logarithm is needed. It holds its
    own buffers, so it is for one thread.
    """

    # Three arrays of this many tokens stay in a core's second-level cache.
    _CHUNK = 8192
    # A bound is lowered by this much, in units of G and of the 64 bits: more than its rounding and the bits left out.
    _SLACK = 1e-6
    _SLACK_BITS = 2.0**34

    def __init__(self, vocab: int) -> None:
        self._counters = (np.arange(vocab, dtype=np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
        self._bits = np.empty(min(vocab, self._CHUNK), np.uint64)
        self._shifted = np.empty_like(self._bits)

    def reaches(self, key: int, bound: float) -> np.ndarray:
        """Return [vocab] bool for the `row_key` `key`: True where G >= `bound`, and hardly anywhere else."""
        # u >= exp(-exp(-bound)), as a distance from 1, which is exact for u next to 1.
        distance = -math.expm1(-math.exp(min(50.0, self._SLACK - bound))) * 2.0**64 + self._SLACK_BITS
        min_bits = np.uint64(max(0, (1 << 64) - int(distance)))
        mask = np.empty(len(self._counters), bool)
        for first in range(0, len(mask), self._CHUNK):
            chunk = slice(first, first + self._CHUNK)
            np.greater_equal(self._upper_bits(np.uint64(key), self._counters[chunk]), min_bits, out=mask[chunk])
        return mask

    def bits(self, keys: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return `random_bits` [n] uint64 for pairs of a `row_key` [n] uint64 and a token [n] int64."""
        x = self._counters[tokens] + keys
        x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
        bits: np.ndarray = x ^ (x >> np.uint64(31))
        return bits

    def _upper_bits(self, key: np.uint64, counters: np.ndarray) -> np.ndarray:
        """Compute `bits` in place, of which the upper 31 alone are right: the last mixing would not change them."""
        x, shifted = self._bits[: len(counters)], self._shifted[: len(counters)]
        np.add(counters, key, out=x)
        x ^= np.right_shift(x, np.uint64(30), out=shifted)
        x *= np.uint64(_MIX_1)
        x ^= np.right_shift(x, np.uint64(27), out=shifted)
        x *= np.uint64(_MIX_2)
        return x


class TorchNoise:
    """The same noise in torch, on any device."""

    def __init__(self, torch: Any, device: Any = "cpu") -> None:
        """Put the logarithm's tables on `device`; `torch` is an argument so that this module never imports it."""
        self._torch = torch
        self._device = device
        self._inverse = torch.from_numpy(_INVERSE).to(device)
        self._log_c = torch.from_numpy(_LOG_C).to(device)

    def random_bits(self, row_keys: Any, tokens: Any) -> Any:
        """Return the 64 random bits [..., t] int64 for `row_keys` [...] int64 and `tokens` [..., t] or [t] int64."""
        x = row_keys.unsqueeze(-1) + (tokens + 1) * _signed(_GOLDEN)
        x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(_MIX_1)
        x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(_MIX_2)
        return x ^ ((x >> 31) & ((1 << 33) - 1))

    def row_keys(self, seeds: list[int], positions: list[int]) -> Any:
        """Return the keys [rows] int64 of (seed, position) pairs."""
        keys = [_signed(row_key(seed, position)) for seed, position in zip(seeds, positions, strict=True)]
        return self._torch.tensor(keys, dtype=self._torch.int64, device=self._device)

    def uniform(self, bits: Any) -> Any:
        """Return u in (0, 1) float64 from the upper 52 of `bits` int64."""
        return (((bits >> 12) & ((1 << 52) - 1)).to(self._torch.float64) + 0.5) * 2.0**-52

    def gumbel(self, row_keys: Any, tokens: Any) -> Any:
        """Return the noise [..., t] float64, bit-equal to numpy's `gumbel`."""
        return -self.log(-self.log(self.uniform(self.random_bits(row_keys, tokens))))

    def log(self, x: Any) -> Any:
        """Return the natural logarithm, bit-equal to `portable_log`."""
        torch = self._torch
        bits = x.contiguous().view(torch.int64)
        shifted = bits - _OFFSET
        exponent = shifted >> 52
        slice_ = (shifted >> (52 - _SLICE_BITS)) & ((1 << _SLICE_BITS) - 1)
        z = (bits - (exponent << 52)).view(torch.float64)
        r = z * self._inverse[slice_] - 1.0
        return exponent.to(torch.float64) * _LN2 + (self._log_c[slice_] + _log1p_series(r))


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x
