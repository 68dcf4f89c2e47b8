"""vLLM's own Gumbel noise, entry by entry: with it a text is what a plain `vllm serve` draws for the seed.

Model Runner V2 (vLLM 0.32, `vllm/v1/worker/gpu/sample/gumbel.py`) takes the argmax of processed logits plus
G(seed, position, token) in float32, where

    h = MurmurHash3 of seed and position (Appleby 2011, x86, 32 bits), then of the token,
    u = (h + 1/2) / 2^32, rounded to float32,
    G = -log(-log(1 - u)), so that loud noise comes from small u, which float32 resolves best,

and log(1 - u) is a polynomial where u < 1/4. The position is that of the token before the one that is drawn. Hash,
uniform and polynomial are copied bit for bit. The two logarithms round differently on every device, also between vLLM's
own; here they are the portable logarithm, rounded to float32, which is the same in numpy and torch on any machine and
within two units in the last place of vLLM's.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from outrider.proto.noise import TorchNoise, portable_log

_MASK = 0xFFFFFFFF
_KEY_1, _KEY_2, _ADDEND, _FINAL_1, _FINAL_2 = 0xCC9E2D51, 0x1B873593, 0xE6546B64, 0x85EBCA6B, 0xC2B2AE35
_BYTES = 16  # four words are hashed
_UPPER_HALF, _LOWER_HALF = np.float32(2.0**-16), np.float32(2.0**-32)
_QUARTER = 0.25
_LEAST = 2.0**-24  # 1 - u is taken for no less
_POLYNOMIAL = [float(np.float32(1 / n)) for n in (8, 7, 6, 5, 4, 3, 2, 1)]


def row_state(seed: int, position: int) -> int:
    """Return the state of the hash after `seed` and the position before `position`, as an unsigned 32-bit integer.

    Args:
        seed: 64 bits; vLLM's negative seeds are those less 2^64.
        position: absolute, of the token that is drawn; 1 or more.
    """
    state = 0
    for word in (seed & _MASK, (seed >> 32) & _MASK, (position - 1) & _MASK):
        state ^= _rotated((word * _KEY_1) & _MASK, 15) * _KEY_2 & _MASK
        state = (_rotated(state, 13) * 5 + _ADDEND) & _MASK
    return state


def _rotated(word: int, bits: int) -> int:
    return (word << bits | word >> (32 - bits)) & _MASK


def hashed(state: int, tokens: np.ndarray) -> np.ndarray:
    """Return the hash [..] uint32 of `row_state` and each of `tokens` [..] (any integer type)."""
    return _hash_mixed(np.uint32(state), _mixed(tokens.astype(np.uint32)))


def _mixed(tokens: np.ndarray) -> np.ndarray:
    """Mix tokens uint32 as words of the hash; the same for every row."""
    x = tokens * np.uint32(_KEY_1)
    x = x << np.uint32(15) | x >> np.uint32(17)
    mixed: np.ndarray = x * np.uint32(_KEY_2)
    return mixed


def _hash_mixed(state: np.uint32, mixed: np.ndarray) -> np.ndarray:
    x = mixed ^ state
    shifted = x >> np.uint32(19)
    x <<= np.uint32(13)
    x |= shifted
    x *= np.uint32(5)
    x += np.uint32(_ADDEND)
    x ^= np.uint32(_BYTES)
    for shift, factor in ((16, _FINAL_1), (13, _FINAL_2)):
        x ^= np.right_shift(x, np.uint32(shift), out=shifted)
        x *= np.uint32(factor)
    x ^= np.right_shift(x, np.uint32(16), out=shifted)
    return x


def uniform32(bits: np.ndarray) -> np.ndarray:
    """Return u = (bits + 1/2) / 2^32 rounded to float32, in (0, 1], for `bits` uint32."""
    upper = (bits >> np.uint32(16)).astype(np.float32) * _UPPER_HALF
    lower = ((bits & np.uint32(0xFFFF)).astype(np.float32) + np.float32(0.5)) * _LOWER_HALF
    u: np.ndarray = upper + lower
    return u


def gumbel32(seed: int, position: int, tokens: np.ndarray) -> np.ndarray:
    """Return G(seed, position, token) for each token; float32 in the shape of `tokens`."""
    return gumbel32_of_bits(hashed(row_state(seed, position), tokens))


def gumbel32_of_bits(bits: np.ndarray) -> np.ndarray:
    """Return G float32 of hashes uint32, in their shape."""
    u = uniform32(bits)
    direct = portable_log(np.maximum(np.float32(1) - u, np.float32(_LEAST)).astype(np.float64)).astype(np.float32)
    exponential = -np.where(u < np.float32(_QUARTER), -u * _series(u, np.float32), direct)
    gumbel: np.ndarray = -portable_log(exponential.astype(np.float64)).astype(np.float32)
    return gumbel


def _series(u: Any, number: Any) -> Any:
    """Return -log(1 - u) / u to u^7 for small u, on numpy and torch arrays; `number` makes a constant of their type."""
    total = number(_POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        total = number(coefficient) + u * total
    return total


def exponentials_for_proposals(seed: int, position: int, tokens: np.ndarray) -> np.ndarray:
    """Return E float64 with G = -log E to within 3e-6 where G > -1, by the machine's logarithm; for drafters alone."""
    u = (hashed(row_state(seed, position), tokens) + 0.5) * 2.0**-32
    return -np.log1p(-u)


