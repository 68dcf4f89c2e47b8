"""What the trained rules look at; NaN: not known. Training and drafting make their inputs here, by the same lines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.proto.types import DraftToken

DRAFT_INPUTS = ("confidence", "perturbed_probability", "entropy", "temperature", "depth")
BLOCK_INPUTS = (
    "mean_confidence",
    "min_confidence",
    "mean_entropy",
    "max_entropy",
    "temperature",
    "known",
    "length",
)
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)  # that SpecKV's network chooses among
Signal = Sequence[float] | np.ndarray  # [n]
_SURE = 1e-4  # a probability no nearer to 0 or 1 counts


def signs_of(drafts: Sequence[DraftToken]) -> tuple[tuple[float, ...], ...]:
    """Return ids, confidence, entropy and perturbed probability of drafts, [n] each."""
    return tuple(zip(*drafts, strict=True)) or ((),) * 4


def draft_inputs(
    confidence: Signal, perturbed_probability: Signal, entropy: Signal, temperature: float, depth: Signal
) -> np.ndarray:
    """Of single drafts of one text.

    Args:
        confidence: [n] the drafter's probability of each; empty: not known, and so for the next two.
        perturbed_probability: [n] softmax of log probability and shared noise at each.
        entropy: [n] of the drafter's distribution, nats.
        temperature: of the text.
        depth: [n] drafts before it that no commit has settled.

    Returns:
        [n, 5] as `DRAFT_INPUTS`; probabilities as log odds, depth as log(1 + depth).
    """
    rows = np.empty((len(DRAFT_INPUTS), len(depth)))
    for row, signal in zip(rows, (confidence, perturbed_probability, entropy), strict=False):
        row[:] = signal if len(signal) else np.nan
    rows[3] = temperature
    sure = np.minimum(np.maximum(rows[:2], _SURE), 1 - _SURE)
    rows[:2] = np.log(sure / (1 - sure))
    rows[4] = np.log1p(depth)
    return rows.T


def block_inputs(
    confidence: Sequence[float], entropy: Sequence[float], temperature: float, known: int, lengths: Sequence[int]
) -> np.ndarray:
    """Of a block of drafts whose first are there, at each length that it may have.

    Args:
        confidence: [known] the drafter's probability of each draft that is there; empty: not known, and so for
        entropy: [known] of its distribution, nats.
        temperature: of the text.
        known: drafts that are there.
        lengths: [m] of the whole block, at least `known`.

    Returns:
        [m, 7] as `BLOCK_INPUTS`; `known` as log(1 + known), `length` as log(length).
    """
    sure = [value for value in confidence if value == value]
    wide = [value for value in entropy if value == value]
    inputs = np.empty((len(lengths), len(BLOCK_INPUTS)))
    inputs[:, 0] = sum(sure) / len(sure) if sure else np.nan
    inputs[:, 1] = min(sure, default=np.nan)
    inputs[:, 2] = sum(wide) / len(wide) if wide else np.nan
    inputs[:, 3] = max(wide, default=np.nan)
    inputs[:, 4] = temperature
    inputs[:, 5] = np.log1p(known)
    inputs[:, 6] = np.log(lengths)
    return inputs
