"""Guesses of prompts from TLS records, as in arXiv 2411.01076: features of sizes and times, and a random forest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from research.eavesdropper.tap import Note

SEQUENCE = 64  # records each way whose sizes and gaps are features themselves
SIZE_EDGES = (0, 40, 50, 60, 70, 80, 90, 100, 110, 120, 135, 150, 175, 200, 250, 300, 400, 600, 1000, 2000, 1 << 20)
GAP_EDGES_S = (0, 0.001, 0.003, 0.006, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.05, 0.06, 0.08, 0.1, 0.2, 1e9)
TREES = 400


def features(trace: Sequence[Note]) -> NDArray[np.float64]:
    """Return [f] of one text: counts, sums, histograms and sequences of sizes and gaps, each way and of both."""
    began = trace[0][0] if trace else 0.0
    at, size = np.array([[when - began, bytes_] for when, bytes_ in trace] or [[0.0, 0.0]]).T
    parts = [np.sign(_padded(size, 2 * SEQUENCE)), _padded(size, 2 * SEQUENCE), _padded(np.diff(at), 2 * SEQUENCE)]
    for sign in (1, -1):
        sizes, times = sign * size[sign * size > 0], at[sign * size > 0]
        gaps = np.diff(times)
        last = times[-1] if len(times) else 0.0
        parts += [
            np.array([len(sizes), sizes.sum(), last, *_moments(sizes), *_moments(gaps)]),
            np.histogram(sizes, SIZE_EDGES)[0].astype(float),
            np.histogram(gaps, GAP_EDGES_S)[0].astype(float),
            _padded(sizes, SEQUENCE),
            _padded(gaps, SEQUENCE),
            _padded(times, SEQUENCE),
        ]
    return np.concatenate(parts)


def accuracy(traces: Sequence[tuple[int, int, Sequence[Note]]], test_from: int) -> float:
    """Return the share of texts whose prompt a forest names, which learns from other texts of the same prompts.

    Args:
        traces: prompt, number of the run, and records of each text.
        test_from: number of the first run that is guessed; those before it teach.
    """
    from sklearn.ensemble import RandomForestClassifier  # an optional library

    names = np.array([prompt for prompt, _, _ in traces])
    tested = np.array([run >= test_from for _, run, _ in traces])
    seen = np.stack([features(trace) for _, _, trace in traces])
    forest = RandomForestClassifier(TREES, random_state=0, n_jobs=2).fit(seen[~tested], names[~tested])
    return float(np.mean(forest.predict(seen[tested]) == names[tested]))


def _padded(values: NDArray[np.float64], length: int) -> NDArray[np.float64]:
    return np.pad(values[:length], (0, max(0, length - len(values))))


def _moments(values: NDArray[np.float64]) -> list[float]:
    return [values.mean(), values.std(), values.min(), values.max()] if len(values) else [0.0] * 4