class VllmNoiseSieve:
    """Finds the few tokens whose noise reaches a bound, with one integer hash and one comparison a token.

    G falls as u grows, so a bound on G is one on the hash. Tokens are mixed once; it is for one vocabulary.
    """

    _SLACK = 1e-5  # of the bound and of u: more than float32's rounding of either logarithm
    _SLACK_BITS = 2.0**10

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self._words = _mixed(np.arange(vocab, dtype=np.uint32))

    def bits(self, state: int) -> np.ndarray:
        """Return the hash [vocab] uint32 of every token after the `row_state` `state`."""
        return _hash_mixed(np.uint32(state), self._words)

    def most_bits(self, bound: float) -> int:
        """Return a hash that no token with G >= `bound` exceeds, 0 to 2^32 - 1."""
        u = -math.expm1(-math.exp(min(50.0, self._SLACK - bound)))
        return min(_MASK, int(u * (1 + self._SLACK) * 2.0**32 + self._SLACK_BITS))


class TorchVllmNoise:
    """The same noise in torch, on any device."""

    def __init__(self, torch: Any, device: Any = "cpu") -> None:
        """Put the logarithm's tables on `device`; `torch` is an argument so that this module never imports it."""
        self._torch = torch
        self._device = device
        self._log = TorchNoise(torch, device).log

    def row_states(self, seeds: list[int], positions: list[int]) -> Any:
        """Return the `row_state` [rows] int64 of (seed, position) pairs."""
        states = [row_state(seed, position) for seed, position in zip(seeds, positions, strict=True)]
        return self._torch.tensor(states, dtype=self._torch.int64, device=self._device)

    def hashed(self, states: Any, tokens: Any) -> Any:
        """Return the hash [..., t] int64 in 0..2^32-1 for `states` [...] and `tokens` [..., t] or [t] int64."""
        x = self._rotated((tokens * _KEY_1) & _MASK, 15) * _KEY_2 & _MASK
        x = (self._rotated(x ^ states.unsqueeze(-1), 13) * 5 + _ADDEND) & _MASK
        x = x ^ _BYTES
        for shift, factor in ((16, _FINAL_1), (13, _FINAL_2)):
            x = ((x ^ x >> shift) * factor) & _MASK
        return x ^ x >> 16

    def _rotated(self, x: Any, bits: int) -> Any:
        return (x << bits | x >> (32 - bits)) & _MASK

    def uniform32(self, bits: Any) -> Any:
        """Return u in (0, 1] float32 of `hashed` int64."""
        upper = (bits >> 16).to(self._torch.float32) * float(_UPPER_HALF)
        return upper + ((bits & 0xFFFF).to(self._torch.float32) + 0.5) * float(_LOWER_HALF)

    def gumbel32_of_bits(self, bits: Any) -> Any:
        """Return G float32 of `hashed` int64, bit-equal to numpy's `gumbel32_of_bits`."""
        torch = self._torch
        u = self.uniform32(bits)
        direct = self._log((1 - u).clamp(min=_LEAST).double()).float()
        exponential = -torch.where(u < _QUARTER, -u * _series(u, float), direct)
        return -self._log(exponential.double()).float()

    def fast_gumbel32_of_bits(self, bits: Any) -> Any:
        """Return the same to within 5e-6, by the machine's own logarithm."""
        torch = self._torch
        u = self.uniform32(bits)
        return -torch.log(-torch.where(u < _QUARTER, torch.log1p(-u), torch.log((1 - u).clamp(min=_LEAST))))
