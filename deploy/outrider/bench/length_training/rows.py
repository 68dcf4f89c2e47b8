"""Training data: inputs and outcomes, row by row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from outrider.bench.replay.traces import HitTrace
from outrider.edge.policies.length.features import BLOCK_INPUTS, DRAFT_INPUTS, LENGTHS, block_inputs, draft_inputs

MAX_DEPTH = 16  # unverified drafts before a draft
KNOWN = (0, 1, 2, 3, 4, 6, 8, 12, 16)  # drafts of a block that are known when its length is chosen


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """Inputs [n, f], NaN where not known, and outcomes [n] from 0 to 1 of n rows."""

    inputs: np.ndarray
    outcomes: np.ndarray

    def __len__(self) -> int:
        return len(self.outcomes)

    @classmethod
    def joined(cls, parts: Sequence[Self], width: int) -> Self:
        """Join parts in their order; `width`: f."""
        if not parts:
            return cls(np.empty((0, width)), np.empty(0))
        return cls(np.concatenate([p.inputs for p in parts]), np.concatenate([p.outcomes for p in parts]))

    def some(self, limit: int, rng: np.random.Generator) -> Self:
        """Return at most `limit` rows, drawn without replacement."""
        if len(self) <= limit:
            return self
        drawn = rng.choice(len(self), limit, replace=False)
        return type(self)(self.inputs[drawn], self.outcomes[drawn])


def draft_rows(traces: Iterable[HitTrace], rng: np.random.Generator) -> TrainingRows:
    """Return a row for every draft: whether it hits, given that those before it in its chain do.

    After r hits in a row a draft may have any number of unverified drafts up to r before it, which depends on the link:
    its depth is drawn evenly, at most `MAX_DEPTH`.
    """
    parts = []
    for trace in traces:
        hits = np.array(trace.hits)
        depth = rng.integers(0, np.minimum(_hits_before(hits), MAX_DEPTH) + 1)
        inputs = draft_inputs(trace.confidence, trace.perturbed_probability, trace.entropy, trace.temperature, depth)
        drafted = ~np.array(trace.silent, dtype=bool) if trace.silent else np.ones(len(hits), dtype=bool)
        parts.append(TrainingRows(inputs[drafted], hits[drafted].astype(float)))
    return TrainingRows.joined(parts, len(DRAFT_INPUTS))


def block_rows(traces: Iterable[HitTrace], rng: np.random.Generator) -> TrainingRows:
    """Return a row for every position: the accepted share of a block of some length that begins there.

    Its length and the number of its known drafts are drawn. Their signals are those along the target's text, since
    proposals after a miss are not recorded.
    """
    parts = []
    for trace in traces:
        until_miss = _hits_from(np.array(trace.hits))
        n = len(until_miss)
        lengths, known = (rng.choice(of, n).tolist() for of in (LENGTHS, KNOWN))
        for start, length in enumerate(lengths):
            if start + length > n:
                continue  # the text ends in it
            there = slice(start, start + min(length, known[start]))
            measures = trace.confidence[there], trace.entropy[there]
            inputs = block_inputs(*measures, trace.temperature, there.stop - start, [length])
            parts.append(TrainingRows(inputs, np.array([min(length, until_miss[start]) / length])))
    return TrainingRows.joined(parts, len(BLOCK_INPUTS))


def _hits_from(hits: np.ndarray) -> np.ndarray:
    """Return [n] hits in a row from each position on."""
    runs = np.zeros(len(hits) + 1, dtype=int)
    for i in range(len(hits) - 1, -1, -1):
        runs[i] = runs[i + 1] + 1 if hits[i] else 0
    return runs[:-1]


def _hits_before(hits: np.ndarray) -> np.ndarray:
    """Return [n] hits in a row right before each position."""
    return np.concatenate(([0], _hits_from(hits[::-1])[::-1][:-1]))
