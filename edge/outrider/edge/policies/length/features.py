"""Inputs of the trained rules, NaN where not known; training and drafting make them by the same lines."""

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
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)  # SpecKV's network chooses among them
Signal = Sequence[float] | np.ndarray  # [n]
_SURE = 1e-4  # a probability no nearer to 0 or 1 counts


def signals_of(drafts: Sequence[DraftToken]) -> tuple[tuple[float, ...], ...]:
    """Return ids, confidence, entropy and perturbed probability of drafts, [n] each."""
    return tuple(zip(*drafts, strict=True))[:4] or ((),) * 4


def draft_inputs(
    confidence: Signal, perturbed_probability: Signal, entropy: Signal, temperature: float, depth: Signal
) -> np.ndarray:
    """Return the inputs for single drafts of one text.

    Args:
        confidence: [n] the drafter's probability of each; this and the next two are empty where not known.
        perturbed_probability: [n] softmax of log probability and shared noise at each.
        entropy: [n] entropy of the drafter's distribution at each, in nats.
        temperature: the text's temperature.
        depth: [n] drafts before each that no commit has verified.

    Returns:
        [n, 5] in the order of `DRAFT_INPUTS`; probabilities as log odds, depth as log(1 + depth).
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
    """Return the inputs for a block whose first drafts are there, at each length that it may have.

    Args:
        confidence: [known] the drafter's probability of each draft that is there; empty: not known.
        entropy: [known] entropy of its distribution, in nats; empty: not known.
        temperature: the text's temperature.
        known: drafts that are there.
        lengths: [m] lengths of the whole block, at least `known`.

    Returns:
        [m, 7] in the order of `BLOCK_INPUTS`; `known` as log(1 + known), `length` as log(length).
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
